"""Compare the definitions that fixes were written for with those of another release."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fixes.applier.definitions import fingerprint
from fixes.applier.edits import rewrite
from fixes.applier.errors import ImageMismatch, PackError
from fixes.applier.fix import LoadedFix
from fixes.applier.profiles import Lock, LockedSite
from fixes.authoring.locks import shape_fault
from fixes.authoring.trees import Tree


@dataclass(frozen=True)
class Ported:
    """What became of one definition of a fix in another tree."""

    fix: str
    label: str
    state: str  # unchanged, moved, changed, gone
    detail: str = ""
    diff: str = ""


def port(fixes: Sequence[LoadedFix], lock: Lock, old: Tree | None, new: Tree) -> list[Ported]:
    """Compare the definitions of fixes with those of another tree.

    ``old`` is the tree the lock was recorded from; without it a changed definition comes without
    its diff.
    """
    return [
        _ported(fix, locked, old, new) for fix in fixes for locked in lock.sites.get(fix.id, ())
    ]


def as_issue(found: Sequence[Ported], profile: str, compared: str) -> str:
    """The findings as Markdown, ready to be an issue: its title is the first line.

    ``compared`` says what the profile was compared with.
    """
    different = [one for one in found if one.state != "unchanged"]
    title = f"{profile}: {len(different)} of {len(found)} definitions differ in {compared}"
    if not different:
        return f"# {title}\n"
    rows = []
    for one in different:
        detail = " ".join(one.detail.replace("|", "\\|").split())
        rows.append(f"| {one.fix} | `{one.label}` | {one.state} | {detail} |")
    table = ["| fix | definition | state | what to do |", "| --- | --- | --- | --- |", *rows]
    diffs = [f"```diff\n{one.diff.rstrip()}\n```" for one in different if one.diff]
    return "\n\n".join([f"# {title}", "\n".join(table), *diffs]) + "\n"


def _ported(fix: LoadedFix, locked: LockedSite, old: Tree | None, new: Tree) -> Ported:
    found = _compared(fix, locked, old, new)
    if found.state == "unchanged" or not locked.shape:
        return found
    others = sorted({site.shape for site in fix.sites} - {"", locked.shape})
    fitting = [shape for shape in others if not shape_fault(fix, shape, new)]
    if not fitting:
        return found
    does = f"shape {' and '.join(fitting)} of the fix fits here"
    return replace(found, detail=f"{found.detail}; {does}")


def _compared(fix: LoadedFix, locked: LockedSite, old: Tree | None, new: Tree) -> Ported:
    try:
        text = new.text(locked.file, locked.definition)
    except ImageMismatch as error:
        return Ported(fix.id, locked.label, "gone", str(error))
    if text is not None and fingerprint(text) == locked.sha256:
        return Ported(fix.id, locked.label, "unchanged")
    if text is None:
        place = _elsewhere(locked, new)
        if place is None:
            return Ported(fix.id, locked.label, "gone", _lookalikes(locked, new))
        return Ported(fix.id, locked.label, "moved", f"now {place}")
    was = old.text(locked.file, locked.definition) if old else None
    diff = "".join(
        difflib.unified_diff(
            (was or "").splitlines(keepends=True),
            text.splitlines(keepends=True),
            f"{locked.commit[:12]} {locked.label}",
            f"new {locked.label}",
        )
    )
    site = next((s for s in fix.sites if (s.label, s.shape) == (locked.label, locked.shape)), None)
    if site is None:
        detail = "relied on, not rewritten: read the diff"
    else:
        try:
            rewrite(text, site.label, [(fix.id, site.rewrite)])
            detail = "the codemod still fits: read the diff, run the test, record"
        except PackError as error:
            detail = (
                f"the codemod does not fit ({error}): repaired upstream, or rewrite it;"
                f" to be dropped when {fix.fix.drop_when}"
            )
    return Ported(fix.id, locked.label, "changed", detail, diff if was else "")


def _elsewhere(locked: LockedSite, tree: Tree) -> str | None:
    """The same text under another name or in another file of the package."""
    package = locked.file.split("/")[0]
    last = locked.definition.rpartition(".")[2]
    for path in sorted((tree.folder / package).rglob("*.py")):
        data = path.read_bytes()
        if last.encode() not in data:
            continue
        relative = path.relative_to(tree.folder).as_posix()
        try:
            source = tree.source(relative)
            definitions = source.definitions if source else {}
        except ImageMismatch:
            continue
        for name, spans in definitions.items():
            for span in spans:
                if source and fingerprint(source.text(span)) == locked.sha256:
                    return f"{relative}::{name}"
    return None


def _lookalikes(locked: LockedSite, tree: Tree) -> str:
    if not tree.has(locked.file):
        return f"the folder has no package {locked.file.split('/')[0]}"
    source = tree.source(locked.file)
    if source is None:
        return f"{locked.file} is not there any more"
    if locked.definition in source.definitions:
        return f"the file defines it {len(source.definitions[locked.definition])} times"
    close = difflib.get_close_matches(locked.definition, source.definitions, n=3)
    return f"the file has {', '.join(close)}" if close else "nothing like it in the file"

"""Compare the definitions that fixes were written for with those of another release.

What differs is what the applier would refuse, in its own judgement; this module says what became
of it, and what to do.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from fixes.applier.definitions import fingerprint, newlines
from fixes.applier.edits import rewrite
from fixes.applier.errors import ImageMismatch, PackError, UsageError
from fixes.applier.fix import LoadedFix, Rewrite, Site
from fixes.applier.plan import Mismatches, make_plan
from fixes.applier.profiles import Lock, LockedSite
from fixes.authoring.sources import read_summary
from fixes.authoring.trees import Tree

# A forge takes 65536 characters of text for an issue.
LARGEST_ISSUE = 60_000
_LONGEST_DETAIL = 400


@dataclass(frozen=True)
class Ported:
    """What became of one definition in another tree, or of a module that a fix adds."""

    label: str
    state: str  # unchanged, changed, converted, moved, gone, duplicate, unreadable, taken
    fixes: tuple[str, ...] = ()  # that rewrite it, or add it
    relied_on_by: tuple[str, ...] = ()
    detail: str = ""
    diff: str = ""

    @property
    def users(self) -> str:
        """The fixes that it matters to, in words."""
        return ", ".join([*self.fixes, *(f"{fix} (relies on it)" for fix in self.relied_on_by)])


@dataclass(frozen=True)
class Compared:
    """A package: the commits its definitions were recorded from, and what they were compared with.

    ``absent`` says why the recorded source is not at hand; empty where it is.
    """

    name: str
    recorded: str
    with_: str
    absent: str = ""


@dataclass(frozen=True)
class _Use:
    """A fix and what the lock has of one definition for it: more than one text, or shape, maybe."""

    fix: LoadedFix
    entries: tuple[LockedSite, ...]

    @property
    def rewritten(self) -> bool:
        return self.entries[0].rewritten

    @property
    def shapes(self) -> set[str]:
        return {entry.shape for entry in self.entries}


def port(fixes: Sequence[LoadedFix], lock: Lock, old: Tree | None, new: Tree) -> list[Ported]:
    """Compare the definitions of fixes with those of another tree, each once.

    ``old`` is the tree the lock was recorded from; a package that it lacks, and all without it,
    come without diffs. Raises :class:`UsageError` when ``new`` lacks a package, or ``old`` is not
    what the lock was recorded from.
    """
    uses = _uses(fixes, lock)
    _check_new(uses, new)
    if old is not None:
        _check_old(uses, lock, old)
    refused = _refused(fixes, lock, new)
    found = []
    for label, all_uses in uses.items():
        wrong = [use for use in all_uses if (use.fix.id, label) in refused]
        if wrong:
            reason = refused[wrong[0].fix.id, label]
            state, detail, diff = _what_became(label, wrong, reason, old, new)
        else:
            state, detail, diff = "unchanged", "", ""
        shown = wrong or all_uses
        rewriting = tuple(use.fix.id for use in shown if use.rewritten)
        relying = tuple(use.fix.id for use in shown if not use.rewritten)
        found.append(Ported(label, state, rewriting, relying, detail, diff))
    return found + _taken(fixes, new)


def compared(fixes: Sequence[LoadedFix], lock: Lock, old: Tree | None, new: Tree) -> list[Compared]:
    """The packages that the fixes are for, with where both sides are from."""
    packages: dict[str, dict[str, None]] = {}
    for label, uses in _uses(fixes, lock).items():
        commits = packages.setdefault(_package(label), {})
        commits.update({entry.commit: None for use in uses for entry in use.entries})
    return [
        Compared(name, ", ".join(commits), named(new, name), _absence(old, name))
        for name, commits in sorted(packages.items())
    ]


def named(tree: Tree, package: str) -> str:
    """The commit or version of a package in a tree; the folder's name where nothing says it."""
    known = read_summary(tree.folder).get("packages", {}).get(package, {})
    if said := known.get("commit") or known.get("version"):
        return str(said)
    path = [str(tree.folder)]
    found = importlib.metadata.distributions(name=package.replace("_", "-"), path=path)
    return next((each.version for each in found), tree.folder.name)


# The text of an issue -----------------------------------------------------------------------------


def as_issue(
    found: Sequence[Ported],
    packages: Sequence[Compared],
    profile: str,
    command: str,
    limit: int = LARGEST_ISSUE,
) -> str:
    """The findings as Markdown, ready to be an issue: its title is the first line.

    Diffs beyond ``limit`` bytes are left out, which the text says. ``command`` is what was run.
    """
    different = [one for one in found if one.state != "unchanged"]
    parts = [f"# {_title(found, packages, profile)}", _facts(packages, profile, command)]
    parts += [_absence_told(package) for package in packages if package.absent]
    if different:
        parts.append(_table(different))
    diffs = [_fenced(one.diff) for one in different if one.diff]
    shown, left_out = _within(diffs, limit - _size(parts) - 200)
    parts += shown
    if left_out:
        parts.append(
            f"{left_out} of {len(diffs)} diffs are left out, the text would be longer than {limit}"
            " bytes with them: the command shows all without `--markdown`."
        )
    return "\n\n".join(parts) + "\n"


def _title(found: Sequence[Ported], packages: Sequence[Compared], profile: str) -> str:
    definitions = [one for one in found if one.state != "taken"]
    differ = sum(one.state != "unchanged" for one in definitions)
    taken = len(found) - len(definitions)
    also = f", {taken} that a fix adds are there already," if taken else ""
    where = " and ".join(f"{package.name} {_short(package.with_)}" for package in packages)
    return f"{profile}: {differ} of {len(definitions)} definitions differ{also} in {where}"


def _facts(packages: Sequence[Compared], profile: str, command: str) -> str:
    rows = [f"| {each.name} | {each.recorded} | {each.with_} |" for each in packages]
    head = [f"| profile {profile} | recorded from | compared with |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows]) + f"\n\nFound with `{command}`."


def _absence_told(package: Compared) -> str:
    return (
        f"**The recorded source of {package.name} is not at hand, so no diff can be shown** and"
        f" the lock was not checked against it: {package.absent}"
    )


def _table(different: Sequence[Ported]) -> str:
    rows = ["| definition | state | fixes | what to do |", "| --- | --- | --- | --- |"]
    for one in different:
        detail = textwrap.shorten(one.detail, _LONGEST_DETAIL, placeholder=" ...")
        cell = detail.replace("|", "\\|")
        rows.append(f"| `{one.label}` | {one.state} | {one.users} | {cell} |")
    return "\n".join(rows)


def _fenced(diff: str) -> str:
    """A block of code that no back-ticks inside it can end."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", diff) or [""]))
    return f"{fence}diff\n{diff.rstrip()}\n{fence}"


def _within(parts: Sequence[str], room: int) -> tuple[list[str], int]:
    """The parts that there is room for, and how many there are others."""
    shown = []
    for part in parts:
        if _size([part]) <= room:
            shown.append(part)
            room -= _size([part])
    return shown, len(parts) - len(shown)


def _size(parts: Sequence[str]) -> int:
    return sum(len(part.encode()) + 2 for part in parts)


def _short(commit: str) -> str:
    return commit[:12] if re.fullmatch("[0-9a-f]{40}", commit) else commit


# Judging ------------------------------------------------------------------------------------------


def _uses(fixes: Sequence[LoadedFix], lock: Lock) -> dict[str, list[_Use]]:
    """By definition, the fixes that need it."""
    uses: dict[str, list[_Use]] = {}
    for fix in fixes:
        by_label: dict[str, list[LockedSite]] = {}
        for entry in lock.sites.get(fix.id, ()):
            by_label.setdefault(entry.label, []).append(entry)
        for label, entries in by_label.items():
            uses.setdefault(label, []).append(_Use(fix, tuple(entries)))
    return uses


def _package(label: str) -> str:
    return label.split("/")[0]


def _holds(tree: Tree, package: str) -> bool:
    return (tree.folder / package / "__init__.py").is_file()


def _absence(tree: Tree | None, package: str) -> str:
    """Why the recorded source of a package is not at hand; empty where it is."""
    if tree is None:
        return "no tree to compare with was given"
    said = read_summary(tree.folder).get("missing", {}).get(package, "")
    return "" if _holds(tree, package) else str(said)


def _check_new(uses: dict[str, list[_Use]], new: Tree) -> None:
    for package in dict.fromkeys(map(_package, uses)):
        if not _holds(new, package):
            option = f"--{package.replace('_', '-')}"
            raise UsageError(
                f"{new.folder} holds no {package}, so nothing can be said of it: give a folder"
                f" that does (`sources ... {option} PATH` makes one), or name fixes that do without"
            )


def _check_old(uses: dict[str, list[_Use]], lock: Lock, old: Tree) -> None:
    """What is compared from must be what the lock was recorded from.

    Only a package of which ``sources`` said that it cannot be had may be missing.
    """
    other = []
    for label, its in uses.items():
        package = _package(label)
        if _holds(old, package):
            known = {entry.sha256 for use in its for entry in use.entries}
            if _fingerprint(label, old) not in known:
                other.append(label)
        elif not _absence(old, package):
            raise UsageError(
                f"{old.folder} holds no {package}: give the packages of {lock.profile}, as"
                f" `sources {lock.profile} --into DIR` makes them"
            )
    if other:
        raise UsageError(
            f"{old.folder} is not what {lock.profile}.lock was recorded from: {len(other)} of"
            f" {len(uses)} definitions are others, {other[0]} for one; give the packages of"
            f" {lock.profile}, as `sources {lock.profile} --into DIR` makes them"
        )


def _fingerprint(label: str, tree: Tree) -> str:
    path, _, definition = label.partition("::")
    try:
        text = tree.text(path, definition)
    except ImageMismatch:
        return ""
    return "" if text is None else fingerprint(text)


def _refused(fixes: Sequence[LoadedFix], lock: Lock, new: Tree) -> dict[tuple[str, str], str]:
    """Why the applier refuses, by fix and definition.

    Modules that a fix adds are kept out of its sight: it names only the first that is in the way.
    """
    added = {path for fix in fixes for path in fix.fix.support}
    try:
        make_plan(fixes, lock, lambda path: None if path in added else new.read(path))
    except Mismatches as error:
        return {(each.fix, f"{each.file}::{each.definition}"): each.reason for each in error.found}
    return {}


def _taken(fixes: Sequence[LoadedFix], new: Tree) -> list[Ported]:
    detail = "the package has it already: repaired upstream, or give the fix's module another name"
    return [
        Ported(path, "taken", (fix.id,), detail=detail)
        for fix in fixes
        for path in fix.fix.support
        if new.read(path) is not None
    ]


def _what_became(
    label: str, uses: Sequence[_Use], reason: str, old: Tree | None, new: Tree
) -> tuple[str, str, str]:
    """State, detail and diff of a definition that the applier refuses for a reason."""
    path, _, definition = label.partition("::")
    try:
        source = new.source(path)
        spans = source.definitions.get(definition, []) if source else []
    except ImageMismatch:
        return "unreadable", reason, ""
    if len(spans) > 1:
        return "duplicate", reason, ""
    if source is None or not spans:
        state, detail = _missing(definition, uses, reason, new)
        return state, detail, ""
    text = source.text(spans[0])
    if fingerprint(text) in {entry.sha256 for use in uses for entry in use.entries}:
        return "converted", reason, ""
    diff = _diff(label, uses, old, new, text)
    return "changed", _what_to_do(label, uses, text, new, bool(diff)), diff


def _missing(definition: str, uses: Sequence[_Use], reason: str, new: Tree) -> tuple[str, str]:
    place = _elsewhere(definition, uses[0].entries, new)
    state, detail = ("moved", f"now {place}") if place else ("gone", reason)
    shapes = [found for use in uses if use.rewritten if (found := _other_shape(use, new))]
    return state, "; ".join([detail, *shapes])


def _diff(label: str, uses: Sequence[_Use], old: Tree | None, new: Tree, text: str) -> str:
    path, _, definition = label.partition("::")
    was = old.text(path, definition) if old else None
    if was is None:
        return ""
    digest = fingerprint(was)
    entries = [entry for use in uses for entry in use.entries]
    entry = next((entry for entry in entries if entry.sha256 == digest), entries[0])
    return "".join(
        f"{line}\n"
        for line in difflib.unified_diff(
            was.splitlines(),
            text.splitlines(),
            f"{entry.commit[:12]} {label}",
            f"{_short(named(new, _package(label)))} {label}",
            lineterm="",
        )
    )


def _what_to_do(label: str, uses: Sequence[_Use], text: str, new: Tree, diff: bool) -> str:
    read = "read the diff" if diff else "read it (the recorded source is not at hand for a diff)"
    ends = newlines(text)
    converted = ends not in {entry.newlines for use in uses for entry in use.entries}
    said = [f"its line ends are {ends} now"] if converted else []
    fitting: list[tuple[str, Rewrite]] = []
    tried = {
        use.fix.id: _tried(label, use, text, new, fitting, read) for use in uses if use.rewritten
    }
    if len(set(tried.values())) > 1:
        said += [f"{fix}: {what}" for fix, what in tried.items()]
    else:
        said += list(tried.values())[:1] or [f"relied on, not rewritten: {read}"]
    return "; ".join(said)


def _tried(
    label: str,
    use: _Use,
    text: str,
    new: Tree,
    fitting: list[tuple[str, Rewrite]],
    read: str,
) -> str:
    """Does a fix's codemod fit the text, after those of the fixes before it that do?"""
    problem: PackError | None = None
    for site in use.fix.sites:
        if site.label == label and site.shape in use.shapes:
            try:
                rewrite(text, label, [*fitting, (use.fix.id, site.rewrite)])
            except PackError as error:
                problem = problem or error
            else:
                fitting.append((use.fix.id, site.rewrite))
                return f"the codemod still fits: {read}, run the test, record"
    return _other_shape(use, new) or (
        f"the codemod does not fit ({problem}): repaired upstream, or rewrite it;"
        f" to be dropped when {use.fix.fix.drop_when}"
    )


def _other_shape(use: _Use, new: Tree) -> str:
    """That another shape of a fix fits, with all its codemods; empty where none does."""
    fix = use.fix
    for shape in sorted({site.shape for site in fix.sites} - {"", *use.shapes}):
        if all(_fits(fix, site, new) for site in fix.sites if site.shape in ("", shape)):
            return f"another shape of {fix.id} fits, {shape}: run the test, record"
    return ""


def _fits(fix: LoadedFix, site: Site, tree: Tree) -> bool:
    try:
        text = tree.text(site.file, site.definition)
        if text is not None:
            rewrite(text, site.label, [(fix.id, site.rewrite)])
    except PackError:
        return False
    return text is not None


def _elsewhere(definition: str, entries: Sequence[LockedSite], tree: Tree) -> str | None:
    """The same text under another name or in another file of the package."""
    wanted = {entry.sha256 for entry in entries}
    last = definition.rpartition(".")[2].encode()
    for path in sorted((tree.folder / _package(entries[0].file)).rglob("*.py")):
        if last not in path.read_bytes():
            continue
        relative = path.relative_to(tree.folder).as_posix()
        try:
            source = tree.source(relative)
            definitions = source.definitions if source else {}
        except ImageMismatch:
            continue
        for name, spans in definitions.items():
            for span in spans:
                if source and fingerprint(source.text(span)) in wanted:
                    return f"{relative}::{name}"
    return None

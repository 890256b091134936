"""Tools for those who write fixes: record and check locks, start a fix, carry it to a release."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fixes.applier.definitions import Source, fingerprint, newlines
from fixes.applier.edits import rewrite
from fixes.applier.errors import ImageMismatch, PackError, UsageError
from fixes.applier.fix import LoadedFix, Site
from fixes.applier.pack import Pack
from fixes.applier.plan import make_plan
from fixes.applier.profiles import Lock, LockedSite


@dataclass(frozen=True)
class Origin:
    """Where a package's source in a tree came from, for the lock."""

    commit: str
    evidence: str


class Tree:
    """A folder of pristine packages to record from or to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sources: dict[str, Source | None] = {}

    def read(self, path: str) -> bytes | None:
        """A file's bytes, or None where the tree has no such file."""
        try:
            return (self.folder / path).read_bytes()
        except FileNotFoundError:
            return None

    def source(self, path: str) -> Source | None:
        """A file, parsed once."""
        if path not in self._sources:
            data = self.read(path)
            self._sources[path] = None if data is None else Source(path, data)
        return self._sources[path]

    def text(self, path: str, definition: str) -> str | None:
        """The text of a definition that the file has exactly once."""
        source = self.source(path)
        spans = source.definitions.get(definition, []) if source else []
        return source.text(spans[0]) if source and len(spans) == 1 else None


# Locks --------------------------------------------------------------------------------------------


class _Fingerprints:
    """Published fingerprints of a release whose source is not at hand, with their evidence."""

    def __init__(self, path: Path) -> None:
        self.files: Mapping[str, Any] = {}
        if path.is_file():
            try:
                self.files = json.loads(path.read_text(encoding="utf-8"))["files"]
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{path}: not a file of fingerprints: {error}") from None

    def find(self, path: str, definition: str) -> tuple[str, Origin] | None:
        """The fingerprint of a definition and where it comes from; None for files not listed."""
        entry = self.files.get(path)
        if entry is None:
            return None
        digest = entry["definitions"].get(definition)
        if not isinstance(digest, str):
            raise ImageMismatch(f"{path}::{definition}: the fingerprints do not have it just once")
        commit = re.search(r"\bcommit ([0-9a-f]{7,40})", entry["evidence"])
        return digest, Origin(commit.group(1) if commit else "unknown", entry["evidence"])


def record(pack: Pack, name: str, tree: Tree, origins: Mapping[str, Origin]) -> Lock:
    """The lock of a profile for the packages in a tree.

    ``origins`` says per package where its source came from. A definition that
    ``profiles/<name>.fingerprints.json`` lists is locked with the fingerprint given there, and must
    agree with the tree's where the tree has it. Raises :class:`ImageMismatch` for a site that the
    release does not have or whose codemod does not fit.
    """
    profile = pack.profile(name)
    published = _Fingerprints(pack.root / "profiles" / f"{name}.fingerprints.json")
    written = pack.fixes([e.id for e in profile.entries if e.id not in pack.unwritten])
    sites = {
        fix.id: tuple(
            _locked(label, shape, rewritten, tree, published, origins)
            for label, shape, rewritten in _definitions_of(fix, tree)
        )
        for fix in written
    }
    lock = Lock(name, sites)
    # All together, in the profile's order: what is locked can be applied. Sites that are only
    # known by a fingerprint cannot be tried.
    seen = [
        fix for fix in written if all(tree.read(site.file) is not None for site in sites[fix.id])
    ]
    make_plan(seen, lock, tree.read)
    return lock


def _definitions_of(fix: LoadedFix, tree: Tree) -> Iterator[tuple[str, str, bool]]:
    """Label, shape and whether it is rewritten, of the definitions a fix needs in this tree."""
    shapes = sorted({site.shape for site in fix.sites if site.shape})
    fitting = [
        shape
        for shape in shapes
        if all(_codemod_fits(fix, site, tree) for site in fix.sites if site.shape == shape)
    ]
    if shapes and len(fitting) != 1:
        found = f"{' and '.join(fitting)} do" if fitting else "none does"
        raise ImageMismatch(
            f"{fix.id}: exactly one of its shapes ({', '.join(shapes)}) must fit; {found}"
        )
    for site in fix.sites:
        if not site.shape or site.shape in fitting:
            yield site.label, site.shape, True
    for label in fix.fix.relies_on:
        yield label, "", False


def _codemod_fits(fix: LoadedFix, site: Site, tree: Tree) -> bool:
    text = tree.text(site.file, site.definition)
    if text is None:
        return False
    try:
        rewrite(text, site.label, [(fix.id, site.rewrite)])
    except PackError:
        return False
    return True


def _locked(
    label: str,
    shape: str,
    rewritten: bool,
    tree: Tree,
    published: _Fingerprints,
    origins: Mapping[str, Origin],
) -> LockedSite:
    path, _, definition = label.partition("::")
    text = tree.text(path, definition)
    here = fingerprint(text) if text is not None else None
    known = published.find(path, definition)
    if known is not None:
        digest, origin = known
        if here is not None and here != digest:
            raise ImageMismatch(f"{label}: {here} in {tree.folder}, but {digest} was published")
    elif here is not None:
        digest, origin = here, origins[path.split("/")[0]]
    else:
        raise ImageMismatch(f"{label}: {tree.folder} does not have it exactly once")
    ends = newlines(text) if text is not None else "lf"
    return LockedSite(
        path, definition, digest, ends, origin.commit, origin.evidence, shape, rewritten
    )


# Porting ------------------------------------------------------------------------------------------


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


def _ported(fix: LoadedFix, locked: LockedSite, old: Tree | None, new: Tree) -> Ported:
    text = new.text(locked.file, locked.definition)
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
            detail = f"the codemod does not fit ({error}): repaired upstream, or rewrite it"
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
    source = tree.source(locked.file)
    if source is None:
        return f"{locked.file} is not there any more"
    close = difflib.get_close_matches(locked.definition, source.definitions, n=3)
    return f"the file has {', '.join(close)}" if close else "nothing like it in the file"


# A new fix ----------------------------------------------------------------------------------------

_MODULE = '''"""{id}: what it repairs, in one line.

What a user sees without it.

Why: the mechanism, by upstream's names.

What is changed: the rewrite of each site, and for every other place with the same pattern whether
it was changed or left, and why.

Reference: the upstream issue or pull request.
"""

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="write me",
    symptom="write me",
    references=(),
    drop_when="write me",
)


@site("{file}", "{definition}")
def {function}(code: Definition) -> None:
    code.insert_first("pass")  # write me
'''

_TEST = '''"""{id}: red on stock, green on fixed."""

import pytest


@pytest.mark.red(r"write me")
def test_the_defect() -> None:
    """Use the real code of {file} here; the plugin runs this on stock and on fixed packages."""
    pytest.fail("write me")
'''


def new_fix(
    pack: Pack, fix_id: str, profiles: Sequence[str], file: str, definition: str, *, opt_in: bool
) -> list[Path]:
    """Start a fix: its module, its test and its lines in the profiles. Returns what was written.

    Raises :class:`UsageError` when the fix exists or its name is none.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", fix_id):
        raise UsageError(f"{fix_id!r} is no fix id: lower-case words joined by dashes")
    name = fix_id.replace("-", "_")
    module = pack.root / "fixes" / f"{name}.py"
    test = pack.root / "tests" / "fixes" / f"test_{name}.py"
    for path in (module, test, module.with_suffix("")):
        if path.exists():
            raise UsageError(f"{path} exists")
    words = {"id": fix_id, "file": file, "definition": definition}
    function = definition.rpartition(".")[2].strip("_") or "rewrite"
    written = [module, test]
    loaded = [pack.profile(profile) for profile in profiles]
    module.write_text(_MODULE.format(**words, function=function), encoding="utf-8")
    test.parent.mkdir(parents=True, exist_ok=True)
    test.write_text(_TEST.format(**words), encoding="utf-8")
    for profile in loaded:
        if profile.entry(fix_id) is None:
            path = pack.root / "profiles" / f"{profile.name}.toml"
            lines = f'\n[[fix]]\nid = "{fix_id}"\n' + ("opt-in = true\n" if opt_in else "")
            path.write_text(path.read_text("utf-8").rstrip("\n") + "\n" + lines, encoding="utf-8")
            written.append(path)
    unwritten = pack.root / "profiles" / "unwritten.toml"
    text = unwritten.read_text(encoding="utf-8")
    if fix_id in pack.unwritten:
        line = re.compile(rf'^\s*"{re.escape(fix_id)}",\n', re.M)
        unwritten.write_text(line.sub("", text), encoding="utf-8")
        written.append(unwritten)
    return written


def relocked(pack: Pack, lock: Lock) -> bool:
    """Does the lock on disk say the same?"""
    path = pack.root / "profiles" / f"{lock.profile}.lock"
    return path.is_file() and path.read_text(encoding="utf-8") == lock.dump()

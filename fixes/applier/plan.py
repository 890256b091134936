"""Pristine text in, rewritten text out; nothing is written here."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fixes.applier.definitions import Source, Span, fingerprint, newlines
from fixes.applier.errors import ImageMismatch, PackError, SiteMismatch, UsageError
from fixes.applier.fix import LoadedFix, Site
from fixes.applier.profiles import Lock, LockedSite

MARKER = "# fix: "


@dataclass(frozen=True)
class Mismatch:
    """One definition that is not what a fix was written for."""

    fix: str
    file: str
    definition: str
    expected: tuple[str, ...]
    found: str
    commit: str
    reason: str

    def __str__(self) -> str:
        lines = [f"{self.fix}: {self.file}::{self.definition}: {self.reason}"]
        if self.expected:
            lines.append(f"    expected {' or '.join(self.expected)} (commit {self.commit})")
        if self.found:
            lines.append(f"    found    {self.found}")
        return "\n".join(lines)


class Mismatches(ImageMismatch):
    """All mismatches of a run, reported together."""

    def __init__(self, found: Sequence[Mismatch], hint: str = "") -> None:
        self.found = tuple(found)
        self.hint = hint
        one = len(found) == 1
        count = f"{len(found)} definition{' does' if one else 's do'} not match the profile:"
        super().__init__("\n".join([count, *map(str, found), *([hint] if hint else [])]))


@dataclass(frozen=True)
class PlannedFile:
    """What becomes of one file. ``pristine`` is None for a module that a fix adds."""

    path: str
    pristine: bytes | None
    rewritten: bytes
    fixes: tuple[str, ...]


@dataclass
class _Work:
    """The sites of one file that are to be rewritten, in the pack's order."""

    source: Source
    sites: list[tuple[str, Site, Span]] = field(default_factory=list)


def check_overlap(fixes: Sequence[LoadedFix]) -> None:
    """Refuse a fix on a definition inside another fix's, where neither order is right, and two
    fixes that add the same module.

    Two fixes on one definition compose in the profile's order; a class and its method do not.
    """
    sites = [(fix.id, site) for fix in fixes for site in fix.sites]
    for outer_id, outer in sites:
        for inner_id, inner in sites:
            if inner.file == outer.file and inner.definition.startswith(f"{outer.definition}."):
                raise UsageError(
                    f"{outer_id} rewrites {outer.label} and {inner_id} rewrites"
                    f" {inner.definition} inside it: they overlap"
                )
    brought: dict[str, str] = {}
    for fix in fixes:
        for path in fix.fix.support:
            if path in brought:
                raise UsageError(f"{brought[path]} and {fix.id} both add {path}: name one anew")
            brought[path] = fix.id


def make_plan(
    fixes: Sequence[LoadedFix],
    lock: Lock,
    read: Callable[[str], bytes | None],
    *,
    read_back: bool = False,
) -> list[PlannedFile]:
    """Check every site, then rewrite in memory.

    ``read`` gives a file's pristine bytes (None where there is no such file); ``read_back`` is that
    of :func:`fixes.applier.edits.rewrite`. Raises
    :class:`Mismatches` with all sites that do not match, :class:`UsageError` where fix and lock
    tell different stories.
    """
    check_overlap(fixes)
    sources = _Sources(read)
    mismatches: list[Mismatch] = []
    work: dict[str, _Work] = {}
    for fix in fixes:
        for locked, site in _sites_of(fix, lock, sources, mismatches):
            span = _checked(fix.id, locked, sources, mismatches)
            if span is not None and site is not None:
                source = sources.get(site.file)
                work.setdefault(site.file, _Work(source)).sites.append((fix.id, site, span))
    if mismatches:
        raise Mismatches(mismatches)
    planned = [_rewritten(path, part, read_back) for path, part in work.items()]
    return planned + [file for fix in fixes for file in _support_modules(fix, read)]


def fits(fixes: Sequence[LoadedFix], lock: Lock, read: Callable[[str], bytes | None]) -> bool:
    """Do the files look as the lock says, for every one of these fixes?"""
    sources = _Sources(read)
    mismatches: list[Mismatch] = []
    for fix in fixes:
        for locked, _site in _sites_of(fix, lock, sources, mismatches):
            _checked(fix.id, locked, sources, mismatches)
    return not mismatches


class _Sources:
    """Parsed files, each read once. One that is missing or no Python has its error instead."""

    def __init__(self, read: Callable[[str], bytes | None]) -> None:
        self._read = read
        self._known: dict[str, Source | str] = {}
        self._prints: dict[tuple[str, Span], str] = {}

    def fingerprint(self, path: str, span: Span) -> str:
        """That of a definition of a file that is there; two fixes may have it in common."""
        if (path, span) not in self._prints:
            self._prints[path, span] = fingerprint(self.get(path).text(span))
        return self._prints[path, span]

    def lookup(self, path: str) -> Source | str:
        if path not in self._known:
            data = self._read(path)
            if data is None:
                self._known[path] = "there is no such file"
            else:
                source = Source(path, data)
                try:
                    _ = source.definitions
                    self._known[path] = source
                except ImageMismatch as error:
                    self._known[path] = str(error)
        return self._known[path]

    def get(self, path: str) -> Source:
        source = self.lookup(path)
        assert isinstance(source, Source)
        return source


def _sites_of(
    fix: LoadedFix, lock: Lock, sources: _Sources, mismatches: list[Mismatch]
) -> list[tuple[LockedSite, Site | None]]:
    """The locked definitions of a fix with the codemod of each (None: relied on, not rewritten)."""
    locked = lock.sites.get(fix.id, ())
    stale = (
        f"{fix.id}: module and {lock.profile}.lock tell different stories; record the lock again"
    )
    codemods = {(site.label, site.shape): site for site in fix.sites}
    if not locked or any(
        (entry.label, entry.shape) not in codemods for entry in locked if entry.rewritten
    ):
        raise UsageError(stale)
    in_lock = {(entry.label, entry.shape) for entry in locked if entry.rewritten}
    shapes = {"", *(shape for _, shape in in_lock)}
    if any(key not in in_lock for key, site in codemods.items() if site.shape in shapes):
        raise UsageError(stale)
    if {entry.label for entry in locked if not entry.rewritten} != set(fix.fix.relies_on):
        raise UsageError(stale)
    # A definition may be locked more than once: in two shapes, or in two texts of one shape.
    # The one the image has is used; where it has none, the first stands for all in the message.
    chosen = []
    by_label: dict[str, list[LockedSite]] = {}
    for entry in locked:
        by_label.setdefault(entry.label, []).append(entry)
    for entries in by_label.values():
        fitting = [entry for entry in entries if _found(entry, sources)[1] == entry.sha256]
        if not fitting and len(entries) > 1 and isinstance(sources.lookup(entries[0].file), Source):
            _, found, reason = _found(entries[0], sources)
            mismatches.append(_mismatch(fix.id, entries, found, reason))
            continue
        entry = (fitting or entries)[0]
        site = codemods[entry.label, entry.shape] if entry.rewritten else None
        chosen.append((entry, site))
    return chosen


def _found(locked: LockedSite, sources: _Sources) -> tuple[Span | None, str, str]:
    """Where a definition is, its fingerprint, and why it cannot be used (empty: it can)."""
    source = sources.lookup(locked.file)
    if isinstance(source, str):
        return None, "", source
    spans = source.definitions.get(locked.definition, [])
    if not spans:
        last = locked.definition.rpartition(".")[2]
        same_name = [name for name in source.definitions if name.rpartition(".")[2] == last]
        close = same_name or difflib.get_close_matches(locked.definition, source.definitions, n=2)
        near = f"; the file has {' and '.join(close[:3])}" if close else ""
        return None, "", f"there is no such definition in the file{near}"
    if len(spans) > 1:
        lines = ", ".join(str(span.start + 1) for span in spans)
        return None, "", f"the file defines it {len(spans)} times (lines {lines})"
    found = sources.fingerprint(locked.file, spans[0])
    ends = newlines(source.text(spans[0]))
    if ends != locked.newlines:
        why = f"its line ends are {ends}, recorded were {locked.newlines}: the file was converted"
        return None, found, why
    return spans[0], found, ""


def _mismatch(fix_id: str, entries: Sequence[LockedSite], found: str, reason: str = "") -> Mismatch:
    first = entries[0]
    why = reason or (
        "its code is not the code this fix was written for: another release, edited by hand, or"
        " repaired by upstream"
    )
    expected = tuple(dict.fromkeys(entry.sha256 for entry in entries))
    commits = " / ".join(dict.fromkeys(entry.commit[:12] for entry in entries))
    return Mismatch(fix_id, first.file, first.definition, expected, found, commits, why)


def _checked(
    fix_id: str, locked: LockedSite, sources: _Sources, mismatches: list[Mismatch]
) -> Span | None:
    span, found, reason = _found(locked, sources)
    if span is None or found != locked.sha256:
        mismatches.append(_mismatch(fix_id, [locked], found, reason))
        return None
    return span


def _rewritten(path: str, part: _Work, read_back: bool) -> PlannedFile:
    from fixes.applier.edits import rewrite

    texts: dict[Span, str] = {}
    for span in dict.fromkeys(span for _, _, span in part.sites):
        codemods = [(fix_id, site.rewrite) for fix_id, site, its in part.sites if its == span]
        definition = next(site.definition for _, site, its in part.sites if its == span)
        text, where = part.source.text(span), f"{path}::{definition}"
        texts[span] = rewrite(text, where, codemods, read_back=read_back)
    data = part.source.replaced(texts)
    _check_that_it_compiles(data, path)
    fixes = tuple(dict.fromkeys(fix_id for fix_id, _, _ in part.sites))
    return PlannedFile(path, part.source.data, data, fixes)


def _check_that_it_compiles(
    data: bytes, path: str, error_class: type[PackError] = SiteMismatch
) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise error_class(
            f"{path}: the file as the pack leaves it does not compile: {error}"
        ) from None


def _support_modules(fix: LoadedFix, read: Callable[[str], bytes | None]) -> list[PlannedFile]:
    planned = []
    for path, beside in fix.fix.support.items():
        if read(path) is not None:
            raise ImageMismatch(
                f"{fix.id}: {path} exists and the pack did not put it there; remove it or reinstall"
                " the package"
            )
        data = (Path(fix.folder) / beside).read_bytes().replace(b"\r\n", b"\n")
        # At the end, so that a traceback's line numbers are those of the file beside the fix.
        data = data.rstrip(b"\n") + f"\n{MARKER}{fix.id}\n".encode()
        _check_that_it_compiles(data, path, UsageError)
        planned.append(PlannedFile(path, None, data, (fix.id,)))
    return planned

"""Write a profile's lock from the packages of its release."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fixes.applier.definitions import Source, fingerprint, newlines
from fixes.applier.edits import rewrite
from fixes.applier.errors import ImageMismatch, PackError, UsageError
from fixes.applier.fix import LoadedFix, Site
from fixes.applier.pack import Pack
from fixes.applier.plan import make_plan
from fixes.applier.profiles import Lock, LockedSite, Profile
from fixes.authoring.sources import read_summary


@dataclass(frozen=True)
class Origin:
    """Where a package's source in a tree came from, for the lock."""

    commit: str
    evidence: str


def origins_of(tree: Tree, profile: Profile) -> dict[str, Origin]:
    """What the ``sources.json`` of a tree says of its packages, in the words of a lock."""
    packages = read_summary(tree.folder).get("packages", {})
    origins = {}
    for name, pin in profile.packages.items():
        found = packages.get(name, {})
        commit = found.get("commit") or "unknown"
        evidence = {
            "index": f"{pin.distribution}=={pin.version} from the package index,"
            f" sha256 {pin.sdist_sha256}",
            "git": f"{pin.repository} at {commit}",
        }
        origins[name] = Origin(commit, evidence.get(found.get("kind", ""), "a local copy"))
    return origins


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

    def has(self, path: str) -> bool:
        """Is the package of this path in the tree at all?"""
        return (self.folder / path.split("/")[0]).is_dir()

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
        self.others: Mapping[str, Origin] = {}
        self.alternatives: Mapping[str, Any] = {}
        if path.is_file():
            try:
                document = json.loads(path.read_text(encoding="utf-8"))
                self.files = document["files"]
                self.alternatives = document.get("alternatives", {})
                self.others = {
                    package: Origin(**origin)
                    for package, origin in document["files_not_listed"].items()
                }
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

    def others_of(self, locked: LockedSite) -> list[LockedSite]:
        """Further texts of a definition that the release may have: the codemod fits them too."""
        return [
            replace(locked, **each)
            for each in self.alternatives.get(locked.label, ())
            if each["sha256"] != locked.sha256
        ]


def record(pack: Pack, name: str, tree: Tree, origins: Mapping[str, Origin]) -> Lock:
    """The lock of a profile for the packages in a tree.

    ``origins`` says per package where its source came from. A definition that
    ``profiles/<name>.fingerprints.json`` lists is locked with the fingerprint given there, and must
    agree with the tree's where the tree has it; texts that it lists as ``alternatives`` are locked
    beside the one of the tree. What the present lock says of a package that the
    tree lacks is kept. Raises :class:`ImageMismatch` for a site that the release does not have or
    whose codemod does not fit.
    """
    profile = pack.profile(name)
    present = (pack.root / "profiles" / f"{name}.lock").is_file()
    kept = pack.lock(name).sites if present else {}
    published = _Fingerprints(pack.root / "profiles" / f"{name}.fingerprints.json")
    written = pack.fixes([e.id for e in profile.entries if e.id not in pack.unwritten])
    sites = {
        fix.id: tuple(
            site
            for label, shape, rewritten in _definitions_of(fix, tree, kept.get(fix.id, ()))
            for locked in [
                _locked(label, shape, rewritten, tree, published, origins, kept.get(fix.id, ()))
            ]
            for site in (locked, *published.others_of(locked))
        )
        for fix in written
    }
    rewritten = {site.file for entries in sites.values() for site in entries if site.rewritten}
    before = pack.lock(name).files if present else {}
    whole = {path: _whole(path, tree, published, before) for path in rewritten}
    lock = Lock(name, sites, {path: found for path, found in whole.items() if found})
    # All together, in the profile's order: what is locked can be applied. Sites that are only
    # known by a fingerprint cannot be tried.
    seen = [
        fix for fix in written if all(tree.read(site.file) is not None for site in sites[fix.id])
    ]
    make_plan(seen, lock, tree.read)
    return lock


def _definitions_of(
    fix: LoadedFix, tree: Tree, kept: Sequence[LockedSite]
) -> Iterator[tuple[str, str, bool]]:
    """Label, shape and whether it is rewritten, of the definitions a fix needs in this tree."""
    shapes = sorted({site.shape for site in fix.sites if site.shape})
    locked = {site.shape for site in kept}

    def fits(site: Site) -> bool:
        return _codemod_fits(fix, site, tree) if tree.has(site.file) else site.shape in locked

    fitting = [
        shape for shape in shapes if all(fits(site) for site in fix.sites if site.shape == shape)
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
    kept: Sequence[LockedSite],
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
        package = path.split("/")[0]
        digest, origin = here, published.others.get(package, origins[package])
    elif not tree.has(path) and (before := _find(kept, label, shape)) is not None:
        return before
    else:
        raise ImageMismatch(f"{label}: {tree.folder} does not have it exactly once")
    ends = newlines(text) if text is not None else "lf"
    return LockedSite(
        path, definition, digest, ends, origin.commit, origin.evidence, shape, rewritten
    )


def _whole(path: str, tree: Tree, published: _Fingerprints, kept: Mapping[str, str]) -> str | None:
    """The hash of a whole file of the release; None where only parts of it are known."""
    if path in published.files:
        found = published.files[path].get("sha256")
        return found if isinstance(found, str) else None
    if path.split("/")[0] in published.others:
        return None
    data = tree.read(path)
    return kept.get(path) if data is None else hashlib.sha256(data).hexdigest()


def _find(sites: Sequence[LockedSite], label: str, shape: str) -> LockedSite | None:
    return next((site for site in sites if (site.label, site.shape) == (label, shape)), None)

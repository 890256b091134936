"""Write a profile's lock from the packages of its release."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fixes.applier.definitions import fingerprint, newlines
from fixes.applier.edits import rewrite
from fixes.applier.errors import ImageMismatch, PackError, UsageError
from fixes.applier.fix import LoadedFix
from fixes.applier.pack import Pack
from fixes.applier.profiles import Lock, LockedSite, Profile
from fixes.authoring.sources import read_summary
from fixes.authoring.trees import Tree, edited
from fixes.authoring.trials import try_sets


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
    written = written_fixes(pack, profile)
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
    try_sets(profile, written, lock, tree)
    return lock


def written_fixes(pack: Pack, profile: Profile) -> list[LoadedFix]:
    """The fixes of a profile that are more than planned."""
    return pack.fixes([e.id for e in profile.entries if e.id not in pack.unwritten])


def refuse_edited(pack: Pack, name: str, tree: Tree) -> None:
    """Refuse files that are not those that their package was installed with."""
    for fix in written_fixes(pack, pack.profile(name)):
        for label in (*(site.label for site in fix.sites), *fix.fix.relies_on):
            tree.refuse_edited(label.split("::")[0])


def refuse_contradiction(before: Lock, after: Lock, tree: Tree) -> None:
    """Refuse another text from the same place: one of the two is not what its evidence says."""
    for fix_id, sites in after.sites.items():
        for site in sites:
            was = _find(before.sites.get(fix_id, ()), site.label, site.shape)
            # Of a local copy nobody knows the commit: it may be another one today.
            if was is None or site.commit == "unknown":
                continue
            if (was.commit, was.evidence) != (site.commit, site.evidence):
                continue
            whole = before.files.get(site.file), after.files.get(site.file)
            if whole[0] != whole[1] if all(whole) else was.sha256 != site.sha256:
                raise edited(site.file, tree.folder, f"{after.profile}.lock has another text of it")


def _definitions_of(
    fix: LoadedFix, tree: Tree, kept: Sequence[LockedSite]
) -> Iterator[tuple[str, str, bool]]:
    """Label, shape and whether it is rewritten, of the definitions a fix needs in this tree."""
    shapes = sorted({site.shape for site in fix.sites if site.shape})
    locked = {site.shape for site in kept}

    faults = {shape: shape_fault(fix, shape, tree, locked) for shape in shapes}
    fitting = [shape for shape, why in faults.items() if not why]
    if shapes and len(fitting) != 1:
        reasons = "".join(f"\n    {shape}: {why}" for shape, why in faults.items())
        found = f"{' and '.join(fitting)} do" if fitting else f"none does:{reasons}"
        raise ImageMismatch(
            f"{fix.id}: exactly one of its shapes ({', '.join(shapes)}) must fit; {found}"
        )
    for site in fix.sites:
        if not site.shape or site.shape in fitting:
            yield site.label, site.shape, True
    for label in fix.fix.relies_on:
        yield label, "", False


def shape_fault(fix: LoadedFix, shape: str, tree: Tree, locked: Collection[str] = ()) -> str:
    """Why a shape of a fix does not fit the tree; empty where it does.

    Where the tree has no such package, the shapes that are locked fit.
    """
    for site in fix.sites:
        if site.shape == shape and (tree.has(site.file) or shape not in locked):
            try:
                text = tree.text(site.file, site.definition)
                if text is None:
                    return f"{site.label}: {tree.why_no_text(site.file, site.definition)}"
                rewrite(text, site.label, [(fix.id, site.rewrite)])
            except PackError as error:
                return str(error)
    return ""


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
        raise ImageMismatch(f"{label}: {tree.why_no_text(path, definition)}")
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

"""The runs: apply a set of fixes, revert, and say what is applied."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fixes.applier import overlay, provision
from fixes.applier.digest import VERSION, digest
from fixes.applier.errors import Busy, CannotWrite, ImageMismatch, UsageError
from fixes.applier.files import FileState, hard_links, remove_file, sha256
from fixes.applier.fix import LoadedFix
from fixes.applier.locate import Package, find_packages, release_differs, require_packages
from fixes.applier.pack import Pack
from fixes.applier.plan import MARKER, Mismatches, PlannedFile, fits, make_plan
from fixes.applier.profiles import Lock, PackagePin, Profile
from fixes.applier.selection import Selection
from fixes.applier.store import (
    Change,
    FileEntry,
    Manifest,
    Store,
    describe,
    is_marked,
    source_of,
)

_SUPPORT_MODE = 0o644


@dataclass
class Result:
    """What a run did or, dry, would do; everything a report needs."""

    profile: str
    packages: Sequence[Package]
    manifest: Manifest | None
    added: Sequence[str] = ()
    kept: Sequence[str] = ()
    dropped: Sequence[str] = ()
    changes: Sequence[Change] = ()
    texts: Mapping[str, tuple[bytes, bytes]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    recovered: str = ""
    dry_run: bool = False
    overlay: str = ""


def apply(
    pack: Pack,
    selection: Selection,
    request: Mapping[str, Any],
    *,
    site_packages: Path | None,
    only: Sequence[str],
    dry_run: bool,
    lock_timeout: float,
) -> Result:
    """Bring the installed packages to exactly the selected fixes.

    ``only`` limits the run to the sites in these packages. Raises an error of
    :mod:`fixes.applier.errors`, and then nothing has changed.
    """
    store, packages, notes, compute = _prepared(pack, selection, request, site_packages, only)
    profile = selection.profile
    outcome: _Outcome | None = None
    recovered = ""
    moment = store.moment()
    _, seen = moment
    if not seen[1]:
        try:
            outcome = compute()
        except ImageMismatch:
            if store.moment() == moment:
                raise
        else:
            if store.moment() != moment:
                outcome = None
            elif dry_run or not outcome.anything:
                if dry_run:
                    _check_writable(_folders_of(store, outcome.changes))
                elif outcome.only_asked_otherwise:
                    # So that the next such run sees at once that it has nothing to do; an image
                    # that cannot be written is fine without.
                    with contextlib.suppress(CannotWrite, Busy), _writing(store, 0):
                        if store.position() == seen:
                            outcome.commit(store)
                return outcome.result(profile.name, packages, notes, "", dry_run)
    with _writing(store, lock_timeout):
        recovered = store.recover()
        transaction, _ = store.position()  # the folder of this run itself is not settled
        if outcome is None or recovered or transaction != seen[0]:
            outcome = compute()
        if outcome.anything and not dry_run:
            outcome.commit(store)
    notes += store.notes
    return outcome.result(profile.name, packages, notes, recovered, dry_run)


def build_overlay(
    pack: Pack,
    selection: Selection,
    request: Mapping[str, Any],
    folder: str,
    *,
    site_packages: Path | None,
    only: Sequence[str],
    dry_run: bool,
) -> Result:
    """Leave the packages as they are and have both, the selected fixes in them, in an overlay.

    ``folder`` is the folder of the overlays; the one that fits is taken or built. Raises an error
    of :mod:`fixes.applier.errors`, and then ``folder`` is as good as before.
    """
    store, packages, notes, compute = _prepared(pack, selection, request, site_packages, only)
    for package in packages.values():
        if Path(folder) == package.folder or package.folder in Path(folder).parents:
            raise UsageError(f"--overlay: {folder} is inside of {package.folder}")
    moment = store.moment()
    _, (_, unsettled) = moment
    outcome = None if unsettled else compute()
    if outcome is None or store.moment() != moment:
        raise ImageMismatch(
            f"{store.folder}: a run on the packages themselves is under way or has died; let it end"
            " or settle it with --status, then build the overlay"
        )
    manifest = outcome.manifest
    assert manifest is not None
    folders = {name: str(package.folder) for name, package in packages.items()}
    contents = outcome.own_files(store)
    document = {
        "request": dict(request),
        "pack": manifest.pack,
        "digest": manifest.digest,
        "packages": manifest.packages,
        "profile": manifest.profile,
        "fixes": list(manifest.fixes),
        "unwritten": list(manifest.unwritten),
        "files": {
            path: {
                "image": overlay.hash_of(overlay.in_image(folders, path)),
                "own": own and sha256(own[0]),
                "fixes": list(manifest.files[path].fixes) if path in manifest.files else [],
            }
            for path, own in contents.items()
        },
    }
    own = {path: file for path, file in contents.items() if file is not None}
    if site_packages is None:
        _check_path_comes_first(list(packages))
    try:
        found = overlay.find(folder, request, manifest.digest, folders)
        path = found[0] if found else ""
        if not dry_run:
            path = path or overlay.build(folder, document, folders, own)
            overlay.make_current(path)
    except OSError as error:
        raise CannotWrite(f"{describe(error)}; {_CANNOT_OVERLAY}") from error
    if dry_run and not found:
        _check_writable([_nearest(Path(folder))], _CANNOT_OVERLAY)
    return Result(
        selection.profile.name,
        list(packages.values()),
        manifest,
        added=() if found else manifest.fixes,
        kept=manifest.fixes if found else (),
        changes=[
            Change(path, entry.pristine, entry.applied)
            for path, entry in manifest.files.items()
            if not found and entry.applied is not None
        ],
        texts=outcome.texts,
        notes=[*notes, *outcome.notes],
        dry_run=dry_run,
        overlay=path,
    )


def revert(pack: Pack, *, site_packages: Path | None, dry_run: bool, lock_timeout: float) -> Result:
    """Give the image's files back, byte for byte, and remove the state folder."""
    store, packages = _store(pack, site_packages)
    moment = store.moment()
    _, seen = moment
    if seen == (None, False):
        unknown = _unknown_marks(pack, store)
        if store.moment() == moment:
            if unknown:
                raise ImageMismatch(unknown)
            return Result("", list(packages.values()), None, dry_run=dry_run)
    if dry_run and not seen[1]:
        try:
            outcome = _restored(store)
        except ImageMismatch:
            if store.moment() == moment:
                raise
        else:
            _check_writable(_folders_of(store, outcome.changes))
            return outcome.result("", packages, [], "", dry_run)
    with _writing(store, lock_timeout):
        recovered = store.recover()
        if store.manifest() is None:
            return Result("", list(packages.values()), None, recovered=recovered, dry_run=dry_run)
        outcome = _restored(store)
        if not dry_run:
            outcome.commit(store)
    return outcome.result("", packages, store.notes, recovered, dry_run)


def status(pack: Pack, *, site_packages: Path | None, lock_timeout: float) -> Result:
    """What is applied, after settling a run that died. Raises when a file is not as it was left."""
    store, packages = _store(pack, site_packages)
    recovered = ""
    while True:
        moment = store.moment()
        _, (_, unsettled) = moment
        if unsettled:
            with _writing(store, lock_timeout):
                recovered = store.recover() or recovered
        manifest = store.manifest()
        removed = store.removed_packages(manifest)
        if removed:
            raise ImageMismatch(
                f"{' and '.join(removed)}: not installed any more, though the pack had"
                " rewritten files of it; run the pack again, or --revert"
            )
        changed = [
            str(store.locate(path))
            for path, entry in (manifest.files if manifest else {}).items()
            if entry.applied is not None and store.hash_of(path) != entry.applied.sha256
        ]
        unknown = "" if manifest else _unknown_marks(pack, store)
        if not changed and not unknown:
            break
        if store.moment() == moment:
            if unknown:
                raise ImageMismatch(unknown)
            raise ImageMismatch(
                "changed since the pack wrote them: "
                + ", ".join(changed)
                + "; put them back, or reinstall the package and run the pack again"
            )
    profile = manifest.profile if manifest else ""
    kept = manifest.fixes if manifest else ()
    return Result(profile, list(packages.values()), manifest, kept=kept, recovered=recovered)


def matching_profiles(pack: Pack, packages: Mapping[str, Package]) -> list[str]:
    """The profiles whose written fixes all fit the packages as the image shipped them."""
    if not packages:
        return []
    store = Store(packages)
    return [name for name in pack.profile_names if _fits(pack, name, store)]


def all_pins(pack: Pack) -> list[PackagePin]:
    """The packages that any profile is about, each once, newest release first."""
    pins: dict[str, PackagePin] = {}
    for name in reversed(pack.profile_names):
        for pin in pack.profile(name).packages.values():
            pins.setdefault(pin.name, pin)
    return list(pins.values())


# What a run comes to ------------------------------------------------------------------------------


@dataclass
class _Outcome:
    """A run computed in memory: what changes on disk and what the manifest becomes."""

    manifest: Manifest | None
    before: Manifest | None
    changes: list[Change]
    kept_data: dict[str, bytes]  # by hash: what the manifest or a roll-back restores
    texts: dict[str, tuple[bytes, bytes]]
    notes: list[str]

    @property
    def anything(self) -> bool:
        """Does the run change a file, or the set of fixes that is in place?"""
        return bool(self.changes) or _set_of(self.manifest) != _set_of(self.before)

    @property
    def only_asked_otherwise(self) -> bool:
        """Is all as wanted, but known under other words or from another state of the pack?"""
        old, new = self.before, self.manifest
        return (
            not self.anything
            and old is not None
            and new is not None
            and (old.request, old.digest, old.packages) != (new.request, new.digest, new.packages)
        )

    def own_files(self, store: Store) -> dict[str, tuple[bytes, int] | None]:
        """Content and mode of every source that an overlay of this outcome does not link to.

        None for a module that an earlier run added to the image and this outcome is without.
        """
        found: dict[str, tuple[bytes, int] | None] = {}
        for path, entry in (self.before.files if self.before else {}).items():
            if entry.applied is not None:
                shipped = entry.pristine
                found[path] = (store.object(shipped.sha256), shipped.mode) if shipped else None
        for path, entry in (self.manifest.files if self.manifest else {}).items():
            if entry.applied is not None:
                found[path] = (self.texts[path][1], entry.applied.mode)
        return found

    def _lost(self) -> set[str]:
        """Fixes that were in place until a package was installed anew over them."""
        found: set[str] = set()
        for change in self.changes:
            was = self.before.files.get(change.path) if self.before else None
            if was and was.applied and not _same(was.applied, change.old):
                found.update(was.fixes)
        return found

    def commit(self, store: Store) -> None:
        states = [change.old for change in self.changes]
        if self.manifest is not None:
            states += [entry.pristine for entry in self.manifest.files.values()]
        for state in states:
            if state is not None and state.sha256 in self.kept_data:
                store.keep(state, self.kept_data[state.sha256])
        for change in self.changes:  # before, so that what cannot be removed has changed nothing
            for path in _cached_elsewhere(store.locate(change.path)):
                remove_file(path)
        store.commit(self.changes, self.manifest)

    def result(
        self,
        profile: str,
        packages: Mapping[str, Package],
        notes: Sequence[str],
        recovered: str,
        dry_run: bool,
    ) -> Result:
        old = self.before.fixes if self.before else ()
        new = self.manifest.fixes if self.manifest else ()
        lost = self._lost()
        return Result(
            profile,
            list(packages.values()),
            self.manifest,
            [fix for fix in new if fix not in old or fix in lost],
            [fix for fix in new if fix in old and fix not in lost],
            [fix for fix in old if fix not in new],
            self.changes,
            self.texts,
            [*notes, *self.notes],
            recovered,
            dry_run,
        )


def _set_of(manifest: Manifest | None) -> object:
    return (manifest.fixes, manifest.files) if manifest else ((), {})


class _Pristine:
    """Files as the image shipped them, whatever has been applied since."""

    def __init__(self, store: Store, manifest: Manifest | None, known_ids: Sequence[str]) -> None:
        self.store = store
        self.files = manifest.files if manifest else {}
        ids = "|".join(map(re.escape, sorted(known_ids, key=len, reverse=True)))
        self._marker = re.compile(rf"{MARKER}(?:{ids})\s*$".encode(), re.M)

    def __call__(self, path: str) -> bytes | None:
        found = self.find(path)
        return found[1] if found else None

    def find(self, path: str) -> tuple[FileState, bytes] | None:
        """The pristine state and content of a file, or None where the image has none.

        Raises :class:`ImageMismatch` for a file that is neither as shipped nor as the pack left it.
        """
        on_disk = self.store.read(path)
        entry = self.files.get(path)
        now = on_disk[0].sha256 if on_disk else None
        if entry is not None:
            if now == (entry.applied and entry.applied.sha256):
                if on_disk and not is_marked(on_disk[1]):
                    raise ImageMismatch(
                        f"{self.store.locate(path)}: {self.store.folder} says that the pack wrote"
                        " it, and it carries no mark of the pack, so it is left alone; reinstall"
                        " the package and remove that folder"
                    )
                if entry.pristine is None:
                    return None
                return entry.pristine, self.store.object(entry.pristine.sha256)
            if now == (entry.pristine and entry.pristine.sha256):
                return on_disk  # somebody put the image's file back
            if on_disk is None:
                return None  # gone with the package that had it: nothing to overwrite or restore
            if entry.pristine is None or self._marker.search(on_disk[1]):
                raise ImageMismatch(
                    f"{self.store.locate(path)}: changed after the pack rewrote it, so it is left"
                    f" alone; put back what the pack wrote ({_short(entry.applied)}), or reinstall"
                    " the package and run the pack again"
                )
        elif on_disk is not None and self._marker.search(on_disk[1]):
            raise ImageMismatch(_unknown_mark(self.store, path))
        return on_disk


def _unknown_marks(pack: Pack, store: Store) -> str:
    """What to say of a file that the pack has rewritten and nobody knows how it was; else empty."""
    paths = {path for name in pack.profile_names for path in pack.lock(name).files}
    for path in sorted(paths):
        found = store.read(path) if path.split("/")[0] in store.packages else None
        if found and is_marked(found[1]):
            return _unknown_mark(store, path)
    return ""


def _unknown_mark(store: Store, path: str) -> str:
    return (
        f"{store.locate(path)}: carries the marks of this pack, but {store.folder} does not know of"
        " it: the folder is gone, or this environment sees another copy of a package than the run"
        " that rewrote it; run the pack as that one was run, or reinstall the package"
    )


def _same(one: FileState | None, other: FileState | None) -> bool:
    return (one and one.sha256) == (other and other.sha256)


def _short(state: FileState | None) -> str:
    return f"sha256 {state.sha256[:12]}" if state else "no file"


def _outcome(
    store: Store,
    pack: Pack,
    selection: Selection,
    fixes: Sequence[LoadedFix],
    lock: Lock,
    request: Mapping[str, Any],
) -> _Outcome:
    before = store.manifest()
    known = {entry.id for name in pack.profile_names for entry in pack.profile(name).entries}
    pristine = _Pristine(store, before, sorted(known | set(before.fixes if before else ())))
    planned = make_plan(fixes, lock, pristine)
    outcome = _changes(store, before, planned, pristine)
    outcome.notes += [
        f"{store.locate(file.path)}: not the file of {selection.profile.name}, but different only"
        " outside of the definitions that are rewritten, or in blanks at line ends"
        for file in planned
        if file.pristine
        and sha256(file.pristine) != lock.files.get(file.path, sha256(file.pristine))
    ]
    packages = {
        package.name: {
            "folder": str(package.folder),
            "version": package.version,
            "commit": package.commit,
        }
        for package in store.packages.values()
    }
    assert outcome.manifest is not None
    outcome.manifest = replace(
        outcome.manifest,
        pack=VERSION,
        digest=digest(str(pack.root)),
        profile=selection.profile.name,
        fixes=tuple(fix.id for fix in fixes),
        unwritten=selection.unwritten,
        request=dict(request),
        packages=packages,
    )
    return outcome


def _restored(store: Store) -> _Outcome:
    before = store.manifest()
    pristine = _Pristine(store, before, before.fixes if before else ())
    outcome = _changes(store, before, [], pristine)
    outcome.manifest = None
    return outcome


def _changes(
    store: Store, before: Manifest | None, planned: Sequence[PlannedFile], pristine: _Pristine
) -> _Outcome:
    """What has to be written so that the planned files, and no others, differ from the image's."""
    removed = store.removed_packages(before)
    old_files = {
        path: entry
        for path, entry in (before.files if before else {}).items()
        if path.split("/")[0] not in removed
    }
    files: dict[str, FileEntry] = {}
    sources: list[Change] = []
    kept: dict[str, bytes] = {}
    notes = [
        f"{name} is not installed any more: what was applied to it is forgotten" for name in removed
    ]
    texts: dict[str, tuple[bytes, bytes]] = {}
    for file in planned:
        original = pristine.find(file.path)
        on_disk = store.read(file.path)
        entry = old_files.get(file.path)
        shipped = original[0] if original else None
        new = _new_state(shipped, on_disk[0] if on_disk else None, file.rewritten)
        texts[file.path] = (file.pristine or b"", file.rewritten)
        if entry and entry.applied and on_disk and on_disk[0].sha256 == new.sha256:
            new = entry.applied
        else:
            sources.append(Change(file.path, on_disk and on_disk[0], new, file.rewritten))
            notes += _link_notes(store.locate(file.path), shipped)
        files[file.path] = FileEntry(shipped, new, file.fixes)
        for found in (original, on_disk):
            if found:
                kept[found[0].sha256] = found[1]
    for path, entry in old_files.items():
        if path in files or entry.applied is None:
            continue
        original = pristine.find(path)
        on_disk = store.read(path)
        if on_disk and on_disk[0].sha256 == entry.applied.sha256:
            shipped, data = original if original else (None, None)
            sources.append(Change(path, on_disk[0], shipped, data))
            kept[on_disk[0].sha256] = on_disk[1]
            texts[path] = (data or b"", data or b"")
    changes = []
    for change in sources:
        changes += _bytecode_changes(store, change, old_files, files, kept)
    changes += sources
    changed = {change.path for change in changes}
    for path, entry in old_files.items():
        source = source_of(path)
        as_it_was = source in files and source not in changed
        if entry.applied is None and path not in files and as_it_was:
            files[path] = entry
    manifest = Manifest(os.urandom(16).hex(), "", "", "", (), (), {}, {}, files)
    return _Outcome(manifest, before, changes, kept, texts, notes)


def _new_state(shipped: FileState | None, now: FileState | None, data: bytes) -> FileState:
    """State of a rewritten file: the shipped one's mode and owner, a time of its own.

    Bytecode is matched by the source's size and whole second, so the second must be another one
    than that of the file it replaces.
    """
    mtime = time.time_ns()
    if now is not None and mtime // 10**9 == now.mtime_ns // 10**9:
        mtime += 10**9
    if shipped is None:
        return FileState(sha256(data), _SUPPORT_MODE, os.geteuid(), os.getegid(), mtime)
    return FileState(sha256(data), shipped.mode, shipped.uid, shipped.gid, mtime)


def _link_notes(path: Path, shipped: FileState | None) -> list[str]:
    if shipped is None:
        return []
    if shipped.link:
        return [f"{path}: was a link to {shipped.link}, which stays as it is"]
    if hard_links(path):
        return [f"{path}: was shared with a package store by a hard link; the store's copy stays"]
    return []


def _bytecode_changes(
    store: Store,
    change: Change,
    old_files: Mapping[str, FileEntry],
    files: dict[str, FileEntry],
    kept: dict[str, bytes],
) -> list[Change]:
    """Take compiled code of a changed source away, the image's own to be given back on revert."""
    if not change.path.endswith(".py"):
        return []
    folder, _, name = change.path.rpartition("/")
    on_disk = _compiled(store.locate(change.path).parent / "__pycache__", name[:-3])
    paths = {f"{folder}/__pycache__/{name}" for name in on_disk}
    source = old_files.get(change.path)
    # A source that the pack did not write is the image's, a new one maybe, and so is its bytecode.
    was_shipped = source is None or not _same(source.applied, change.old)
    if not was_shipped:
        paths |= {path for path in old_files if source_of(path) == change.path}
    changes = []
    for path in sorted(paths):
        found = store.read(path)
        old_entry = None if was_shipped else old_files.get(path)
        shipped = old_entry.pristine if old_entry else found[0] if found and was_shipped else None
        data = store.object(shipped.sha256) if old_entry and shipped else None
        if change.path in files:
            target = None
            if shipped is not None:
                files[path] = FileEntry(shipped, None)
        else:
            target = shipped
        if (found[0].sha256 if found else None) != (target and target.sha256):
            changes.append(Change(path, found and found[0], target, data))
        if found:
            kept[found[0].sha256] = found[1]
    return changes


def _cached_elsewhere(path: Path) -> list[Path]:
    """Bytecode of a source under PYTHONPYCACHEPREFIX: a cache, so it is removed and that is all."""
    if sys.pycache_prefix is None or path.suffix != ".py":
        return []
    cached = Path(importlib.util.cache_from_source(str(path)))
    return [cached.parent / name for name in _compiled(cached.parent, path.stem)]


def _compiled(folder: Path, stem: str) -> list[str]:
    """The bytecode files of a source. Not `Path.glob`, for which what it may not read is empty."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name.startswith(f"{stem}.") and name.endswith(".pyc"))


# Around a run -------------------------------------------------------------------------------------


def _prepared(
    pack: Pack,
    selection: Selection,
    request: Mapping[str, Any],
    site_packages: Path | None,
    only: Sequence[str],
) -> tuple[Store, dict[str, Package], list[str], Callable[[], _Outcome]]:
    """What a run starts from: where it writes, what it found and noticed, and how to compute it."""
    profile = selection.profile
    pins = list(profile.packages.values())
    packages = find_packages(pins, site_packages)
    require_packages(only or list(profile.packages), packages, site_packages)
    for package in packages.values():
        if overlay.is_overlay(str(package.folder.parent)):
            raise ImageMismatch(
                f"{package.folder} is an overlay that the pack built; take it off the path to"
                " rewrite the packages themselves, or name its folder with --overlay"
            )
    provision.require("libcst")
    fixes = pack.fixes(selection.chosen)
    lock = pack.lock(profile.name)
    if only:
        fixes, lock = _limited(fixes, lock, only)
    notes = [
        f"{pin.name} calls itself {packages[pin.name].version}, the profile is for {pin.version};"
        " the fingerprints decide"
        for pin in pins
        if pin.name in packages and release_differs(pin, packages[pin.name])
    ]
    notes += [package.note for package in packages.values() if package.note]
    store = Store(packages)

    def compute() -> _Outcome:
        try:
            return _outcome(store, pack, selection, fixes, lock, request)
        except Mismatches as error:
            raise Mismatches(error.found, _advice(pack, profile, store)) from None

    return store, packages, notes, compute


_CANNOT_WRITE = (
    "run as a user who may write to the packages, apply the fixes in an image layer, or build an"
    " overlay in a folder that can be written with --overlay DIR"
)

_CANNOT_OVERLAY = "--overlay takes a folder on a volume with some room that this user may write to"


@contextlib.contextmanager
def _writing(store: Store, timeout: float) -> Iterator[None]:
    """Hold the store's lock; what the file system refuses is :class:`CannotWrite`."""
    try:
        with store.locked(timeout):
            yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room there, and run it again" if full else _CANNOT_WRITE
        raise CannotWrite(f"{describe(error)}; {advice}") from error


def _folders_of(store: Store, changes: Sequence[Change]) -> Iterable[Path]:
    """The folders that a run with these changes writes to."""
    if not changes:
        return ()
    own = {store.folder.parent, store.folder, store.folder / "objects"}
    return {*own, *(store.locate(change.path).parent for change in changes)}


def _nearest(folder: Path) -> Path:
    """The folder itself or, where it is yet to be made, the one to make it in."""
    return next(f for f in (folder, *folder.parents) if f.exists())


def _check_writable(folders: Iterable[Path], advice: str = _CANNOT_WRITE) -> None:
    """What a dry run can tell about writing: folders that this user may not write to."""
    refused = sorted(str(f) for f in folders if f.exists() and not os.access(f, os.W_OK | os.X_OK))
    if refused:
        where = "\n".join(f"no permission to write in {folder}" for folder in refused)
        raise CannotWrite(f"{where}\n{advice}")


def _check_path_comes_first(names: Sequence[str]) -> None:
    """Would an overlay on PYTHONPATH be imported? Some editable installs put themselves before."""
    with tempfile.TemporaryDirectory(prefix="gaudi-fix-pack-") as folder:
        for name in names:
            Path(folder, name).mkdir()
            Path(folder, name, "__init__.py").touch()
        look = (
            "import sys, importlib.util as u\nfor n in sys.argv[1:]: print(u.find_spec(n).origin)"
        )
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", look, *names],
            env={**os.environ, "PYTHONPATH": path},
            cwd="/",
            capture_output=True,
            text=True,
        )
    elsewhere = [origin for origin in done.stdout.splitlines() if not origin.startswith(folder)]
    if done.returncode or elsewhere:
        raise ImageMismatch(
            f"an overlay on PYTHONPATH would not be imported: {' '.join(elsewhere) or done.stderr}"
            " comes first (an editable install does that); apply the fixes to it without --overlay"
        )


def _store(pack: Pack, site_packages: Path | None) -> tuple[Store, dict[str, Package]]:
    pins = all_pins(pack)
    packages = find_packages(pins, site_packages)
    if not packages:
        require_packages([pins[0].name], packages, site_packages)
    return Store(packages), packages


def _limited(
    fixes: Sequence[LoadedFix], lock: Lock, only: Sequence[str]
) -> tuple[list[LoadedFix], Lock]:
    """The fixes and locked sites in some packages alone."""

    def inside(path: str) -> bool:
        return path.split("/")[0] in only

    sites = {
        fix: tuple(s for s in entries if inside(s.file)) for fix, entries in lock.sites.items()
    }
    limited = [
        replace(
            fix,
            sites=tuple(site for site in fix.sites if inside(site.file)),
            fix=replace(
                fix.fix,
                relies_on=tuple(label for label in fix.fix.relies_on if inside(label)),
                support={path: name for path, name in fix.fix.support.items() if inside(path)},
            ),
        )
        for fix in fixes
    ]
    return [fix for fix in limited if fix.sites], Lock(lock.profile, sites, lock.files)


def _fits(pack: Pack, name: str, store: Store) -> bool:
    profile = pack.profile(name)
    written = [entry.id for entry in profile.entries if entry.id not in pack.unwritten]
    read: Callable[[str], bytes | None] = _Pristine(store, store.manifest(), written)
    try:
        fixes, lock = pack.fixes(written), pack.lock(name)
        if len(store.packages) < len(profile.packages):
            fixes, lock = _limited(fixes, lock, list(store.packages))
        return bool(fixes) and fits(fixes, lock, read)
    except ImageMismatch:
        return False


def _advice(pack: Pack, profile: Profile, store: Store) -> str:
    others = [name for name in matching_profiles(pack, store.packages) if name != profile.name]
    if others:
        return f"The installed packages are those of --profile {' or '.join(others)}."
    return (
        "Use the image that the profile is for, leave the fix out with --without, or look at the"
        " definition with `python3 fixes/dev.py port`."
    )

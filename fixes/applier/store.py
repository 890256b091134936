"""The state directory: what is applied, what it was before, and the journal of a run under way.

It stands in the first package of the profile (a pod may have no other writable place):

    manifest.json     what is applied now; its replacement is the moment a run is committed
    journal.json      a run under way: written before its first change, removed after its last
    objects/<sha256>  the pristine content of every changed file, and of what a run replaces
    lock              held by the run that writes

A run that died is rolled back from the journal, or finished when its manifest is in place. Nothing
in here is trusted: paths must stay in the packages and content must have the hash it is named by.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fixes.applier.digest import LARGEST_TEXT, STATE_FOLDER
from fixes.applier.errors import Busy, CannotWrite, ImageMismatch
from fixes.applier.files import (
    TEMPORARY_SUFFIX,
    FileState,
    place_file,
    read_file,
    remove_file,
    sha256,
    stage_file,
    sync_folder,
    temporary_name,
)
from fixes.applier.locate import Package
from fixes.applier.profiles import check_path

MANIFEST_SCHEMA = 1

_MARK = re.compile(rb"^[ \t]*# fix: [a-z][a-z0-9-]*[ \t\r]*$", re.M)


@dataclass(frozen=True)
class FileEntry:
    """A file in the manifest: as the image had it and as the pack left it (None: no file)."""

    pristine: FileState | None
    applied: FileState | None
    fixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What is applied now; by ``request`` and ``digest`` an equal run sees it has nothing to do."""

    transaction: str
    pack: str
    digest: str
    profile: str
    fixes: tuple[str, ...]
    unwritten: tuple[str, ...]
    request: Mapping[str, Any]
    packages: Mapping[str, Mapping[str, str]]
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The manifest as JSON data."""
        return {"schema": MANIFEST_SCHEMA, **asdict(self)}

    @classmethod
    def of(cls, document: dict[str, Any]) -> Manifest:
        """Read it back; KeyError, TypeError or ValueError when it is not one."""
        if document.pop("schema") != MANIFEST_SCHEMA:
            raise ValueError("another schema")
        files = {}
        paths = document.pop("files")
        _check_paths(paths)
        for path, entry in paths.items():
            files[path] = FileEntry(
                _state(entry["pristine"]), _state(entry["applied"]), _texts(entry["fixes"])
            )
        for key in ("fixes", "unwritten"):
            document[key] = _texts(document[key])
        _texts([document[key] for key in ("transaction", "pack", "digest", "profile")])
        for package in document["packages"].values():
            _texts([package[key] for key in ("folder", "version", "commit")])
        return cls(**document, files=files)


@dataclass(frozen=True)
class Change:
    """One file of a run: what it is now, what it becomes (None: no file) and the new content."""

    path: str
    old: FileState | None
    new: FileState | None
    data: bytes | None = None


def _check_paths(paths: Collection[str]) -> None:
    """Only sources, and bytecode of sources that are named too, are ever rewritten or restored."""
    for path in paths:
        check_path(path)
        source = source_of(path)
        if not path.endswith(".py") and source not in paths:
            raise ValueError(f"{path}: not a file that the pack writes")


def source_of(path: str) -> str:
    """The source of a bytecode path ``a/__pycache__/b.cpython-312.pyc``: ``a/b.py``."""
    folder, _, name = path.rpartition("/__pycache__/")
    return f"{folder}/{name.split('.')[0]}.py" if folder and path.endswith(".pyc") else ""


def is_marked(data: bytes) -> bool:
    """Does a file carry the mark of any fix, as all that the pack has written do?"""
    return _MARK.search(data) is not None


def _texts(found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError("no texts")
    return tuple(found)


def _state(document: dict[str, Any] | None) -> FileState | None:
    if document is None:
        return None
    state = FileState(**document)
    numbers = (state.mode, state.uid, state.gid, state.mtime_ns)
    if not all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers):
        raise ValueError("no file state")
    if state.mode & ~0o7777 or max(state.uid, state.gid) >= 2**32 - 1:
        raise ValueError("no file state")
    _texts([state.sha256, state.link])
    if len(state.sha256) != 64 or not all(c in "0123456789abcdef" for c in state.sha256):
        raise ValueError("no hash")
    return state


class Store:
    """The state directory of an installation and the only way its packages are written."""

    def __init__(self, packages: Mapping[str, Package]) -> None:
        self.packages = packages
        # A package that was installed later does not move the state.
        folders = [package.folder / STATE_FOLDER for package in packages.values()]
        self.folder = next(filter(_in_use, folders), folders[0])
        self.notes: list[str] = []

    # Paths and reading --------------------------------------------------------------------------

    def locate(self, path: str) -> Path:
        """The place of a manifest or lock path. Raises when it is reached through a symlink."""
        check_path(path)
        name, *parts = path.split("/")
        if name not in self.packages:
            raise ImageMismatch(
                f"the pack rewrote {path}, and {name} is not installed here any more; bring it back"
                f" to go on, or reinstall the other packages and remove {self.folder}"
            )
        full = self.packages[name].folder.joinpath(*parts)
        if os.path.realpath(full.parent) != str(full.parent):
            raise ImageMismatch(
                f"{full}: its folder is a symbolic link, so what it holds belongs to something else"
            )
        return full

    def read(self, path: str) -> tuple[FileState, bytes] | None:
        """A file as it is on disk."""
        return read_file(self.locate(path))

    def hash_of(self, path: str) -> str | None:
        """The hash of a file as it is on disk; None where there is none."""
        found = self.read(path)
        return found[0].sha256 if found else None

    def object(self, digest: str) -> bytes:
        """Kept content, checked by its hash."""
        found = read_file(self.folder / "objects" / digest)
        if found is None or found[0].sha256 != digest:
            raise ImageMismatch(
                f"{self.folder}: the kept copy {digest[:12]} is missing or damaged, so the image's"
                " files cannot be restored from it; reinstall the package and remove this folder"
            )
        return found[1]

    def manifest(self) -> Manifest | None:
        """What is applied, or None."""
        document = self._load("manifest.json")
        if document is None:
            return None
        try:
            return Manifest.of(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged("manifest.json", error) from None

    def removed_packages(self, manifest: Manifest | None) -> list[str]:
        """Packages of the manifest that are not on disk any more.

        Raises :class:`ImageMismatch` for one that is only out of this environment's sight: what was
        applied to it must not be forgotten.
        """
        files = manifest.files if manifest else {}
        names = sorted({path.split("/")[0] for path in files} - set(self.packages))
        for name in names:
            folder = manifest.packages.get(name, {}).get("folder", "") if manifest else ""
            if os.path.isdir(folder):
                raise ImageMismatch(
                    f"the pack rewrote {name} in {folder}, but {name} is not installed in this"
                    " environment; run the pack with the one that imports it from there"
                )
        return names

    def position(self) -> tuple[str | None, bool]:
        """The last committed transaction, and whether a run is under way or has died.

        One that died before its journal has left a folder without a manifest or temporary files.
        """
        for folder in (self.folder, self.folder / "objects"):
            if folder.is_symlink():
                raise ImageMismatch(f"{folder}: is a link, and the pack makes none; remove it")
        manifest = self.manifest()
        names = [path.name for path in self._state_files()]
        unsettled = "journal.json" in names or (manifest is None and _is_there(self.folder))
        unsettled = unsettled or any(name.endswith(TEMPORARY_SUFFIX) for name in names)
        return (manifest.transaction if manifest else None), unsettled

    def moment(self) -> tuple[list[tuple[int, int]], tuple[str | None, bool]]:
        """The position, and times that any run leaves changed, also one that is rolled back.

        What was read without the lock is of one piece if the moment is the same after it.
        """
        times = []
        for folder in (self.folder.parent, self.folder):
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(folder)
                times.append((found.st_ino, found.st_mtime_ns))
        return times, self.position()

    def _state_files(self) -> Iterator[Path]:
        for folder in (self.folder, self.folder / "objects"):
            with contextlib.suppress(FileNotFoundError):
                yield from list(folder.iterdir())

    def _load(self, name: str) -> dict[str, Any] | None:
        found = read_file(self.folder / name, LARGEST_TEXT)
        if found is None:
            return None
        try:
            document = json.loads(found[1])
        except (ValueError, RecursionError) as error:
            raise self._damaged(name, error) from None
        if not isinstance(document, dict):
            raise self._damaged(name, ValueError("no JSON object"))
        return document

    def _damaged(self, name: str, error: Exception) -> ImageMismatch:
        return ImageMismatch(
            f"{self.folder / name}: not written by this pack ({error});"
            " reinstall the packages and remove this folder"
        )

    # Writing ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Hold the lock. Waits for another run for so long, then raises :class:`Busy`."""
        descriptor = self._take_lock(time.monotonic() + seconds)
        try:
            self._furnish(descriptor)
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # what was kept for a run that came to nothing
                if not _is_there(self.folder / "journal.json"):
                    self._forget_objects(self.manifest())
            raise
        finally:
            # The run is over, well or not, whatever becomes of this: the next one tidies up.
            with contextlib.suppress(Exception):
                if not _in_use(self.folder):
                    self._remove_folder()
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _take_lock(self, deadline: float) -> int:
        path = self.folder / "lock"
        while True:
            with contextlib.suppress(FileExistsError):
                _make_folder(self.folder)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(path, flags, 0o600)
            except FileNotFoundError:
                continue  # a run that reverted removed the folder under us
            except BaseException:
                with contextlib.suppress(OSError):
                    os.rmdir(self.folder)  # no more than the empty one made above
                raise
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Locking a file that a reverting run has meanwhile removed would lock nobody out.
                if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                    return descriptor
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    raise Busy(
                        f"another run holds {path} and did not finish in time; look for a hanging"
                        " apply_all.py, or wait longer with --lock-timeout"
                    ) from None
                time.sleep(0.05)
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _remove_folder(self) -> None:
        """Remove the state folder, the lock last: without it the folder is somebody else's."""
        shutil.rmtree(self.folder / "objects", ignore_errors=True)
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.name != "lock":
                    remove_file(path)
            remove_file(self.folder / "lock")
            os.rmdir(self.folder)

    def _furnish(self, lock: int) -> None:
        with contextlib.suppress(PermissionError):  # somebody else's, as it should be
            os.fchmod(lock, 0o600 | 0o060 * _group_writes(self.folder))
        with contextlib.suppress(FileExistsError):
            _make_folder(self.folder / "objects")
        ignore = self.folder / ".gitignore"
        if not ignore.exists():  # an editable install is somebody's checkout
            self._write(ignore, b"*\n")

    def _write(self, path: Path, data: bytes) -> None:
        self._stage_own(path, data)
        place_file(path)

    @staticmethod
    def _stage_own(path: Path, data: bytes) -> None:
        state = FileState(sha256(data), 0o644, os.geteuid(), os.getegid(), time.time_ns())
        stage_file(path, state, data)

    def keep(self, state: FileState | None, data: bytes | None) -> None:
        """Keep a file's content under its hash."""
        if state is not None and data is not None:
            path = self.folder / "objects" / state.sha256
            found = read_file(path)
            if found is None or found[0].sha256 != state.sha256:
                self._write(path, data)

    def commit(self, changes: Sequence[Change], manifest: Manifest | None) -> None:
        """Carry out all changes and make the manifest the new one (None: remove it), or nothing.

        Whatever a change or the manifest restores must be kept before. Raises
        :class:`CannotWrite` after a roll-back.
        """
        for change in changes:
            now = self.hash_of(change.path)
            if now != (change.old and change.old.sha256) and not change.path.endswith(".pyc"):
                raise ImageMismatch(
                    f"{self.locate(change.path)}: was changed while the run was being prepared;"
                    " nothing is written; run it again"
                )
        journal = {
            "to": manifest.transaction if manifest else None,
            "changes": [
                {"path": c.path, "old": c.old and asdict(c.old), "new": c.new and asdict(c.new)}
                for c in changes
            ],
        }
        try:
            sync_folder(self.folder / "objects")
            self._write(self.folder / "journal.json", _json(journal))
            sync_folder(self.folder)
            sync_folder(self.folder.parent)
            # All that takes space comes before the first file is replaced: on a full disk there
            # would be none to roll back with either.
            for change in changes:
                self._stage(change.path, change.new, change.data)
            if manifest is not None:
                self._stage_own(self.folder / "manifest.json", _json(manifest.document()))
            for change in changes:
                self._place(change.path, change.new)
            self._sync(change.path for change in changes)
            if manifest is None:
                remove_file(self.folder / "manifest.json")
            else:
                place_file(self.folder / "manifest.json")
            sync_folder(self.folder)
        except BaseException as error:
            if self.recover() == "completed" and isinstance(error, Exception):
                return
            if isinstance(error, OSError):
                raise CannotWrite(f"{describe(error)}; everything was rolled back") from error
            raise
        try:
            remove_file(self.folder / "journal.json")
            sync_folder(self.folder)
            self._forget_objects(manifest)
        except Exception as error:  # the run is committed: this is only tidying up
            self.notes.append(f"{describe(error)}; the next run tidies the state folder up")

    def recover(self) -> str:
        """Finish or roll back a run that died; says ``completed``, ``rolled back`` or nothing."""
        for path in self._state_files():
            if path.name.endswith(TEMPORARY_SUFFIX):
                remove_file(path)
        journal = self._load("journal.json")
        if journal is None:
            return ""
        try:
            target = journal["to"]
            changes = [
                Change(entry["path"], _state(entry["old"]), _state(entry["new"]))
                for entry in journal["changes"]
            ]
            _check_paths([change.path for change in changes])
            for change in changes:
                if change.path.split("/")[0] not in self.packages:
                    raise ValueError(f"{change.path}: no package of this installation")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged("journal.json", error) from None
        manifest = self.manifest()
        committed = (manifest.transaction if manifest else None) == target
        for change in changes:
            remove_file(temporary_name(self.locate(change.path)))
        if not committed:
            self._roll_back(changes)
        self._sync(change.path for change in changes)
        remove_file(self.folder / "journal.json")
        sync_folder(self.folder)
        self._forget_objects(manifest)
        return "completed" if committed else "rolled back"

    def _roll_back(self, changes: Sequence[Change]) -> None:
        strange = []
        wanted = []
        for change in changes:
            found = self.read(change.path)
            now = found[0].sha256 if found else None
            if now == (change.old and change.old.sha256):
                continue
            data = self.object(change.old.sha256) if change.old else None
            wanted.append((change, data))
            # Bytecode that is neither was compiled by whoever imported the half-written package.
            if change.path.endswith(".pyc"):
                continue
            if now != (change.new and change.new.sha256):
                strange.append(str(self.locate(change.path)))
            elif not is_marked(found[1] if found else b"") and not is_marked(data or b""):
                raise self._damaged("journal.json", ValueError(f"{change.path} carries no mark"))
        if strange:
            raise ImageMismatch(
                "an interrupted run cannot be rolled back: somebody changed "
                + ", ".join(strange)
                + "; reinstall the package and remove "
                + str(self.folder)
            )
        for change, data in wanted:
            self._stage(change.path, change.old, data)
            self._place(change.path, change.old)

    def _stage(self, path: str, state: FileState | None, data: bytes | None) -> None:
        if state is None:
            return
        full = self.locate(path)
        if full.parent.name == "__pycache__":
            with contextlib.suppress(FileExistsError):
                _make_folder(full.parent)
        assert data is not None
        granted = replace(state, mode=state.mode & (0o755 | self._granted(path)))
        if not stage_file(full, granted, data):
            self.notes.append(f"{full}: its owner could not be kept (not permitted)")

    def _granted(self, path: str) -> int:
        """The permissions of a file's predecessor, or of the source of what is compiled.

        The manifest may have been tampered with: it gives nobody the right to write to a file, or
        to run it as somebody else, that nobody has there now.
        """
        for name in filter(None, (path, source_of(path))):
            with contextlib.suppress(FileNotFoundError):
                return os.stat(self.locate(name)).st_mode & 0o7777
        return 0

    def _place(self, path: str, state: FileState | None) -> None:
        full = self.locate(path)
        if state is None:
            remove_file(full)
        else:
            place_file(full)

    def _sync(self, paths: Iterator[str]) -> None:
        for folder in {self.locate(path).parent for path in paths}:
            if folder.is_dir():
                sync_folder(folder)

    def _forget_objects(self, manifest: Manifest | None) -> None:
        wanted = {
            entry.pristine.sha256
            for entry in (manifest.files if manifest else {}).values()
            if entry.pristine
        }
        for path in list((self.folder / "objects").iterdir()):
            if path.name not in wanted:
                remove_file(path)


def _in_use(folder: Path) -> bool:
    return any(map(_is_there, (folder / "manifest.json", folder / "journal.json")))


def _is_there(path: Path) -> bool:
    """Not `Path.exists`: whether that takes an error for absence depends on the Python."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _make_folder(path: Path) -> None:
    """Make a folder that everyone can read, whatever the umask: other users start vllm too.

    In one call: a run that reverts may remove an empty state folder before a second one.
    """
    mode = 0o755 | 0o020 * _group_writes(path.parent)
    umask = os.umask(0)
    try:
        os.mkdir(path, mode)
    finally:
        os.umask(umask)


def _group_writes(folder: Path) -> bool:
    """May the group write here? OpenShift runs images as any user, but of the image's group."""
    return bool(os.stat(folder).st_mode & 0o020)


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


def describe(error: Exception) -> str:
    """An error, one of the operating system with its file."""
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"

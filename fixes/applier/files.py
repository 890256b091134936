"""Single files: their state, and replacing them without ever writing through a link.

Package managers hard-link or symlink installed files from a store (uv, conda, pnpm-style layouts):
a new file is written beside the old one and renamed over it, so the store's copy stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from fixes.applier.digest import LARGEST_FILE
from fixes.applier.errors import ImageMismatch

TEMPORARY_SUFFIX = ".gaudi-fix-pack~"


@dataclass(frozen=True)
class FileState:
    """A file's content by hash, and what is restored with it. ``link`` is a symlink's text."""

    sha256: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    link: str = ""


def sha256(data: bytes) -> str:
    """The hash that manifests, journals and objects go by."""
    return hashlib.sha256(data).hexdigest()


def read_file(path: Path, limit: int = LARGEST_FILE) -> tuple[FileState, bytes] | None:
    """A file's state and content; None where there is nothing.

    Raises :class:`ImageMismatch` for what is no regular file (nor a link to one), and for one of
    more than ``limit`` bytes.
    """
    try:
        itself = os.lstat(path)
        link = os.readlink(path) if stat.S_ISLNK(itself.st_mode) else ""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ImageMismatch(f"{path}: not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ImageMismatch(f"{path}: larger than {limit >> 20} MiB, so it is not read")
    state = FileState(
        sha256(data),
        stat.S_IMODE(found.st_mode),
        found.st_uid,
        found.st_gid,
        found.st_mtime_ns,
        link,
    )
    return state, data


def hard_links(path: Path) -> int:
    """How many names the file has besides this one."""
    return os.lstat(path).st_nlink - 1


def temporary_name(path: Path) -> Path:
    """Where the new content of a file stands until it is renamed: recovery knows it by name."""
    return path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")


def stage_file(path: Path, state: FileState, data: bytes) -> bool:
    """Write a file beside its place: content, mode, owner, time and, from the file it replaces,
    attributes, all of it synced.

    Returns whether the owner could be kept: an unprivileged user of a group-writable image cannot
    give files away.
    """
    temporary = temporary_name(path)
    remove_file(temporary)
    try:
        if state.link:
            os.symlink(state.link, temporary)
            return True
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            _copy_attributes(path, descriptor)
            owner_kept = _give_to(descriptor, state.uid, state.gid)
            os.fchmod(descriptor, state.mode)
            os.utime(descriptor, ns=(state.mtime_ns, state.mtime_ns))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_file(temporary)
        raise
    return owner_kept


def place_file(path: Path) -> None:
    """Rename what was staged into place, or take it away."""
    temporary = temporary_name(path)
    try:
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_file(temporary)
        raise


def _give_to(descriptor: int, uid: int, gid: int) -> bool:
    now = os.fstat(descriptor)
    if (now.st_uid, now.st_gid) == (uid, gid):
        return True
    try:
        os.fchown(descriptor, uid, gid)
    except OSError as error:
        # EINVAL: the owner has no number in this user namespace (a rootless container).
        if error.errno not in (errno.EPERM, errno.EACCES, errno.EINVAL):
            raise
        with contextlib.suppress(OSError):
            os.fchown(descriptor, -1, gid)
        return False
    return True


def _copy_attributes(old: Path, descriptor: int) -> None:
    """Extended attributes (SELinux labels and the like), where the file system has any."""
    unsupported = {errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.ENODATA, errno.EINVAL}
    try:
        for name in os.listxattr(old):
            os.setxattr(descriptor, name, os.getxattr(old, name))
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in unsupported:
            raise


def remove_file(path: Path) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sync_folder(path: str | Path) -> None:
    """Make the names in a folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

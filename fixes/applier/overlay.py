"""An overlay: both packages in a folder of their own, for an image that cannot be written.

    DIR/<id>/vllm, DIR/<id>/vllm_gaudi    links to the image, files of its own for what is rewritten
    DIR/<id>/gaudi-fix-pack-overlay.json  what it was built from, and the hash of each own file
    DIR/current                           a link to the overlay that was asked for last

An overlay is built under another name and renamed into place, so one that can be found is whole,
and it is never changed afterwards: pods that share the volume need no lock. One that no longer
fits, because the image or the set of fixes is another, is left to the processes that use it, and a
new one is built beside it. Python sees links where the image has files: what is found by a module's
own name (extensions, data) is found as in the image.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat

from fixes.applier.digest import LARGEST_FILE, LARGEST_TEXT, STATE_FOLDER

# The run that finds its overlay built loads nothing else.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

NAME = "gaudi-fix-pack-overlay.json"
CURRENT = "current"
_SCHEMA = 1
_ABANDONED = 3600  # seconds after which what a killed run left is removed: building takes a few


def is_overlay(folder: str) -> bool:
    """Is this path entry an overlay of the pack, and not an installation?"""
    return os.path.isfile(os.path.join(folder, NAME))


def find(
    root: str, request: Mapping[str, Any], digest: str, folders: Mapping[str, str]
) -> tuple[str, dict[str, Any]] | None:
    """The overlay below ``root`` that is what a run would build now, with its document.

    ``folders`` are the image's package folders by name. None where there is no such overlay, be it
    that the image has changed since or that somebody has changed the overlay.
    """
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return None
    for name in names:
        path = os.path.join(root, name)
        if name.startswith(".") or os.path.islink(path) or not is_overlay(path):
            continue
        try:
            document = json.loads(content(os.path.join(path, NAME), LARGEST_TEXT))
            if (
                (document["schema"], document["request"]) == (_SCHEMA, request)
                and document["digest"] == digest
                and {key: p["folder"] for key, p in document["packages"].items()} == folders
                and _is_whole(path, folders, document["files"])
            ):
                return path, document
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # not one of ours, or damaged
    return None


def build(
    root: str,
    document: Mapping[str, Any],
    folders: Mapping[str, str],
    contents: Mapping[str, tuple[bytes, int]],
) -> str:
    """Build an overlay below ``root`` and return its path.

    ``document`` has the keys ``request``, ``digest``, ``packages``, ``fixes``, ``unwritten`` and
    ``files``; the last maps each path on which overlay and image differ to the hashes ``image``
    (of the image's file as it is now) and ``own``, None for no file. ``contents`` are content and
    mode of the own files. Raises OSError, and then nothing but a folder with a dot is left.
    """
    import shutil

    from fixes.applier.files import sync_folder

    _make_root(root)
    _remove_abandoned(root)
    name = os.urandom(6).hex()
    path, temporary = os.path.join(root, name), os.path.join(root, f".{name}")
    os.mkdir(temporary)
    try:
        os.chmod(temporary, 0o755)
        for relative, target in _layout(folders, document["files"]):
            full = os.path.join(temporary, relative)
            if target is not None:
                os.symlink(target, full)
            elif relative in contents:
                _write(full, *contents[relative])
            else:
                os.mkdir(full)
                os.chmod(full, 0o755)
        data = json.dumps({"schema": _SCHEMA, **document}, indent=1).encode()
        _write(os.path.join(temporary, NAME), data, 0o644)
        for folder, _, _ in os.walk(temporary):
            sync_folder(folder)
        os.rename(temporary, path)
        sync_folder(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def make_current(path: str) -> None:
    """Let ``current`` beside the overlay name it."""
    root, name = os.path.split(path)
    link = os.path.join(root, CURRENT)
    if os.path.islink(link) and os.readlink(link) == name:
        return
    from fixes.applier.files import sync_folder

    temporary = os.path.join(root, f".{os.urandom(6).hex()}")
    os.symlink(name, temporary)
    try:
        os.replace(temporary, link)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_folder(root)


def hash_of(path: str) -> str | None:
    """SHA-256 of a file; None where there is none."""
    try:
        return hashlib.sha256(content(path, LARGEST_FILE)).hexdigest()
    except FileNotFoundError:
        return None


def content(path: str, limit: int) -> bytes:
    """A regular file's bytes. ValueError for one of more than ``limit``, or for a pipe, which
    would keep whoever opens it waiting.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
        raise ValueError(f"{path}: no regular file, or larger than {limit >> 20} MiB")
    with open(path, "rb") as file:
        return file.read()


def in_image(folders: Mapping[str, str], path: str) -> str:
    """The place in the image of a path such as ``vllm/v1/engine/core.py``."""
    name, *rest = path.split("/")
    if not rest or any(part in ("", ".", "..") for part in rest):
        raise ValueError(f"a path that leaves the package folders: {path!r}")
    return os.path.join(folders[name], *rest)


def _is_whole(path: str, folders: Mapping[str, str], files: Mapping[str, Any]) -> bool:
    """Is the overlay still what would be built from the image as it is now?"""
    for relative, hashes in files.items():
        if hash_of(in_image(folders, relative)) != hashes["image"]:
            return False
    wanted: dict[str, set[str]] = {"": {NAME}}
    for relative, target in _layout(folders, files):
        full = os.path.join(path, relative)
        folder, _, name = relative.rpartition("/")
        wanted.setdefault(folder, set()).add(name)
        if name == "__pycache__" or folder.endswith("__pycache__"):
            continue  # Python's own: it may have compiled anew
        if target is not None:
            if not os.path.islink(full) or os.readlink(full) != target:
                return False
        elif os.path.islink(full):
            return False
        elif relative in files:
            if hash_of(full) != files[relative]["own"]:
                return False
        else:
            wanted.setdefault(relative, set())
    return all(
        set(os.listdir(os.path.join(path, folder))) - {"__pycache__"} == names - {"__pycache__"}
        for folder, names in wanted.items()
        if not folder.endswith("__pycache__")
    )


def _layout(
    folders: Mapping[str, str], files: Mapping[str, Mapping[str, str | None]]
) -> Iterator[tuple[str, str | None]]:
    """Every path of the overlay, folders first: the target of a link, None for what is its own."""
    own: set[str] = set()
    for path in files:
        parts = path.split("/")
        own.update("/".join(parts[:length]) for length in range(1, len(parts)))
    for name, folder in folders.items():
        if name not in own:
            yield name, folder
    for folder in sorted(own):
        yield folder, None
        image = in_image(folders, folder) if "/" in folder else folders[folder]
        for name in _names(image):
            path = f"{folder}/{name}"
            full = os.path.join(image, name)
            if name == "__pycache__":
                yield path, None
                for compiled in _names(full):
                    if f"{folder}/{compiled.split('.')[0]}.py" not in files:
                        yield f"{path}/{compiled}", os.path.join(full, compiled)
            elif path not in own and path not in files and not _is_ours(name):
                yield path, full
        for path, hashes in files.items():
            if path.rpartition("/")[0] == folder and hashes["own"] is not None:
                yield path, None


def _names(folder: str) -> list[str]:
    """What a folder of the image holds; a new one of the pack is not there. Other errors count."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _is_ours(name: str) -> bool:
    return name == STATE_FOLDER or name.endswith(f"{STATE_FOLDER}~")


def _write(path: str, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)


def _make_root(root: str) -> None:
    """Make the folder of the overlays. Another user's server reads it, whatever the umask."""
    if not os.path.isdir(root):
        _make_root(os.path.dirname(root))
        try:
            os.mkdir(root)
        except FileExistsError:
            return  # another pod was quicker
        os.chmod(root, 0o755)


def _remove_abandoned(root: str) -> None:
    import shutil
    import time

    for name in os.listdir(root):
        path = os.path.join(root, name)
        try:
            if name.startswith(".") and time.time() - os.lstat(path).st_mtime > _ABANDONED:
                if os.path.islink(path):
                    os.unlink(path)
                elif re.fullmatch(r"\.[0-9a-f]{12}", name):  # nothing that is not ours
                    shutil.rmtree(path)
        except FileNotFoundError:
            pass  # another pod was quicker

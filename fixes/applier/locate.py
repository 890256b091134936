"""Find the installed target packages without importing them.

Importing vllm takes seconds, touches the device and would leave stock modules in memory.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fixes.applier.digest import LARGEST_TEXT
from fixes.applier.errors import ImageMismatch
from fixes.applier.files import read_file
from fixes.applier.profiles import PackagePin


@dataclass(frozen=True)
class Package:
    """An installed package: the folder whose files are rewritten, and what it says it is."""

    name: str
    folder: Path
    version: str
    commit: str
    note: str = ""


def find_packages(pins: Sequence[PackagePin], site_packages: Path | None) -> dict[str, Package]:
    """The packages of a profile by name, as ``vllm serve`` of this environment imports them.

    ``site_packages`` looks in another environment's folder instead. A package that is not there is
    left out of the result.
    """
    path = None if site_packages is None else [str(p) for p in _path_of(site_packages)]
    found = {}
    for pin in pins:
        folder = _folder_of(pin.name, path)
        if folder is not None:
            found[pin.name] = _describe(pin, folder, path)
    return found


def missing_message(name: str, site_packages: Path | None) -> str:
    """What to do about a package that is not installed where it was looked for."""
    where = str(site_packages) if site_packages else f"the environment of {sys.executable}"
    message = f"{name} is not installed in {where}"
    if site_packages is not None:
        return f"{message}; name the folder that has it, or rewrite only what is there (--package)"
    command = shutil.which("vllm")
    if command is not None:
        first = _read(Path(command)).partition("\n")[0]
        interpreter = first.removeprefix("#!").strip()
        if first.startswith("#!") and interpreter not in ("", sys.executable):
            return f"{message}; `vllm` runs {interpreter}: run the pack with that interpreter"
    return f"{message}; run the pack with the interpreter that runs vllm, or use --site-packages"


def _path_of(site_packages: Path) -> Iterator[Path]:
    """A site-packages folder and what its .pth files add (lines with code are not run)."""
    yield site_packages
    for pth in sorted(site_packages.glob("*.pth")):
        for line in _read(pth).splitlines():
            if line.strip() and not line.startswith(("#", "import ", "import\t")):
                folder = site_packages / line.strip()
                if folder.is_dir():
                    yield folder


def _folder_of(name: str, path: list[str] | None) -> Path | None:
    if path is None:
        spec = importlib.util.find_spec(name)  # of a top-level name: runs no code of the package
    else:
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or not spec.origin:
            mapped = _editable_mapping(Path(path[0])).get(name)
            if mapped is not None:
                spec = importlib.machinery.PathFinder.find_spec(name, [str(mapped.parent)])
    if spec is None or not spec.origin or not spec.origin.endswith("__init__.py"):
        return None
    return Path(spec.origin).parent


def _editable_mapping(site_packages: Path) -> dict[str, Path]:
    """The package folders named by setuptools' editable finders, read and not run."""
    mapping: dict[str, Path] = {}
    for finder in site_packages.glob("__editable___*_finder.py"):
        match = re.search(r"^MAPPING\b[^=\n]*=\s*(\{.*\})\s*$", _read(finder), re.M)
        with contextlib.suppress(Exception):  # damaged or hostile: it finds nothing
            found = ast.literal_eval(match.group(1)) if match else {}
            folders = {name: Path(folder) for name, folder in found.items()}
            mapping.update({n: folder for n, folder in folders.items() if folder.is_dir()})
    return mapping


def _describe(pin: PackagePin, imported: Path, path: list[str] | None) -> Package:
    """Version and commit as far as the installation tells; images often say less than the truth."""
    folder = Path(os.path.realpath(imported))
    info = _metadata_folder(pin.distribution, sys.path if path is None else path)
    version = _version_in_metadata(info) or _version_in_file(folder / "_version.py")
    commits = [
        _commit_in_version_file(folder / "_version.py"),
        _commit_in_version(version),
        _commit_in_direct_url(info),
        _commit_of_checkout(folder.parent),
    ]
    note = ""
    if imported.is_symlink():
        note = f"{imported} is a link: the folder behind it, {folder}, is what is rewritten"
    elif path is None:
        shadow = Path(pin.name) / "__init__.py"
        if shadow.is_file() and Path(os.path.realpath(shadow.parent)) != folder:
            note = (
                f"the working directory holds another {pin.name}; `vllm serve` does not import it,"
                " but `python -m` from here would"
            )
    commit = next(filter(None, commits), "")
    return Package(pin.name, folder, version or "unknown", commit, note)


def _metadata_folder(distribution: str, path: Sequence[str]) -> Path | None:
    """Where pip keeps what it knows of a distribution. `importlib.metadata` reads without limit."""
    wanted = _plain(distribution)
    for entry in path:
        for info in sorted(Path(entry).glob("*-*info")):
            name, _, kind = info.name.rpartition(".")
            if kind in ("dist-info", "egg-info") and _plain(name.split("-")[0]) == wanted:
                return info
    return None


def _plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _read(path: Path) -> str:
    """The text of a file; nothing where it cannot be had, is a pipe or of no reasonable size."""
    try:
        found = read_file(path, LARGEST_TEXT)
    except (OSError, ValueError, ImageMismatch):
        return ""
    return found[1].decode("utf-8", "replace") if found else ""


def _version_in_metadata(info: Path | None) -> str:
    """The version; nothing where an interrupted uninstall left a folder without metadata."""
    text = (_read(info / "METADATA") or _read(info / "PKG-INFO")) if info else ""
    match = re.search(r"^Version:(.*)$", text, re.M | re.I)
    return _version(match.group(1)) if match else ""


def _version(found: str) -> str:
    """The text if it can be one: it is printed, and compared in a time that grows with it."""
    found = found.strip()
    return found if re.fullmatch(r"[ -~]{1,100}", found) else ""


def _commit_in_version_file(path: Path) -> str:
    match = re.search(r"\bcommit_id\s*=\s*['\"]g?([0-9a-f]{7,40})['\"]", _read(path))
    return match.group(1) if match else ""


def _version_in_file(path: Path) -> str:
    match = re.search(r"\bversion\s*=\s*['\"]([^'\"]+)['\"]", _read(path))
    return _version(match.group(1)) if match else ""


def _commit_in_version(version: str) -> str:
    match = re.search(r"\+(?:.*\.)?g([0-9a-f]{7,40})\b", version)
    return match.group(1) if match else ""


def _commit_in_direct_url(info: Path | None) -> str:
    try:
        text = _read(info / "direct_url.json") if info else ""
        return _commit(json.loads(text or "{}").get("vcs_info", {}).get("commit_id", ""))
    except (ValueError, AttributeError, RecursionError):
        return ""


def _commit(found: object) -> str:
    """The text if it is a commit: whatever else a file holds is none of ours to print."""
    is_one = isinstance(found, str) and re.fullmatch(r"[0-9a-f]{7,64}", found)
    return str(found) if is_one else ""


def _commit_of_checkout(folder: Path) -> str:
    """The commit a git checkout is at, without git: HEAD, a loose ref or a packed one."""
    git = folder / ".git"
    pointer = _read(git).strip()  # a worktree's and a submodule's .git is a file
    if pointer.startswith("gitdir: "):
        git = folder / pointer[len("gitdir: ") :]
    common = git / (_read(git / "commondir").strip() or ".")
    head = _read(git / "HEAD").strip()
    if not head.startswith("ref: "):
        return _commit(head)
    ref = head[len("ref: ") :]
    loose = _read(common / ref).strip()
    packed = re.search(rf"^([0-9a-f]{{40}}) {re.escape(ref)}$", _read(common / "packed-refs"), re.M)
    return _commit(loose) or (packed.group(1) if packed else "")


def release_differs(pin: PackagePin, package: Package) -> bool:
    """Does the package name another release than the profile's? Unreadable versions do not.

    A checkout of a tag may call itself the next release's development version, so this is worth a
    warning and no more: the fingerprints decide.
    """
    from packaging.version import InvalidVersion, Version

    same_commit = package.commit and pin.commit.startswith(package.commit[:7])
    try:
        found, pinned = Version(package.version), Version(pin.version)
    except InvalidVersion:
        return False
    # Of base versions, so that 0.26 is 0.26.0.
    same_release = Version(found.base_version) == Version(pinned.base_version)
    return not same_commit and any(found.release) and not same_release


def require_packages(
    names: Sequence[str], found: dict[str, Package], site_packages: Path | None
) -> None:
    """Raise :class:`ImageMismatch` for packages that are needed and not installed."""
    missing = [missing_message(name, site_packages) for name in names if name not in found]
    if missing:
        raise ImageMismatch("\n".join(missing))

"""Get libcst where the image has none, without touching the image's environment.

The recipes call the pack with nothing before it, and a stock image has no libcst. The pinned
wheels of requirements.txt are installed, hashes checked, into a folder of the pack's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fixes.applier.errors import MissingLibrary, UsageError

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_OLDEST_LIBCST = (1, 1)


def require(name: str) -> None:
    """Make a library importable. Raises :class:`MissingLibrary` with the command that helps."""
    if _usable(name):
        return
    folder = _provisioned()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    if importlib.util.find_spec(name) is None:
        raise MissingLibrary(f"{folder} was provisioned but has no {name}; remove it and try again")


def _usable(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        return False
    if name != "libcst":
        return True
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = tuple(int(n) for n in re.findall(r"\d+", version(name))[:2])
    except PackageNotFoundError:
        return True
    return found >= _OLDEST_LIBCST


def load_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML (Python 3.10 has no parser of its own). Raises :class:`UsageError`."""
    module = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    if module == "tomli":
        require("tomli")
    toml = importlib.import_module(module)
    try:
        document: dict[str, Any] = toml.loads(text)
    except (ValueError, RecursionError) as error:
        line = re.search(r"\bat line (\d+)", str(error))
        number = line.group(1) if line else text.count("\n", 0, -1) + 1
        raise UsageError(f"{where}:{number}: {error or type(error).__name__}") from None
    return document


def _provisioned() -> Path:
    """The folder with the wheels, installed now if it is not there yet."""
    pins = REQUIREMENTS.read_bytes().replace(b"\r\n", b"\n")
    digest = hashlib.sha256(pins).hexdigest()[:16]
    tag = f"{sys.implementation.cache_tag}-{os.uname().machine}-{digest}"
    for cache in _cache_folders():
        folder = cache / tag
        with contextlib.suppress(PermissionError):  # somebody else's: the next one may serve
            if folder.is_dir() and all(map(_is_ours, (cache.parent, cache, folder))):
                return folder
    for cache in _cache_folders():
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (_is_ours(cache.parent) and _is_ours(cache)):
                continue
            work = Path(tempfile.mkdtemp(prefix="provision-", dir=cache))
        except OSError:
            continue
        return _install(work, cache / tag)
    raise MissingLibrary(
        _help("no folder to put it in could be written; GAUDI_FIX_PACK_CACHE names another")
    )


def _cache_folders() -> list[Path]:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    named = os.environ.get("GAUDI_FIX_PACK_CACHE")
    folders = [Path(named)] if named else [Path(home) / "gaudi-fix-pack"]
    with contextlib.suppress(FileNotFoundError):  # there is no temporary directory
        folders.append(Path(tempfile.gettempdir()) / f"gaudi-fix-pack-{os.geteuid()}")
    return [folder / "libraries" for folder in folders]


def _is_ours(folder: Path) -> bool:
    """Nobody but us and root may have put code there: it would run with our rights."""
    found = os.lstat(folder)
    trusted = found.st_uid in (0, os.geteuid())
    return trusted and not found.st_mode & 0o022 and not folder.is_symlink()


def _install(work: Path, folder: Path) -> Path:
    print("gaudi-fix-pack: provisioning libcst and what it needs with pip", file=sys.stderr)
    target = work / "site"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-compile"]
    command += ["--target", str(target), "-r", str(REQUIREMENTS)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PIP_USER": "0"},  # pip refuses --target beside it
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        failure = "" if done.returncode == 0 else done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    try:
        if failure:
            lines = failure.splitlines()
            said = [line for line in lines if line.startswith("ERROR: ")] or lines
            raise MissingLibrary(_help(said[-1].removeprefix("ERROR: ")))
        target.chmod(0o755)
        try:
            os.rename(target, folder)
        except OSError:  # another run was faster
            if not folder.is_dir():
                raise
            if not _is_ours(folder):
                raise MissingLibrary(_help(f"others can write to {folder}")) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _help(reason: str) -> str:
    pins = re.findall(r"^(\S+==\S+)( ;.*)? \\$", REQUIREMENTS.read_text(), re.M)
    wanted = " ".join(pin for pin, marker in pins if not marker or sys.version_info < (3, 11))
    has_pip = importlib.util.find_spec("pip") is not None
    pip = f"{sys.executable} -m pip install"
    install = pip if has_pip else f"uv pip install --python {sys.executable}"
    return (
        f"libcst is missing and could not be provisioned ({reason}); a pod without an"
        f" index needs it in its image; run: {install} {wanted}"
    )

"""Bring the pinned packages of a release, laid out and installed the way the Gaudi images do it.

    python3 fixes/dev.py sources v0.26.0 --into DIR

DIR becomes a site-packages folder: vllm/, vllm_gaudi/, their dist-info, bytecode, and sources.json,
which says where each package came from. A local copy may replace either package: ``--vllm PATH``,
``--vllm-gaudi PATH`` or a variable such as GAUDI_FIX_PACK_VLLM_GAUDI_V0_30_0.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fixes.applier.errors import CannotWrite, UsageError
from fixes.applier.pack import Pack
from fixes.applier.profiles import PackagePin
from fixes.authoring.fetching import (
    SourcesError,
    Unreachable,
    cache_folder,
    extract,
    fetch_commit,
    fetch_sdist,
    sha256_of,
)
from fixes.authoring.installing import (
    Project,
    compile_bytecode,
    install,
    read_project,
    write_record,
)

SUMMARY = "sources.json"
# vLLM's build adds the device it was made for to the version, and the images build it for none.
_LOCAL_VERSION = {"vllm": "+empty"}
_ABANDONED_AFTER = 3600  # seconds


@dataclass
class Origin:
    """Where a package that was laid out came from."""

    kind: str  # "index", "git" or "local"
    version: str = ""
    commit: str | None = None
    sha256: str = ""
    repository: str = ""
    path: str = ""
    note: str = ""


@dataclass
class Sources:
    """The contents of sources.json."""

    release: str
    packages: dict[str, Origin] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    bytecode: str = ""
    schema_version: int = 1

    def as_json(self) -> str:
        """One readable document."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"


def installed_version(pin: PackagePin) -> str:
    """The version as the images' build gives it."""
    return pin.version + _LOCAL_VERSION.get(pin.name, "")


def dispensable(pin: PackagePin) -> bool:
    """A commit known only by its short id cannot be asked of a server: it may be missing."""
    return not pin.sdist_sha256 and len(pin.commit) < 40


def read_summary(site_packages: Path) -> dict[str, Any]:
    """The sources.json of a folder that `lay_out` made; empty for any other folder."""
    path = site_packages / SUMMARY
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def local_copy(
    pin: PackagePin, release: str, cache: Path, environ: Mapping[str, str] = os.environ
) -> Path | None:
    """The local copy that replaces a package: named by a variable, or at the conventional place."""
    variable = "GAUDI_FIX_PACK_" + re.sub(r"\W", "_", f"{pin.name}_{release}").upper()
    if named := environ.get(variable):
        return Path(named).expanduser()
    conventional = cache / f"{pin.distribution}-{release}"
    return conventional if dispensable(pin) and conventional.is_dir() else None


def lay_out(
    release: str,
    pins: Sequence[PackagePin],
    into: Path,
    *,
    local: Mapping[str, Path] | None = None,
    cache: Path | None = None,
    bytecode: bool = True,
) -> Sources:
    """Make `into` a site-packages folder that holds the pinned packages; all of it or nothing."""
    into = into.absolute()
    cache = cache or cache_folder()
    try:
        if into.exists() and (not into.is_dir() or any(into.iterdir())):
            raise UsageError(f"{into} exists and is not an empty folder")
        into.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{into.name}-gaudi-fix-pack-"
        _remove_abandoned(into.parent, prefix)
        with tempfile.TemporaryDirectory(dir=into.parent, prefix=prefix) as folder:
            made = Path(folder, "site-packages")
            made.mkdir()
            result = _fill(made, into, release, pins, local or {}, cache, bytecode)
            _put(made, into)
    except OSError as error:
        raise CannotWrite(f"cannot lay out {into}: {error}") from error
    return result


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """What runs that were killed have left. One that is at work touches its folder more often."""
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(folder, ignore_errors=True)


def _put(made: Path, into: Path) -> None:
    try:
        if into.exists():
            into.rmdir()
        made.rename(into)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UsageError(
                f"{into} is there now, another run has made it meanwhile: use that, or name another"
            ) from None
        raise


def _fill(
    made: Path,
    into: Path,
    release: str,
    pins: Sequence[PackagePin],
    local: Mapping[str, Path],
    cache: Path,
    bytecode: bool,
) -> Sources:
    result = Sources(release, bytecode=platform.python_version() if bytecode else "")
    installed: list[tuple[Path, Project]] = []
    for pin in pins:
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            own = local.get(pin.name) or local_copy(pin, release, cache)
            try:
                root, origin = _bring(pin, own, cache, Path(folder))
                root, project = _with_project(pin, root, origin, cache, Path(folder))
            except Unreachable as error:
                if not dispensable(pin):
                    raise
                result.missing[pin.name] = str(error)
                continue
            origin.version = project.version
            result.packages[pin.name] = origin
            installed.append((install(root, project, made, origin.commit), project))
    if bytecode:
        compile_bytecode(made, into)
    for info, project in installed:
        write_record(info, project)
    (made / SUMMARY).write_text(result.as_json(), encoding="utf-8")
    return result


def _bring(pin: PackagePin, own: Path | None, cache: Path, folder: Path) -> tuple[Path, Origin]:
    """The source tree of a package, and where it is from."""
    root = folder / "source"
    if own is not None:
        return _bring_local(pin, own.absolute(), root)
    if pin.sdist_sha256:
        archive = fetch_sdist(pin.distribution, pin.version, pin.sdist_sha256, cache)
        _unpack(archive, root)
        return root, Origin("index", commit=pin.commit, sha256=pin.sdist_sha256)
    commit = fetch_commit(pin.repository, pin.commit, pin.branch, cache, root)
    return root, Origin("git", commit=commit, repository=pin.repository)


def _bring_local(pin: PackagePin, own: Path, root: Path) -> tuple[Path, Origin]:
    if own.is_file():
        digest = sha256_of(own)
        _unpack(own, root)
        commit = pin.commit if digest == pin.sdist_sha256 else None
        return root, Origin("local", path=str(own), sha256=digest, commit=commit)
    if not own.exists():
        raise UsageError(f"{own}: there is no such file or folder to take {pin.name} from")
    # The folder around the package, or the package folder itself.
    tree = own.parent if own.name == pin.name and (own / "__init__.py").is_file() else own
    if (tree / pin.name / "__init__.py").is_file():
        return tree, Origin("local", path=str(own), commit=_checked_out(tree))
    raise UsageError(
        f"{own} holds no {pin.name}: give a source tree, a folder that contains"
        f" {pin.name}/, or a source distribution"
    )


def _unpack(archive: Path, root: Path) -> None:
    with archive.open("rb") as file:
        extract(file, root, strip=1)


def _checked_out(tree: Path) -> str | None:
    """The commit of a git checkout whose top is `tree`."""
    if not (tree / ".git").exists():
        return None
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _with_project(
    pin: PackagePin, root: Path, origin: Origin, cache: Path, folder: Path
) -> tuple[Path, Project]:
    found = read_project(root, pin.name, installed_version(pin))
    if found is None and pin.repository:
        # A bare copy of the package: the project around it is that of the repository today.
        bare, root = root, folder / "around"
        commit = fetch_commit(pin.repository, "HEAD", pin.branch, cache, root)
        shutil.rmtree(root / pin.name, ignore_errors=True)
        shutil.copytree(bare / pin.name, root / pin.name)
        origin.note = f"project metadata from {pin.repository} at {commit}"
        found = read_project(root, pin.name, installed_version(pin))
    if found is None:
        raise SourcesError(f"{root} says nothing about its project: no pyproject.toml, no PKG-INFO")
    return root, found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``sources`` takes on the command line."""
    parser.add_argument("release", help="a profile, such as v0.26.0")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--vllm", type=Path, metavar="PATH", help="use this copy of vllm")
    parser.add_argument("--vllm-gaudi", type=Path, metavar="PATH", help="and this of vllm_gaudi")
    parser.add_argument("--no-bytecode", action="store_true", help="quicker: do not compile")


def run(pack: Pack, options: argparse.Namespace) -> int:
    """``dev.py sources RELEASE --into DIR``: lay out and say where each package came from."""
    copies = {"vllm": options.vllm, "vllm_gaudi": options.vllm_gaudi}
    result = lay_out(
        options.release,
        list(pack.profile(options.release).packages.values()),
        options.into,
        local={package: path for package, path in copies.items() if path is not None},
        bytecode=not options.no_bytecode,
    )
    for package, origin in result.packages.items():
        where = origin.path or origin.repository or "pip's index"
        print(f"{package} {origin.version} from {where} ({origin.commit or 'commit unknown'})")
    for package, reason in result.missing.items():
        print(f"{package} is missing: {reason}")
        option = f"--{package.replace('_', '-')}"
        print(f"  have a copy? give an empty folder and {option} PATH; without it, use --package")
    return 0

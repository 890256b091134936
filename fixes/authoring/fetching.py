"""Bring pinned sources onto this machine: an sdist through pip, a commit through git.

Nothing here knows a host name: the index is whatever pip is configured to use, and the repository's
address comes from the profile. All that is fetched is checked against its pin and kept in a cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO

from fixes.applier.errors import PackError

MINUTE = 60
GIT_TIMEOUT = 20 * MINUTE
PIP_TIMEOUT = 30 * MINUTE
_NO_SDIST = 3


class SourcesError(PackError):
    """A source cannot be had, or is not what the pin says."""


class Unreachable(SourcesError):
    """A repository does not have, or does not give away, the pinned commit."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where downloads are kept: $GAUDI_FIX_PACK_CACHE, or the user's cache folder."""
    if own := environ.get("GAUDI_FIX_PACK_CACHE"):
        return Path(own).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
    return Path(base).absolute() / "gaudi-fix-pack"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; a second process waits, a killed one lets go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# -- sdist -----------------------------------------------------------------------------------------


def fetch_sdist(distribution: str, version: str, sha256: str, cache: Path) -> Path:
    """The pinned source distribution, from the cache or through pip's configured index."""
    target = cache / "sdists" / f"{distribution}-{version}-{sha256[:16]}.tar.gz"
    with locked(target.with_suffix(".lock")):
        if target.is_file() and sha256_of(target) == sha256:
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
            partial = Path(folder, "sdist")
            _download_sdist(distribution, version, partial)
            found = sha256_of(partial)
            if found != sha256:
                raise SourcesError(
                    f"{distribution} {version}: the source distribution of pip's index is not the"
                    f" pinned one\n  expected sha256 {sha256}\n  found    sha256 {found}"
                )
            partial.replace(target)
    return target


@lru_cache
def _python_with_pip() -> str:
    for name in (sys.executable, shutil.which("python3"), shutil.which("python")):
        if name and _succeeds([name, "-m", "pip", "--version"]):
            return name
    raise SourcesError(
        f"pip is needed to fetch a source distribution, and {sys.executable} has none:"
        f" run '{sys.executable} -m ensurepip', or give a local copy"
    )


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=MINUTE).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _download_sdist(distribution: str, version: str, target: Path) -> None:
    # As -c text and from an empty folder, so that no module of ours shadows one that pip wants.
    script = Path(__file__).with_name("pip_sdist.py").read_text(encoding="utf-8")
    command = [_python_with_pip(), "-c", script, distribution, version, str(target)]
    try:
        done = subprocess.run(
            command,
            cwd=target.parent,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PIP_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise SourcesError(f"{distribution} {version}: the download took too long") from None
    if done.returncode == _NO_SDIST:
        raise SourcesError(
            f"pip's configured index offers no source distribution of {distribution} {version}"
            f" (see 'pip config list'){_tail(done.stderr)}"
        )
    if done.returncode != 0:
        raise SourcesError(
            f"{distribution} {version}: pip could not download the source distribution"
            f"{_tail(done.stderr)}"
        )


def _tail(text: str, lines: int = 3) -> str:
    kept = [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
    return "".join(f"\n  {line}" for line in kept)


# -- git -------------------------------------------------------------------------------------------


def fetch_commit(repository: str, commit: str, branch: str, cache: Path, into: Path) -> str:
    """Unpack `commit` of `repository` into the folder `into`; returns its full id.

    A full id is asked for by itself (a shallow fetch). Where the server does not allow that, and
    for a shortened id, the branch comes with its history. Not as a filtered clone: a server that
    gives away no single commits gives no single files either.
    """
    # A store for each commit: a shallow one must not be the ground another fetch builds on.
    store = cache / "git" / f"{PurePosixPath(repository).stem}-{commit[:12]}.git"
    with locked(store.with_suffix(".lock")):
        if not (store / "HEAD").is_file():
            _git(None, "init", "--quiet", "--bare", str(store))
        full = _resolve(store, commit) or _obtain(store, repository, commit, branch)
        with tempfile.TemporaryFile() as archive:
            _git(store, "archive", "--format=tar", full, output=archive)
            archive.seek(0)
            extract(archive, into)
    return full


def _obtain(store: Path, repository: str, commit: str, branch: str) -> str:
    errors = []
    if len(commit) == 40 or commit == "HEAD":
        try:
            _git(store, "fetch", "--quiet", "--depth=1", "--no-tags", repository, commit)
            return _keep(store, "FETCH_HEAD", commit)
        except SourcesError as error:
            errors.append(str(error))
    if commit == "HEAD":
        raise Unreachable(f"{repository} cannot be reached: {errors[0]}")
    where = f"refs/heads/{branch or '*'}"
    try:
        heads = f"+{where}:{where.replace('heads', 'remotes/origin')}"
        _git(store, "fetch", "--quiet", "--no-tags", repository, heads)
        return _keep(store, commit, commit)
    except SourcesError as error:
        errors.append(str(error))
    raise Unreachable(f"commit {commit} of {repository} cannot be had: " + "; ".join(errors))


def _keep(store: Path, revision: str, commit: str) -> str:
    """The full id of `revision`, which must be the commit asked for; protected from git's gc."""
    full = _resolve(store, revision)
    if full is None or (commit != "HEAD" and not full.startswith(commit)):
        raise SourcesError(f"the repository has no commit {commit}")
    _git(store, "update-ref", f"refs/pins/{full}", full)
    return full


def _resolve(store: Path, revision: str) -> str | None:
    if revision == "HEAD":  # of the server, not of the store
        return None
    try:
        found = _git(store, "rev-parse", "--quiet", "--verify", revision + "^{commit}")
        return found.decode().strip()
    except SourcesError:
        return None


def _git(store: Path | None, *arguments: str, output: IO[bytes] | None = None) -> bytes:
    # Inside a git hook GIT_DIR and friends point at another repository.
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"}
    }
    environment.update(GIT_TERMINAL_PROMPT="0", LC_ALL="C")
    # Two files of vllm-gaudi have CRLF line ends: the user's own conversion must not touch them.
    command = ["git", "-c", "core.autocrlf=false", "-c", "core.eol=lf"]
    command += ["--git-dir", str(store)] if store else []
    try:
        done = subprocess.run(
            [*command, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=GIT_TIMEOUT,
        )
    except FileNotFoundError:
        raise SourcesError("git is needed to fetch the sources, and is not installed") from None
    except subprocess.TimeoutExpired:
        raise SourcesError(f"git {arguments[0]} took too long") from None
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip().splitlines()
        raise SourcesError(message[-1] if message else f"git {arguments[0]} failed")
    return done.stdout or b""


# -- archives --------------------------------------------------------------------------------------


def extract(archive: IO[bytes], into: Path, strip: int = 0) -> None:
    """Unpack the regular files of a tar archive below `into`; nothing can land outside.

    Links and devices are left out: no source of ours needs one. `strip` leading folders go.
    """
    try:
        with tarfile.open(fileobj=archive, mode="r:*") as tar:
            for member in tar:
                _extract_member(tar, member, into, strip)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise SourcesError(f"the archive is damaged: {error}") from error


def _extract_member(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path, strip: int) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise SourcesError(f"the archive has a path that leads outside: {member.name}")
    parts = path.parts[strip:]
    content = tar.extractfile(member) if member.isfile() and parts else None
    if content is None:
        return
    target = into.joinpath(*parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(content, file)
    target.chmod(0o755 if member.mode & 0o111 else 0o644)

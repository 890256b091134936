"""Real packages of each release to test on: stock, and with all written fixes applied.

Trees are made once and kept under the cache folder, by a name that holds a hash of whatever went
into them. Nobody may write into one: take a `copy` for that.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fixes.applier.digest import digest
from fixes.applier.errors import PackError
from fixes.applier.pack import Pack
from fixes.authoring import fetching, installing, sources

STOCK, FIXED = "stock", "fixed"
_KEEP_DAYS = 3


class TreeError(Exception):
    """A tree cannot be made; the text is for the person who reads the test report."""


@dataclass(frozen=True)
class Tree:
    """A site-packages folder; `missing` says which packages it lacks, and why."""

    path: Path
    release: str
    state: str
    missing: dict[str, str]


@dataclass
class Trees:
    """The trees of a checkout of the pack."""

    root: Path
    cache: Path = field(default_factory=fetching.cache_folder)
    _made: dict[tuple[str, str], Tree] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @cached_property
    def pack(self) -> Pack:
        """The pack itself, for what its profiles say."""
        return Pack(self.root)

    @property
    def releases(self) -> list[str]:
        """All releases, oldest first."""
        return self.pack.profile_names

    @property
    def bytecode(self) -> Path:
        """Where Python may keep bytecode, so that it writes none into a tree."""
        return self.cache / "pycache"

    def releases_of(self, fix_id: str) -> list[str]:
        """The releases whose profile lists a fix."""
        return [name for name in self.releases if self.pack.profile(name).entry(fix_id)]

    def fix_of(self, path: Path) -> str:
        """The fix a test file is about: ``test_<fix>.py`` or ``test_<fix>_<aspect>.py``."""
        words = path.stem.split("_")[1:]
        for end in range(len(words), 0, -1):
            if self.releases_of("-".join(words[:end])):
                return "-".join(words[:end])
        raise TreeError(f"{path.name}: no profile lists a fix of that name")

    def get(self, release: str, state: str) -> Tree:
        """The tree of a release in a state, made when it is not there yet."""
        with self._lock:
            known = self._made.get((release, state))
            if known is None:
                make = self._stock if state == STOCK else self._fixed
                known = self._made[release, state] = make(release)
            return known

    def stock(self, release: str) -> Tree:
        """The packages as the image has them."""
        return self.get(release, STOCK)

    def fixed(self, release: str) -> Tree:
        """The same after the real applier ran with every written fix, opt-in ones included."""
        return self.get(release, FIXED)

    def copy(self, release: str, into: Path, state: str = STOCK) -> Path:
        """A tree of your own to write into; `into` must not exist."""
        shutil.copytree(self.get(release, state).path, into)
        return into

    # -- making them -------------------------------------------------------------------------------

    def _stock(self, release: str) -> Tree:
        pins = list(self.pack.profile(release).packages.values())
        code = [Path(str(module.__file__)) for module in (sources, fetching, installing)]
        copies = [sources.local_copy(pin, release, self.cache) for pin in pins]
        key = _key(repr(pins), *map(_content, code), *(_listing(copy) for copy in copies if copy))

        def make(path: Path) -> None:
            sources.lay_out(release, pins, path, cache=self.cache, bytecode=False)

        try:
            return self._keep(release, STOCK, key, make)
        except PackError as error:
            raise TreeError(f"the packages of {release} cannot be had: {error}") from error

    def _fixed(self, release: str) -> Tree:
        stock = self.stock(release)
        command = [sys.executable, str(self.root / "fixes" / "apply_all.py"), "--profile", release]
        command += self._written_opt_ins(release)
        for pin in self.pack.profile(release).packages.values() if stock.missing else ():
            command += ["--package", pin.name] if pin.name not in stock.missing else []

        def make(path: Path) -> None:
            # Hard links are quick, and the applier replaces files: the stock tree stays as it is.
            shutil.copytree(stock.path, path, copy_function=os.link)
            done = subprocess.run(
                [*command, "--site-packages", str(path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode != 0:
                shown = " ".join(command[1:])
                raise TreeError(f"{shown}: exit code {done.returncode}\n{done.stdout}")

        return self._keep(release, FIXED, _key(stock.path.name, digest(str(self.root))), make)

    def _written_opt_ins(self, release: str) -> list[str]:
        entries = self.pack.profile(release).entries
        return [e.id for e in entries if e.opt_in and e.id not in self.pack.unwritten]

    def _keep(self, release: str, state: str, key: str, make: object) -> Tree:
        assert callable(make)
        folder = self.cache / "trees"
        path = folder / f"{release}-{state}-{key}"
        stamp = path.with_name(path.name + ".made")
        with fetching.locked(folder / f"{release}-{state}.lock"):
            if not stamp.exists():
                # Whoever made it was interrupted. It is made in place, since an applied tree may
                # remember where it is.
                shutil.rmtree(path, ignore_errors=True)
                try:
                    make(path)
                except BaseException:
                    shutil.rmtree(path, ignore_errors=True)
                    raise
            stamp.touch()
        _forget_old(folder, self.bytecode)
        summary = sources.read_summary(path)
        return Tree(path, release, state, summary.get("missing", {}))


def _forget_old(folder: Path, bytecode: Path) -> None:
    for stamp in folder.glob("*.made"):
        if time.time() - stamp.stat().st_mtime > _KEEP_DAYS * 86400:
            stamp.unlink(missing_ok=True)
            path = stamp.with_suffix("")
            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(bytecode / path.relative_to("/"), ignore_errors=True)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _content(path: Path) -> str:
    return fetching.sha256_of(path)


def _listing(copy: Path) -> str:
    """What a local copy looks like: cheap to take, and another when somebody has changed it."""
    if copy.is_file():
        return _content(copy)
    found: Iterable[Path] = (p for p in copy.rglob("*") if p.is_file() and p.suffix != ".pyc")
    stats = sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found)
    return repr(stats)

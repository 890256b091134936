"""Files that somebody has made to do harm: a clear error, in bounded time and memory.

The runs are forked with limits on processor time and memory; a run that exceeds one dies, and a
test that sees it die fails.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixes.applier.digest import LARGEST_TEXT
from tests.applier.faults import killed_after_placing
from tests.applier.world import World
from tests.faults.conftest import tally

STATE = "site/vllm/.gaudi-fix-pack"
EXAMPLES = 25  # of the fuzzer, for each file
SECONDS, MEMORY = 60, 3 << 30

# Every file that the applier reads, relative to the world, and what it is when it is not there.
FILES = {
    "pack/profiles/v1.0.0.toml": b"",
    "pack/profiles/v1.0.0.lock": b"",
    "pack/profiles/unwritten.toml": b"",
    f"{STATE}/manifest.json": b"",
    f"{STATE}/journal.json": b"",
    f"{STATE}/lock": b"",
    f"{STATE}/objects/OF THE ENGINE": b"",
    "site/vllm/engine.py": b"",
    "site/vllm/__pycache__/BYTECODE": b"",
    "site/vllm-1.0.0.dist-info/METADATA": b"",
    "site/vllm-1.0.0.dist-info/direct_url.json": b'{"vcs_info": {"commit_id": "0123456789ab"}}',
    "site/vllm/_version.py": b"version = '1.0.0'\ncommit_id = 'g0123456789'\n",
    "site/other.pth": b"# a comment\nimport os\n../elsewhere\n",
    "site/__editable___x_finder.py": b"MAPPING: dict[str, str] = {'x': '/nowhere/x'}\n",
    "site/.git/HEAD": b"ref: refs/heads/main\n",
    "site/.git/packed-refs": b"0123456789012345678901234567890123456789 refs/heads/main\n",
    "overlays/OVERLAY/gaudi-fix-pack-overlay.json": b"",
}
RUNS = (
    ["delta"],
    ["--without", "alpha"],
    ["--status"],
    ["--revert"],
    ["delta", "--dry-run"],
    ["delta", "--overlay", "OVERLAYS"],
)


class Place:
    """A world with fixes applied, an overlay and a run that died, laid out again for each run."""

    def __init__(self, home: World, folder: Path, *, dead: bool) -> None:
        self.world = home
        self.dead = dead
        self.root = home.pack.parent
        assert home.run("--revert", profile=None).code == 0
        self.pristine = home.snapshot()
        self.go(["delta"])
        self.go(["delta", "--overlay", "OVERLAYS"])
        if dead:
            killed_after_placing("engine.py", lambda: self.go(["--without", "alpha"]))
        for name, data in FILES.items():
            if data and not self.path(name).exists():
                self.path(name).parent.mkdir(parents=True, exist_ok=True)
                self.path(name).write_bytes(data)
        self.kept = folder / ("dead" if dead else "alive")
        for name in ("pack", "site", "overlays"):
            shutil.copytree(self.root / name, self.kept / name, symlinks=True)

    def path(self, name: str) -> Path:
        """A file of the list above."""
        if "OVERLAY" in name:
            return self.root / "overlays" / "current" / Path(name).name
        if "BYTECODE" in name:
            folder = self.root / Path(name).parent
            return folder / f"engine.{sys.implementation.cache_tag}.pyc"
        if "OF THE ENGINE" in name:
            text = (self.root / STATE / "manifest.json").read_text()
            digest = json.loads(text)["files"]["vllm/engine.py"]["pristine"]["sha256"]
            return self.root / STATE / "objects" / str(digest)
        return self.root / name

    def lay_out(self) -> None:
        """Put all back."""
        for name in ("pack", "site", "overlays"):
            shutil.rmtree(self.root / name)
            shutil.copytree(self.kept / name, self.root / name, symlinks=True)

    def go(self, words: list[str]) -> Any:
        """One run."""
        words = [word.replace("OVERLAYS", str(self.root / "overlays")) for word in words]
        other = {"--status", "--revert"} & set(words)
        return self.world.run(*words, "--lock-timeout", "0", profile=None if other else "v1.0.0")

    def limited(self, words: list[str]) -> tuple[int, str]:
        """One run in a process of its own, with limits; its exit code and what it said."""
        said = self.root / "said"
        said.unlink(missing_ok=True)

        def run() -> int:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ran = self.go(words)
            said.write_text(ran.err + ran.out, errors="replace")
            return int(ran.code)

        child = os.fork()
        if child == 0:
            code = 99
            try:
                code = run()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, said.read_text(errors="replace") if said.exists() else ""

    def harm(self, words: list[str], changed: str) -> Iterator[str]:
        """What a run did that it must not, with one file changed."""
        before = self.world.snapshot()
        code, said = self.limited(words)
        if code not in (0, 2, 3, 4) or "Traceback" in said:
            yield f"exit code {code}: {said[-800:]}"
        if code and "error: " not in said:
            yield f"exit code {code} without a message"
        after = self.world.snapshot()
        for name in {*before, *after}:
            if after.get(name) == before.get(name) or f"site/{name}" == changed:
                continue
            # Only what is known: the image's file, or the pack's.
            if name not in self.allowed or after.get(name) not in self.allowed[name]:
                yield f"{name} has become something else"

    @property
    def allowed(self) -> Mapping[str, list[tuple[object, ...] | None]]:
        """What each file of the pack may be."""
        return self._allowed

    def learn(self) -> None:
        """Find out what the runs make of the files."""
        found = [self.pristine]
        for words in RUNS:
            self.lay_out()
            self.go(words)
            found.append(self.world.snapshot())
        names = {name for snapshot in found for name in snapshot}
        self._allowed = {name: [snapshot.get(name) for snapshot in found] for name in names}


@pytest.fixture(scope="module", params=["alive", "dead"])
def _place(request: pytest.FixtureRequest, home: World, memory: Path) -> Place:
    shutil.rmtree(home.site)
    shutil.rmtree(home.site.with_name("overlays"), ignore_errors=True)
    World.install(home.site, "1.0.0")
    made = Place(home, memory, dead=request.param == "dead")
    made.learn()
    return made


@pytest.fixture
def place(_place: Place, name: str) -> Place:
    """With nothing under way and, for the files that then matter, with a run that died."""
    if _place.dead and STATE not in name:
        pytest.skip("a run that died makes no difference to this file")
    return _place


def small(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


HOSTILE: Mapping[str, Callable[[Path], object]] = {
    "nothing": small(b""),
    "null bytes": small(b"\0" * 5000),
    "no UTF-8": small(b"\xff\xfe\x80\xc3(" * 500),
    "a huge line": small(b"x" * (LARGEST_TEXT - 10)),
    "deep lists": small(b"[" * 500_000),
    "deep objects": small(b'{"a":' * 150_000),
    "deep TOML": small(b"a = " + b"[" * 500_000),
    "deep tables": small(b"[" + b"a." * 300_000 + b"b]\n"),
    "deep signs": small(b"x = " + b"-" * 900_000 + b"1\n"),
    "deep attributes": small(b"x = a" + b".b" * 100_000 + b"\n"),
    "deep sums": small(b"x = 1" + b" + 1" * 100_000 + b"\n"),
    "deep blocks": small(
        b"".join(b" " * n + b"if x:\n" for n in range(1000)) + b" " * 1000 + b"y\n"
    ),
    "a number of a million digits": small(b"x = " + b"9" * 1_000_000 + b"\n"),
    "a JSON number of a million digits": small(b"9" * 1_000_000),
    "a literal that explodes": small(b"X = 'a' * 10**12, 10**10**10, 1 << 10**12, [0] * 10**12\n"),
    "a version that explodes": small(b"Version: 1+" + b"+." * 400_000 + b"\n"),
    "names without an end": small(b"MAPPING\n" * 60_000),
    "tables without an end": small(b"".join(b"[packages.a%d]\n" % n for n in range(40_000))),
    "a text above the limit": small(b"# a\n" * (LARGEST_TEXT // 4 + 1)),
}
ODD: Mapping[str, Callable[[Path], object]] = {
    "a terabyte": sparse,
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("name", list(FILES))
def test_a_hostile_file(place: Place, name: str) -> None:
    wrong = []
    count = 0
    # The pack's own files are code, or beside code: whoever can put a pipe there has no need to.
    kinds = HOSTILE if name.startswith("pack/") else {**HOSTILE, **ODD}
    chance = random.Random(name)
    for kind, make in kinds.items():
        place.lay_out()
        path = place.path(name)
        if path.exists():
            path.unlink()
        if not path.parent.is_dir():
            continue
        make(path)
        words = chance.choice(RUNS)
        count += 1
        wrong += [f"{kind}, {' '.join(words)}: {text}" for text in place.harm(words, name)]
    tally("hostile files", count, wrong)


@pytest.mark.parametrize("name", ["site/vllm/engine.py"])
def test_a_hostile_text_beside_the_sites(place: Place, name: str) -> None:
    """Outside of every site it is accepted, so it is compiled too, or it is refused."""
    wrong = []
    place.lay_out()
    pristine = place.path(f"{STATE}/objects/OF THE ENGINE").read_bytes()
    codes = set()
    for kind in HOSTILE:
        place.lay_out()
        HOSTILE[kind](place.path(name))
        text = place.path(name).read_bytes()
        place.path(name).write_bytes(pristine + b"\n" + text)
        code, said = place.limited(["--without", "alpha"])
        codes.add(code)
        if code not in (0, 3) or "Traceback" in said:
            wrong.append(f"{kind}: exit code {code}: {said[-800:]}")
    assert codes == {0, 3}
    tally("hostile texts beside the sites", len(HOSTILE), wrong)


# What a fuzzer puts into a file, at any place of it.
PIECES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(b"\" { } [ ] \\ .. / ../ ''' null true -1 1e999 NaN vllm \\u0000 @".split()),
    st.sampled_from([b"\n", b"\r", b"\0", b"\xff", b"\x0c", b"\xef\xbb\xbf", b"    ", b"\t"]),
    st.sampled_from([b"[[fix]]\n", b"# coding: utf-7\n", b"def step(", b"# fix: alpha\n"]),
)
EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 30), st.integers(0, 40), PIECES), min_size=1, max_size=4
)


@pytest.mark.parametrize("name", list(FILES))
def test_a_fuzzed_file(place: Place, name: str) -> None:
    place.lay_out()
    if not place.path(name).exists():
        pytest.skip("there is no such file in this state")
    original = place.path(name).read_bytes()
    count = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(EDITS, st.sampled_from(RUNS))
    def fuzz(edits: list[tuple[int, int, bytes]], words: list[str]) -> None:
        nonlocal count
        count += 1
        data = original
        for at, length, piece in edits:
            at %= len(data) + 1
            data = data[:at] + piece + data[at + length :]
        place.lay_out()
        place.path(name).write_bytes(data)
        assert list(place.harm(words, name)) == []

    fuzz()
    tally("fuzzed files", count, [])

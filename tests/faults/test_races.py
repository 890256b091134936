"""Runs that race: none killed, and a thousand of them killed at random moments."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fixes.applier.store import Store
from tests.applier.world import World
from tests.faults.conftest import tally

KILLS = 1000
APPLIERS = 4


@pytest.fixture
def world(home: World) -> World:
    """The world in memory, pristine, as each of these tests leaves it."""
    assert home.run("--revert", profile=None).code == 0
    return home


def started(run: Callable[[], object]) -> int:
    """A forked process; it ends with what the function returns."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = int(bool(run()))
        finally:
            os._exit(code)
    return child


def test_eight_starts_that_race(world: World) -> None:
    """One applies, seven find nothing to do: each prints what it did into a file of its own."""

    def start(number: int) -> None:
        ran = world.run("delta")
        (world.pack / f"said-{number}").write_text(f"{ran.code} {ran.last}")

    children = [started(lambda number=number: start(number)) for number in range(8)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    said = sorted((world.pack / f"said-{number}").read_text() for number in range(8))
    nothing = "0 applied=0 unchanged=4 files=0 profile=v1.0.0"
    assert said == [nothing] * 7 + ["0 applied=4 unchanged=0 files=3 profile=v1.0.0"]


RUNS = (["delta"], ["--without", "alpha"], ["--revert"], ["--status"])


def go(world: World, words: list[str]) -> int:
    """One of the runs above; what went wrong is printed."""
    other = {"--revert", "--status"} & set(words)
    ran = world.run(*words, profile=None if other else "v1.0.0")
    if ran.code != 0:
        os.write(2, f"{words}: {ran.err}".encode())
    return ran.code


def results(world: World) -> list[object]:
    """What each run that changes something leaves, alone; the world is pristine after it."""
    found: list[object] = []
    for words in RUNS[:3]:
        assert go(world, words) == 0
        found.append(world.snapshot())
    return found


def test_runs_that_race_never_leave_a_mixture(world: World) -> None:
    allowed = results(world)

    def five(number: int) -> int:
        return sum(go(world, RUNS[(number + turn) % 3]) for turn in range(5))

    children = [started(lambda number=number: five(number)) for number in range(8)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert world.snapshot() in allowed
    assert list(world.site.rglob("*~")) == []
    assert go(world, ["delta"]) == 0
    assert world.snapshot() == allowed[0]


def test_a_thousand_kills_at_random_moments(world: World) -> None:
    """Four appliers without end; now and then one is killed and another takes its place."""
    allowed = results(world)
    chance = random.Random(1)
    wrong: list[str] = []

    def without_end(seed: float) -> int:
        choice = random.Random(seed)
        while go(world, choice.choice(RUNS)) == 0:
            pass
        return 1

    def applier() -> int:
        seed = chance.random()
        return started(lambda: without_end(seed))

    def end(child: int) -> None:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            wrong.append("a run failed, see its error")

    kills = 0
    while kills < KILLS:
        children = [applier() for _ in range(APPLIERS)]
        for _ in range(KILLS // 20):
            time.sleep(chance.uniform(0, 0.02))
            number = chance.randrange(APPLIERS)
            end(children[number])
            children[number] = applier()
        for child in children:
            end(child)
        kills += KILLS // 20 + APPLIERS
        if go(world, ["--status"]) != 0 or world.snapshot() not in allowed:
            wrong.append(f"a mixture after {kills} kills")
        wrong += [f"{path} was left" for path in world.site.rglob("*~")]
    tally("kills in a race of four", kills, wrong)


def test_a_state_folder_that_is_removed_as_it_is_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run that reverts, between its check that the folder is empty and its last call."""
    make = os.mkdir
    removed: list[str] = []

    def removing(path: Path, *args: int) -> None:
        make(path, *args)
        if not removed:
            os.rmdir(path)
            removed.append(path.name)

    monkeypatch.setattr(os, "mkdir", removing)
    ran = world.run("delta")
    assert (ran.code, removed) == (0, [".gaudi-fix-pack"]), ran.err


@pytest.fixture(params=["as shipped", "with other fixes"])
def run_between(
    request: pytest.FixtureRequest, world: World, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Another run rewrites a file, dies and is rolled back while this one reads that file."""
    read = Store.read
    engine, state = world.site / "vllm" / "engine.py", world.site / "vllm" / ".gaudi-fix-pack"
    others = engine.read_bytes()
    assert world.run("delta").code == 0
    data = engine.read_bytes()
    if request.param == "with other fixes":
        others = data + b"# fix: alpha\n"
    os.utime(state, (0, 0))
    torn: list[str] = []

    def reading(store: Store, path: str) -> object:
        if torn or path != "vllm/engine.py":
            return read(store, path)
        torn.append(path)
        (state / "journal.json").write_text("{}")
        engine.write_bytes(others)
        found = read(store, path)
        engine.write_bytes(data)
        (state / "journal.json").unlink()
        return found

    monkeypatch.setattr(Store, "read", reading)
    return torn


@pytest.mark.parametrize("words", [["--without", "alpha"], ["--revert", "--dry-run"], ["--status"]])
def test_what_was_seen_of_a_run_that_is_rolled_back_is_read_again(
    world: World, run_between: list[str], words: list[str]
) -> None:
    assert go(world, words) == 0
    assert run_between != []


def test_no_overlay_is_made_of_an_image_that_changes(
    world: World, run_between: list[str], tmp_path: Path
) -> None:
    assert go(world, ["delta", "--overlay", str(tmp_path)]) == 3
    assert (run_between != [], list(tmp_path.iterdir())) == (True, [])


def test_a_disk_that_is_full_and_stays_full_is_no_mixture(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rolling back must not need the space that the run did not find."""
    old = world.snapshot(times=True)
    write = os.write
    left = 0

    def write_while_there_is_space(descriptor: int, data: bytes) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    for number in range(100):
        left = number
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", write_while_there_is_space)
            ran = world.run("delta")
        if ran.code == 0:
            break
        assert ran.code == 4
        assert world.snapshot(times=True, state=True) == old, f"changed with space for {number}"
    assert number > 5


def test_a_run_that_waits_too_long_says_who_holds_the_lock(world: World) -> None:
    folder = world.site / "vllm" / ".gaudi-fix-pack"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ran = world.run("--lock-timeout", "0.2")
    assert ran.code == 5
    assert str(folder / "lock") in ran.err

"""All or nothing: killed or failing at every single step of a run."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.applier.faults import at_call, die, in_child
from tests.applier.world import World

# What is applied before, and the words of the run that is broken.
SCENARIOS = {
    "apply": ([], ["delta"]),
    "change": (["delta"], ["--without", "alpha"]),
    "revert": (["delta"], ["--revert"]),
}


class Scenario:
    """A world before a run, what the run makes of it, and copies to break."""

    def __init__(self, name: str, world: World, folder: Path) -> None:
        first, self.words = SCENARIOS[name]
        self.profile = None if name == "revert" else "v1.0.0"
        if first:
            assert world.run(*first).code == 0
        self.world = world
        self.folder = folder
        self.copies = 0
        done = self.copy()
        with at_call(0, die) as counter:
            assert done.run(*self.words, profile=self.profile).code == 0
        self.calls = counter.calls
        self.after = self.comparable(done)
        done.clean()

    def copy(self) -> World:
        """The world before the run, to be broken."""
        self.copies += 1
        root = self.folder / str(self.copies)
        shutil.copytree(self.world.site.parent, root, symlinks=True)
        return World(root)

    @staticmethod
    def comparable(world: World) -> dict[str, tuple[object, ...]]:
        """A snapshot without times: those of rewritten files are the run's own."""
        return world.snapshot()

    def old(self) -> dict[str, tuple[object, ...]]:
        """The snapshot before, likewise without times."""
        return self.world.snapshot()


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill does not lose what was written unsynced, so syncing is counted and not done."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(params=list(SCENARIOS))
def scenario(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Scenario:
    """Each scenario in turn."""
    return Scenario(request.param, world, tmp_path / "copies")


def leftovers(world: World) -> list[str]:
    """Temporary files anywhere in the installation."""
    return [str(path) for path in world.site.rglob("*~")]


def numbers(scenario: Scenario) -> Iterator[int]:
    """Every writing call of the run."""
    assert scenario.calls > 20, "the run under test writes more than that"
    return iter(range(1, scenario.calls + 1))


def test_killed_at_every_step_the_next_look_finds_all_or_nothing(scenario: Scenario) -> None:
    old = scenario.old()
    seen = set()
    for number in numbers(scenario):
        broken = scenario.copy()

        def run(broken: World = broken, number: int = number) -> None:
            with at_call(number, die):
                broken.run(*scenario.words, profile=scenario.profile)

        assert in_child(run) == -9
        looked = broken.run("--status", profile=None)
        assert looked.code == 0, (number, looked.err)
        now = scenario.comparable(broken)
        assert now in (old, scenario.after), f"a mixture after a kill at call {number}"
        assert leftovers(broken) == []
        seen.add(now == old)
        assert broken.run(*scenario.words, profile=scenario.profile).code == 0
        assert scenario.comparable(broken) == scenario.after
        broken.clean()
    assert seen == {True, False}, "kills both before and after the moment of commitment"


def test_killed_at_every_step_an_equal_run_ends_as_if_nothing_had_happened(
    scenario: Scenario,
) -> None:
    for number in numbers(scenario):
        broken = scenario.copy()

        def run(broken: World = broken, number: int = number) -> None:
            with at_call(number, die):
                broken.run(*scenario.words, profile=scenario.profile)

        in_child(run)
        again = broken.run(*scenario.words, profile=scenario.profile)
        assert again.code == 0, (number, again.err)
        assert scenario.comparable(broken) == scenario.after
        assert leftovers(broken) == []
        broken.clean()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_a_failing_step_is_rolled_back(scenario: Scenario, code: int) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code), "a file")

    old = scenario.old()
    for number in numbers(scenario):
        broken = scenario.copy()
        with at_call(number, fail):
            ran = broken.run(*scenario.words, profile=scenario.profile)
        now = scenario.comparable(broken)
        if ran.code == 0:  # only tidying up had failed
            assert now == scenario.after, f"call {number} failed silently"
        else:
            assert ran.code == 4, (number, ran.err)
            assert now == old, f"changed after a failure at call {number}"
            kept = broken.snapshot(state=True)
            assert kept == scenario.world.snapshot(state=True), f"left behind at call {number}"
        again = broken.run(*scenario.words, profile=scenario.profile)
        assert again.code == 0, (number, again.err)
        assert scenario.comparable(broken) == scenario.after
        assert leftovers(broken) == []
        broken.clean()


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


def test_killed_during_recovery(scenario: Scenario) -> None:
    old = scenario.old()
    middle = scenario.calls // 2
    for number in range(1, 200):
        broken = scenario.copy()

        def first(broken: World = broken) -> None:
            with at_call(middle, die):
                broken.run(*scenario.words, profile=scenario.profile)

        def second(broken: World = broken, number: int = number) -> None:
            with at_call(number, die):
                broken.run("--status", profile=None)

        in_child(first)
        survived = in_child(second) == 0
        assert broken.run("--status", profile=None).code == 0
        assert scenario.comparable(broken) in (old, scenario.after)
        assert leftovers(broken) == []
        broken.clean()
        if survived:
            break
    assert number > 5, "recovery writes, so it can be killed"


def test_eight_starts_that_race(world: World) -> None:
    """One applies, seven find nothing to do: each prints what it did into a file of its own."""
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            ran = world.run("delta")
            (world.pack / f"said-{number}").write_text(f"{ran.code} {ran.last}")
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    said = sorted((world.pack / f"said-{number}").read_text() for number in range(8))
    nothing = "0 applied=0 unchanged=4 files=0 profile=v1.0.0"
    assert said == [nothing] * 7 + ["0 applied=4 unchanged=0 files=3 profile=v1.0.0"]


def test_appliers_and_reverters_that_race_never_leave_a_mixture(world: World) -> None:
    pristine = world.snapshot()
    world.run("delta")
    applied = world.snapshot()
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            for _ in range(5):
                words = ["--revert"] if number % 2 else ["delta"]
                ran = world.run(*words, profile=None if number % 2 else "v1.0.0")
                if ran.code != 0:
                    os.write(2, ran.err.encode())
                    os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert world.snapshot() in (pristine, applied)
    assert leftovers(world) == []
    assert world.run("delta").code == 0
    assert world.snapshot() == applied


def test_a_run_that_waits_too_long_says_who_holds_the_lock(world: World) -> None:
    import fcntl

    folder = world.site / "vllm" / ".gaudi-fix-pack"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ran = world.run("--lock-timeout", "0.2")
    assert ran.code == 5
    assert str(folder / "lock") in ran.err

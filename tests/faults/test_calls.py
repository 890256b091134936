"""Every system call of a run fails once, or is the last thing that the run does."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.applier.faults import in_child
from tests.applier.world import World
from tests.faults.calls import FAULTS, Calls
from tests.faults.conftest import tally
from tests.faults.scenarios import KINDS, Scenario

# A recovery and then an apply: both are here on their own, and together under a power loss.
TWO_IN_ONE = "applying over a dead run"


@pytest.fixture(scope="module", params=[name for name in KINDS if name != TWO_IN_ONE])
def scenario(request: pytest.FixtureRequest, home: World, memory: Path) -> Scenario:
    """Each run in turn; root finds a file of somebody else among those that it rewrites."""
    return Scenario(request.param, home, memory, 12345 if os.geteuid() == 0 else None)


def cases(scenario: Scenario, fault: str) -> Iterator[int]:
    """The calls to which it happens: every one that changes something, and of those that only look
    the ones whose turn it is, so that each of them fails in one way."""
    for number, call in enumerate(scenario.calls, 1):
        possible = [name for name in FAULTS if FAULTS[name].at(call)]
        turn = call.changes or possible[number % len(possible)] == fault
        if fault in possible and turn:
            yield number


def failed(scenario: Scenario, fault: str, number: int) -> Iterator[str]:
    """What is wrong after a run with one fault."""
    scenario.lay_out()
    calls = Calls(scenario.roots, number, fault)
    with calls.watched():
        ran = scenario.run()
    yield from (f"{path} was not closed" for path in calls.open.values())
    touched = scenario.touched()
    if touched:
        yield from scenario.wrong_files()
    if ran.code == 0:
        if scenario.look() != scenario.end:
            yield "said that all went well"
    else:
        if ran.code not in (2, 3, 4) and fault != "memory":
            yield f"exit code {ran.code}: {ran.err}"
        # Folders for an overlay may be there, empty; what was half done is what it was.
        if scenario.kind.killed is None and touched and not scenario.overlays.exists():
            yield f"exit code {ran.code}, but something has changed: {ran.err}"
    if touched:
        yield from after_one_more_run(scenario)


def after_one_more_run(scenario: Scenario) -> Iterator[str]:
    """What is wrong after the same run once more, with no fault."""
    ran = scenario.run()
    if ran.code != 0 or scenario.look() != scenario.end:
        yield f"the next run ends with exit code {ran.code}: {ran.err}"
    yield from scenario.untidy()


@pytest.mark.parametrize("fault", [name for name in FAULTS if "killed" not in name])
def test_a_call_that_fails(scenario: Scenario, fault: str) -> None:
    wrong = []
    count = 0
    for number in cases(scenario, fault):
        count += 1
        wrong += [
            f"{fault} at {number}, {scenario.calls[number - 1]}: {text}"
            for text in failed(scenario, fault, number)
        ]
    tally("calls that failed", count, wrong)


@pytest.mark.parametrize("fault", [name for name in FAULTS if "killed" in name])
def test_killed_at_a_call(scenario: Scenario, fault: str) -> None:
    wrong = []
    count = 0
    for number in cases(scenario, fault):
        count += 1
        scenario.lay_out()

        def run(number: int = number) -> None:
            with Calls(scenario.roots, number, fault).watched():
                scenario.run()

        assert in_child(run) == -signal.SIGKILL
        found = [*scenario.wrong_files(), *after_one_more_run(scenario)]
        wrong += [f"{fault} {number}, {scenario.calls[number - 1]}: {text}" for text in found]
    tally("kills at a call", count, wrong)


AUDITED = {
    "open": ["open"],
    "os.mkdir": ["mkdir"],
    "os.rename": ["rename", "replace"],
    "os.remove": ["unlink"],
    "os.rmdir": ["rmdir"],
    "os.symlink": ["symlink"],
}


def test_no_call_goes_uncounted(scenario: Scenario) -> None:
    """What the interpreter reports of its own accord, of calls with a path, has been counted."""

    def run() -> None:
        seen: Counter[str] = Counter()
        calls = Calls(scenario.roots)

        def hook(event: str, args: tuple[object, ...]) -> None:
            about = args[1] if event in ("os.rename", "os.symlink") else args[0] if args else None
            if event in AUDITED and isinstance(about, (str, os.PathLike)):
                seen[event] += os.fspath(about).startswith(calls.roots)

        scenario.lay_out()
        sys.addaudithook(hook)
        seen.clear()
        with calls.watched():
            scenario.run()
        counted = Counter(call.name for call in calls.log if call.path.startswith(calls.roots))
        for event, names in AUDITED.items():
            if seen[event] > sum(counted[name] for name in names):
                os._exit(1)
        os._exit(0 if seen["open"] > 10 else 2)

    assert in_child(run) == 0

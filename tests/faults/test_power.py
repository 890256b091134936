"""The power fails at every system call of a run, and what was not synced is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.applier.world import World
from tests.faults.calls import Call, Calls
from tests.faults.conftest import tally
from tests.faults.disk import Choice, Disk, any_part, names_without_content, nothing_unsynced
from tests.faults.scenarios import KINDS, Scenario


@pytest.fixture(scope="module", params=[name for name in KINDS if name != "overlay"])
def scenario(request: pytest.FixtureRequest, home: World, memory: Path) -> Scenario:
    """Each run in turn. Unsynced overlays are built anew, because their files are hashed."""
    return Scenario(request.param, home, memory)


def test_the_model_is_the_file_system_when_nothing_is_lost(scenario: Scenario) -> None:
    disk = recorded(scenario)
    real = scenario.world.snapshot(state=True)
    disk.write_out(disk.moment, lambda node, safe, moment: moment)
    assert scenario.world.snapshot(state=True) == real
    assert disk.moment > 5


def recorded(scenario: Scenario, kind: type[Disk] = Disk) -> Disk:
    """The disk, as the run used it."""
    scenario.lay_out()
    disk = kind(scenario.world.site)
    with Calls(scenario.roots, observe=disk.saw).watched():
        ran = scenario.run()
    assert ran.code == 0, ran.err
    return disk


def wrong_after_a_loss(scenario: Scenario) -> Iterator[str]:
    yield from scenario.wrong_files()
    looked = scenario.world.run("--status", profile=None)
    if looked.code != 0 or scenario.look() not in scenario.contents[:2]:
        yield f"a mixture: exit code {looked.code}: {looked.err}"
    ran = scenario.run()
    if ran.code != 0 or scenario.look() not in scenario.contents[:2]:
        yield f"the next run ends with exit code {ran.code}: {ran.err}"
    yield from scenario.untidy()


def test_the_power_fails_at_every_call(scenario: Scenario) -> None:
    disk = recorded(scenario)
    wrong = []
    count = 0
    for moment in range(disk.moment + 1):
        for name, choice in choices(moment):
            count += 1
            disk.write_out(moment, choice)
            wrong += [f"{moment}, {name}: {text}" for text in wrong_after_a_loss(scenario)]
    tally("power losses", count, wrong)


@pytest.mark.parametrize("kind", ["files", "folders"])
def test_without_syncing_there_would_be_mixtures(home: World, memory: Path, kind: str) -> None:
    """So the losses of this model are real ones."""

    class Lazy(Disk):
        def saw(self, call: Call, args: tuple[Any, ...], result: Any) -> None:
            folder = call.name == "fsync" and isinstance(self.open[args[0]].now, dict)
            if call.name != "fsync" or folder != (kind == "folders"):
                super().saw(call, args, result)

    scenario = Scenario("change of set", home, memory)
    disk = recorded(scenario, Lazy)
    wrong = []
    for moment in range(disk.moment + 1):
        disk.write_out(moment, names_without_content if kind == "files" else any_part(moment))
        wrong += wrong_after_a_loss(scenario)
    assert wrong != []


def choices(moment: int) -> list[tuple[str, Choice]]:
    """Ways to lose what is not synced."""
    return [
        ("nothing unsynced", nothing_unsynced),
        ("names without content", names_without_content),
        ("any part", any_part(moment)),
    ]

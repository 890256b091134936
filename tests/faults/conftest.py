"""Fixtures of the fault campaign, and its numbers at the end of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixes.applier import edits
from tests.applier.world import World

CASES: Counter[str] = Counter()
VIOLATIONS: Counter[str] = Counter()


def tally(kind: str, cases: int, violations: list[str]) -> None:
    """Count the cases of a test, and fail it for what went wrong."""
    CASES[kind] += cases
    VIOLATIONS[kind] += len(violations)
    assert violations == []
    assert cases > 0, "nothing was tried"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many cases there were."""
    if CASES:
        terminalreporter.section("fault campaign")
        for kind, count in CASES.items():
            terminalreporter.line(f"{count:6} {kind}: {VIOLATIONS[kind]} violations")
        terminalreporter.line(f"{CASES.total():6} cases, {VIOLATIONS.total()} violations")


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory, where there is such a file system: thousands of small worlds."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="gaudi-fix-pack-test-", dir=where))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def home(memory: Path) -> World:
    """A world that has been used: whatever is imported on first use is imported."""
    world = World(memory / "world")
    world.build()
    assert world.run("delta").code == 0
    assert world.run("--revert", profile=None).code == 0
    return world


@pytest.fixture(scope="module", autouse=True)
def _codemods_run_once() -> Iterator[None]:
    """A codemod on the same text makes the same text and no system call: once is enough here."""
    known: dict[object, str] = {}
    rewrite = edits.rewrite

    def remembered(text: str, where: str, codemods: Any) -> str:
        key = (text, where, tuple(codemods))
        if key not in known:
            known[key] = rewrite(text, where, codemods)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edits, "rewrite", remembered)
        yield

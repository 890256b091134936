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

from fixes.applier import edits, plan
from fixes.applier.definitions import Source
from tests.applier.world import World
from tests.faults.images import PACK, Image
from tests.support.trees import Trees

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
def _computed_once() -> Iterator[None]:
    """What is the same for the same text, and makes no system call, is done once here: parsing a
    real file, a codemod on a definition, compiling the result."""
    find, rewrite = Source.__dict__["definitions"].func, edits.rewrite
    known: dict[bytes, Any] = {}
    texts: dict[object, str] = {}
    compiled: set[bytes] = set()

    def definitions(source: Source) -> Any:
        if source.data not in known:
            known[source.data] = find(source)
        return known[source.data]

    def rewritten(text: str, where: str, codemods: Any, **more: Any) -> str:
        key = (text, where, tuple(codemods))
        if key not in texts:
            texts[key] = rewrite(text, where, codemods, **more)
        return texts[key]

    def compiles(data: bytes, *args: Any, **more: Any) -> None:
        if data not in compiled:
            compile(data, *args, **more)
            compiled.add(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "definitions", property(definitions))
        patch.setattr(edits, "rewrite", rewritten)
        patch.setattr(plan, "compile", compiles, raising=False)
        yield


@pytest.fixture(scope="session")
def images(trees: Trees) -> Iterator[dict[str, Image]]:
    """The real packages of every release, small copies of them in memory."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="gaudi-fix-pack-test-", dir=where))
    yield {release: Image(trees, release, folder) for release in PACK.profile_names}
    shutil.rmtree(folder)


@pytest.fixture(params=PACK.profile_names)
def image(request: pytest.FixtureRequest, images: dict[str, Image]) -> Image:
    """Each release in turn."""
    return images[request.param]

"""Pytest fixtures of the emulated engine, for every test file (a plugin: see tests/conftest.py).

``engines(model="hybrid", prefix_caching=True)`` is a living engine on the packages under test.
Nothing heavy is imported before the first call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from tests.emulation.engine import Engines
from tests.emulation.models import FIRST_WORD, VOCABULARY


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Makes engines; the knobs are those of `tests.emulation.engine.Knobs`."""
    made = Engines(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def words() -> Callable[[int, int], list[int]]:
    """words(seed, length): token ids of a random prompt, the same every time."""

    def make(seed: int, length: int) -> list[int]:
        source = random.Random(seed)
        return [source.randrange(FIRST_WORD, VOCABULARY) for _ in range(length)]

    return make

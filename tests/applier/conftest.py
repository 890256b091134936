"""Fixtures for the tests of the applier."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.applier.world import World


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    World(root).build()
    return root


@pytest.fixture
def world(_built: Path, tmp_path: Path) -> World:
    """A fresh small pack and installation, in which v1.0.0 fits."""
    root = tmp_path / "world"
    shutil.copytree(_built, root, symlinks=True)
    return World(root)

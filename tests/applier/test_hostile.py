"""States and moments that nobody meant: damaged, hostile, half gone, or in a race."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.applier.world import World

STATE = Path("vllm") / ".gaudi-fix-pack"
WAYS = [["--status"], ["--revert"], ["--without", "alpha"]]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def go(world: World, words: list[str], *more: str) -> Any:
    """Run, with a profile where one is needed."""
    other = {"--status", "--revert"} & set(words)
    return world.run(*words, *more, profile=None if other else "v1.0.0")


def bytecode(world: World) -> Path:
    """The bytecode of the engine."""
    name = f"engine.{sys.implementation.cache_tag}.pyc"
    return world.site / "vllm" / "__pycache__" / name


# Metadata that is none ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("__editable___x_finder.py", b"MAPPING: dict = {'vllm': \xff}\n"),
        ("__editable___x_finder.py", b"MAPPING = {'vllm': 1}\n"),
        ("vllm-1.0.0.dist-info/METADATA", b"Version: \xff\n"),
        ("vllm-1.0.0.dist-info/direct_url.json", b"\xff"),
        ("vllm-1.0.0.dist-info/direct_url.json", b"[" * 100_000),
        (".git/HEAD", b"ref: a\0b"),
    ],
)
def test_damaged_metadata_is_passed_over(world: World, name: str, content: bytes) -> None:
    path = world.site / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if "finder" in name:
        os.rename(world.site / "vllm", world.site / "gone")
    ran = world.run()
    assert ran.code == (3 if "finder" in name else 0), ran.err
    assert "Traceback" not in ran.err


def test_a_folder_that_is_named_like_a_path_file_is_passed_over(world: World) -> None:
    (world.site / "a.pth").mkdir()
    assert world.run().code == 0

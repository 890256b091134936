"""States and moments that nobody meant: damaged, hostile, half gone, or in a race."""

from __future__ import annotations

import os
import shutil
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


# Packages that come and go ------------------------------------------------------------------------


@pytest.mark.parametrize("words", [*WAYS, ["--package", "vllm"]])
def test_a_package_that_is_gone_is_named(world: World, words: list[str]) -> None:
    world.run()
    shutil.rmtree(world.site / "vllm_gaudi")
    before = world.snapshot(times=True, state=True)
    ran = go(world, words)
    assert ran.code == 3, ran.err
    assert "vllm_gaudi is not installed" in ran.err
    assert world.snapshot(times=True, state=True) == before


def test_a_package_that_comes_later_does_not_hide_the_state(world: World, tmp_path: Path) -> None:
    pristine = world.snapshot(times=True)
    os.rename(world.site / "vllm", tmp_path / "vllm")
    assert world.run("--package", "vllm_gaudi").code == 0
    os.rename(tmp_path / "vllm", world.site / "vllm")
    assert world.run().code == 0
    assert world.run("--revert", profile=None).code == 0
    assert world.snapshot(times=True, state=True) == pristine


def test_an_upgrade_may_take_a_rewritten_file_away(world: World) -> None:
    world.run("delta")
    (world.site / "vllm_gaudi" / "runner.py").unlink()
    ran = world.run()
    assert ran.code == 3
    assert "vllm_gaudi/runner.py::collate: there is no such file" in ran.err
    assert world.run("--package", "vllm").code == 0
    assert world.run("--revert", profile=None).code == 0
    assert not (world.site / "vllm_gaudi" / "_fix_delta.py").exists()
    assert not (world.site / STATE).exists()


def test_a_module_of_the_pack_that_was_removed_comes_again(world: World) -> None:
    world.run("delta")
    after = world.snapshot()
    (world.site / "vllm_gaudi" / "_fix_delta.py").unlink()
    assert world.run("delta").code == 0
    assert world.snapshot() == after


def test_an_upgrade_brings_its_own_bytecode(world: World) -> None:
    world.run()
    other = world.site.with_name("other") / "vllm"
    shutil.copy2(other / "engine.py", world.site / "vllm")
    bytecode(world).write_bytes(b"of the upgrade")
    upgraded = world.snapshot(times=True)["vllm/__pycache__/" + bytecode(world).name]
    assert world.run(profile="v2.0.0").code == 0
    assert not bytecode(world).exists()
    assert world.run("--revert", profile=None).code == 0
    assert world.snapshot(times=True)["vllm/__pycache__/" + bytecode(world).name] == upgraded


def test_an_upgrade_without_bytecode_does_not_get_the_old_one(world: World) -> None:
    world.run()
    other = world.site.with_name("other") / "vllm"
    shutil.copy2(other / "engine.py", world.site / "vllm")
    assert world.run(profile="v2.0.0").code == 0
    assert world.run("--revert", profile=None).code == 0
    assert not bytecode(world).exists()


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

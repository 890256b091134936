"""States and moments that nobody meant: damaged, hostile, half gone, or in a race."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixes.applier.files import FileState, sha256, stage_file, temporary_name
from fixes.applier.store import Store
from tests.applier.faults import in_child, killed_after_placing
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
def test_a_package_that_is_out_of_sight_is_not_forgotten(world: World, words: list[str]) -> None:
    """An editable install that this environment does not see: its pristine files are still ours."""
    checkout = world.site.with_name("checkout") / "vllm_gaudi"
    checkout.parent.mkdir()
    os.rename(world.site / "vllm_gaudi", checkout)
    path_file = world.site / "editable.pth"
    path_file.write_text(f"{checkout.parent}\n")
    assert world.run().code == 0
    path_file.unlink()
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


# A state folder that is not as the pack left it ---------------------------------------------------


@pytest.mark.parametrize("name", ["", "objects"])
@pytest.mark.parametrize("words", WAYS)
def test_a_link_in_the_state_folder_s_place_is_not_followed(
    world: World, tmp_path: Path, words: list[str], name: str
) -> None:
    world.run()
    elsewhere = tmp_path / "elsewhere"
    os.rename(world.site / STATE / name, elsewhere)
    (world.site / STATE / name).symlink_to(elsewhere)
    (elsewhere / "somebody's").write_text("file")
    ran = go(world, words)
    assert ran.code == 3
    assert "is a link" in ran.err
    assert (elsewhere / "somebody's").exists()


def test_a_pipe_in_the_manifest_s_place_is_not_waited_for(world: World) -> None:
    world.run()
    (world.site / STATE / "manifest.json").unlink()
    os.mkfifo(world.site / STATE / "manifest.json")
    ran = world.run()
    assert ran.code == 3
    assert "not a regular file" in ran.err


def _set(*keys: str, to: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return change


ENGINE_FILE = ("files", "vllm/engine.py")


@pytest.mark.parametrize(
    "damage",
    [
        _set("schema", to=0),
        _set("fixes", to=[1]),
        _set("fixes", to="alpha"),
        _set("transaction", to={}),
        _set("profile", to=["v1.0.0"]),
        _set("packages", to=[]),
        _set("packages", "vllm", to={}),
        _set("packages", "vllm", "commit", to=3),
        _set(*ENGINE_FILE, "fixes", to={"a": 1}),
        _set(*ENGINE_FILE, "pristine", "sha256", to=["a"] * 64),
        _set(*ENGINE_FILE, "pristine", "link", to=1),
        _set(*ENGINE_FILE, "pristine", "mtime_ns", to=10**30),
        _set(*ENGINE_FILE, "pristine", "uid", to=2**32),
        _set("files", "vllm/../../x.py", to={}),
    ],
)
@pytest.mark.parametrize("words", [*WAYS, []])
def test_a_manifest_of_another_hand_is_refused(
    world: World, damage: Callable[[Any], None], words: list[str]
) -> None:
    world.run()
    manifest = world.site / STATE / "manifest.json"
    document = json.loads(manifest.read_text())
    damage(document)
    manifest.write_text(json.dumps(document))
    before = world.snapshot(times=True)
    ran = go(world, words)
    assert ran.code == 3 or (words == [] and ran.code == 0), ran.err
    assert "Traceback" not in ran.err
    assert world.snapshot(times=True) == before


def test_the_umask_does_not_hide_the_state_from_other_users(world: World) -> None:
    umask = os.umask(0o077)
    try:
        assert world.run().code == 0
    finally:
        os.umask(umask)
    for path in [world.site / STATE, world.site / STATE / "objects"]:
        assert path.stat().st_mode & 0o777 == 0o755


def test_a_dry_run_sees_a_state_folder_that_cannot_be_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: ".gaudi-fix-pack" not in str(path) and access(path, mode)
    )
    ran = world.run("--without", "alpha", "--dry-run")
    assert ran.code == 4
    assert str(world.site / STATE) in ran.err


def test_a_set_of_no_fixes_needs_no_state(world: World) -> None:
    """So that it is in place on a read-only image too."""
    before = world.snapshot(times=True, state=True)
    without = [word for fix in ("alpha", "beta", "gamma") for word in ("--without", fix)]
    assert world.run(*without).code == 0
    assert world.snapshot(times=True, state=True) == before


def test_an_owner_without_a_number_here_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a rootless container a file may belong to somebody that its kernel cannot name."""

    def refuse(descriptor: int, uid: int, gid: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fchown", refuse)
    state = FileState(sha256(b"text"), 0o644, os.geteuid() + 1, os.getegid(), 0)
    assert not stage_file(tmp_path / "a.py", state, b"text")
    assert temporary_name(tmp_path / "a.py").read_bytes() == b"text"


# Moments ------------------------------------------------------------------------------------------


def test_bytecode_compiled_after_a_kill_is_no_obstacle(world: World) -> None:
    before = world.snapshot(times=True)
    killed_after_placing("engine.py", world.run)
    bytecode(world).write_bytes(b"compiled by a server that was started")
    assert world.run("--status", profile=None).code == 0
    assert world.snapshot(times=True) == before


def test_nothing_is_rolled_back_over_somebody_s_edit(world: World) -> None:
    killed_after_placing("runner.py", world.run)
    runner = world.site / "vllm_gaudi" / "runner.py"
    runner.write_text("# by hand\n")
    before = world.snapshot(times=True)
    for words in WAYS:
        ran = go(world, words)
        assert ran.code == 3
        assert f"somebody changed {runner}" in ran.err
    assert world.snapshot(times=True) == before


def test_an_edit_made_while_the_run_waited_is_not_overwritten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.site / "vllm" / "engine.py"
    take_lock = Store._take_lock

    def edited_meanwhile(store: Store, deadline: float) -> int:
        descriptor = take_lock(store, deadline)
        engine.write_text(engine.read_text() + "# by hand\n")
        return descriptor

    world.run()
    monkeypatch.setattr(Store, "_take_lock", edited_meanwhile)
    ran = world.run("--without", "alpha")
    assert ran.code == 3
    assert f"{engine}: was changed while the run was being prepared" in ran.err
    assert engine.read_text().endswith("# by hand\n")


def test_a_status_in_the_middle_of_a_run_waits_for_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    manifest = Store.manifest
    calls = 0

    def and_then_another_run(store: Store) -> Any:
        nonlocal calls
        found = manifest(store)
        calls += 1
        if calls == 2:  # after it has looked for a run under way
            assert in_child(lambda: os._exit(world.run("delta", "--without", "alpha").code)) == 0
        return found

    monkeypatch.setattr(Store, "manifest", and_then_another_run)
    ran = world.run("--status", profile=None)
    assert ran.code == 0, ran.err
    assert "delta" in ran.out


def test_a_dry_revert_in_the_middle_of_a_run_waits_for_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    position = Store.position
    calls = 0

    def and_then_another_run(store: Store) -> Any:
        nonlocal calls
        found = position(store)
        calls += 1
        if calls == 1:
            # The other run has written a file and then its manifest between two of our looks.
            engine = world.site / "vllm" / "engine.py"
            manifest = Store.manifest

            def late(store: Store) -> Any:
                before = manifest(store)
                monkeypatch.setattr(Store, "manifest", manifest)
                assert in_child(lambda: os._exit(world.run("--without", "alpha").code)) == 0
                assert b"alpha" not in engine.read_bytes()
                return before

            monkeypatch.setattr(Store, "manifest", late)
        return found

    monkeypatch.setattr(Store, "position", and_then_another_run)
    ran = world.run("--revert", "--dry-run", profile=None)
    assert ran.code == 0, ran.err


def test_the_lock_is_the_last_to_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes a new lock owns the folder, so nothing may be removed from it after that."""
    world.run()
    state = world.site / STATE
    unlink = os.unlink

    def look(path: Any, **more: Any) -> None:
        if os.path.basename(path) == "lock":
            assert os.listdir(state) == ["lock"]
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", look)
    assert world.run("--revert", profile=None).code == 0
    assert not state.exists()


def test_bytecode_elsewhere_that_cannot_be_removed_has_changed_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    cached = tmp_path / str(world.site / "vllm").lstrip("/") / "engine.cpython-399.pyc"
    cached.mkdir(parents=True)  # what unlink refuses
    before = world.snapshot(times=True, state=True)
    ran = world.run()
    assert ran.code == 4
    assert str(cached) in ran.err
    assert world.snapshot(times=True, state=True) == before


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

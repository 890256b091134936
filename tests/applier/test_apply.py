"""Applying, changing, reverting: what the applier promises, on a small installation."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fixes.applier import fast, runner
from fixes.applier.plan import PlannedFile, make_plan
from tests.applier.faults import in_child
from tests.applier.world import World


def test_the_chosen_fixes_and_nothing_else_are_in_the_tree(world: World) -> None:
    before = world.snapshot()
    ran = world.run()
    assert (ran.code, ran.last) == (0, "applied=3 unchanged=0 files=2 profile=v1.0.0")
    engine = (world.site / "vllm" / "engine.py").read_text()
    assert "value = double(request) + 1\n" in engine
    assert "value = min(value, limit)\n" in engine
    assert "_fix_delta" not in (world.site / "vllm_gaudi" / "runner.py").read_text()
    after = world.snapshot()
    changed = {name for name in before if before[name] != after.get(name)}
    sources = {"vllm/engine.py", "vllm_gaudi/runner.py"}
    assert {name for name in changed if name.endswith(".py")} == sources
    assert {name for name in changed if not name.endswith(".py")} == {
        f"vllm/__pycache__/engine.{sys.implementation.cache_tag}.pyc",
        f"vllm_gaudi/__pycache__/runner.{sys.implementation.cache_tag}.pyc",
    }
    assert set(after) <= set(before)


def test_a_second_run_writes_nothing(world: World) -> None:
    world.run("delta")
    before = world.snapshot(times=True, state=True)
    again = world.run("delta")
    assert (again.code, again.last) == (0, "applied=0 unchanged=4 files=0 profile=v1.0.0")
    assert world.snapshot(times=True, state=True) == before


def test_a_run_is_planned_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning is what a run costs; only one that meets another run plans again."""
    plans = 0

    def planned(*args: Any) -> list[PlannedFile]:
        nonlocal plans
        plans += 1
        return make_plan(*args)

    monkeypatch.setattr(runner, "make_plan", planned)
    for number, words in enumerate((["delta", "--dry-run"], ["delta"], ["--without", "alpha"]), 1):
        assert world.run(*words).code == 0
        assert plans == number


def test_the_second_run_takes_the_short_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run("delta")
    monkeypatch.setattr("fixes.applier.pack.Pack.fix", None)
    assert world.run("delta").code == 0


def test_without_the_short_way_a_second_run_writes_nothing_either(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run("delta")
    before = world.snapshot(times=True, state=True)
    monkeypatch.setattr(fast, "nothing_to_do", lambda *_: None)
    assert world.run("delta").last == "applied=0 unchanged=4 files=0 profile=v1.0.0"
    assert world.snapshot(times=True, state=True) == before


def test_revert_gives_back_every_byte_mode_owner_and_time(world: World) -> None:
    (world.site / "vllm" / "engine.py").chmod(0o640)
    if os.geteuid() == 0:
        os.chown(world.site / "vllm" / "engine.py", 1234, 4321)
    before = world.snapshot(times=True, state=True)
    assert world.run("delta").code == 0
    assert (world.site / "vllm" / "engine.py").stat().st_mode & 0o7777 == 0o640
    if os.geteuid() == 0:
        owner = (world.site / "vllm" / "engine.py").stat()
        assert (owner.st_uid, owner.st_gid) == (1234, 4321)
    reverted = world.run("--revert", profile=None)
    assert (reverted.code, reverted.last) == (0, "applied=0 unchanged=0 files=3 profile=none")
    assert world.snapshot(times=True, state=True) == before


def test_revert_takes_bytecode_of_rewritten_and_added_modules_away(world: World) -> None:
    before = world.snapshot(times=True)
    world.run("delta")
    for path in ("vllm/engine.py", "vllm_gaudi/_fix_delta.py"):
        cache = world.site / Path(path).parent / "__pycache__"
        for tag in (sys.implementation.cache_tag, "cpython-399"):
            (cache / f"{Path(path).stem}.{tag}.pyc").write_bytes(b"compiled from the rewrite")
    world.run("--revert", profile=None)
    assert world.snapshot(times=True) == before


def test_revert_of_nothing_is_nothing(world: World) -> None:
    before = world.snapshot(times=True, state=True)
    assert world.run("--revert", profile=None).code == 0
    assert world.snapshot(times=True, state=True) == before


def test_every_order_on_the_command_line_gives_the_same_tree(world: World) -> None:
    trees = set()
    for words in itertools.permutations(["delta", "alpha", "gamma"]):
        assert world.run(*words).code == 0
        trees.add(json.dumps(world.snapshot()))
        assert world.run("--revert", profile=None).code == 0
    assert len(trees) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([], ["delta"]),
        (["delta"], []),
        (["delta"], ["--without", "alpha"]),
        (["--without", "beta", "--without", "gamma"], ["--without", "alpha", "delta"]),
    ],
)
def test_another_set_is_as_if_from_pristine(
    world: World, first: list[str], second: list[str]
) -> None:
    pristine = world.snapshot(times=True)
    assert world.run(*second).code == 0
    direct = world.snapshot()
    world.run("--revert", profile=None)
    assert world.run(*first).code == 0
    assert world.run(*second).code == 0
    assert world.snapshot() == direct
    world.run("--revert", profile=None)
    assert world.snapshot(times=True) == pristine


def test_the_report_says_what_was_replaced(world: World) -> None:
    world.run("delta")
    ran = world.run("--without", "alpha")
    assert "- alpha: taken back" in ran.out
    assert "- delta: taken back" in ran.out
    assert "= beta: unchanged" in ran.out


def test_dry_run_and_diff_write_nothing(world: World) -> None:
    before = world.snapshot(times=True, state=True)
    dry = world.run("--dry-run", "delta")
    assert (dry.code, dry.last) == (0, "applied=4 unchanged=0 files=3 profile=v1.0.0 dry-run")
    assert "+ alpha: would apply" in dry.out
    diff = world.run("--diff", "delta")
    assert "+        value = double(request) + 1" in diff.out
    assert world.snapshot(times=True, state=True) == before


def test_package_limits_the_run_to_one_package(world: World) -> None:
    before = world.snapshot()
    ran = world.run("--package", "vllm")
    assert (ran.code, ran.last) == (0, "applied=2 unchanged=0 files=1 profile=v1.0.0")
    after = world.snapshot()
    assert {n for n in before if before[n] != after.get(n) and n.endswith(".py")} == {
        "vllm/engine.py"
    }


def test_package_works_where_the_other_one_is_not_installed(world: World) -> None:
    for path in sorted((world.site / "vllm_gaudi").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (world.site / "vllm_gaudi").rmdir()
    missing = world.run()
    assert missing.code == 3
    assert "vllm_gaudi is not installed in" in missing.err
    assert world.run("--package", "vllm").code == 0
    assert world.run("--revert", profile=None).code == 0


def test_another_release_is_refused_and_the_profile_that_fits_is_named(world: World) -> None:
    before = world.snapshot(times=True, state=True)
    ran = world.run(profile="v2.0.0")
    assert ran.code == 3
    assert "alpha: vllm/engine.py::Engine.step" in ran.err
    assert "beta: vllm/engine.py::Engine.step" in ran.err
    assert "those of --profile v1.0.0" in ran.err
    assert world.snapshot(times=True, state=True) == before


def test_a_missing_profile_lists_them_and_says_which_fits(world: World) -> None:
    ran = world.run(profile=None)
    assert ran.code == 2
    assert "profiles: v1.0.0, v2.0.0; the installed packages match v1.0.0" in ran.err


def test_the_profile_that_fits_is_found_when_fixes_are_in_place(world: World) -> None:
    world.run("delta")
    assert "match v1.0.0" in world.run(profile=None).err


@pytest.mark.parametrize(
    "words", [["nope"], ["--without", "gamma", "delta"], ["epsilon"], ["--package", "torch"]]
)
def test_a_request_that_makes_no_sense_changes_nothing(world: World, words: list[str]) -> None:
    before = world.snapshot(times=True, state=True)
    assert world.run(*words).code == 2
    assert world.snapshot(times=True, state=True) == before


def test_status_tells_what_is_in_place_and_finds_hand_edits(world: World) -> None:
    nothing = world.run("--status", profile=None)
    assert nothing.last == "applied=0 unchanged=0 files=0 profile=none"
    assert "nothing is applied" in nothing.out
    world.run()
    status = world.run("--status", profile=None)
    assert status.last == "applied=3 unchanged=0 files=0 profile=v1.0.0"
    assert "+ beta: applied" in status.out
    engine = world.site / "vllm" / "engine.py"
    engine.write_text(engine.read_text() + "# by hand\n")
    changed = world.run("--status", profile=None)
    assert changed.code == 3
    assert str(engine) in changed.err


@pytest.mark.parametrize("words", [["--revert"], ["--without", "alpha"], []])
def test_a_file_edited_after_the_pack_wrote_it_is_never_overwritten(
    world: World, words: list[str]
) -> None:
    world.run("delta")
    engine = world.site / "vllm" / "engine.py"
    engine.write_text(engine.read_text() + "# by hand\n")
    before = world.snapshot(times=True, state=True)
    ran = world.run(*words, profile=None if "--revert" in words else "v1.0.0")
    assert ran.code == 3
    assert "changed after the pack rewrote it" in ran.err
    assert world.snapshot(times=True, state=True) == before


def test_a_package_that_was_reinstalled_gets_its_fixes_again(world: World) -> None:
    engine = world.site / "vllm" / "engine.py"
    original = engine.read_bytes()
    world.run()
    engine.write_bytes(original)
    ran = world.run()
    assert (ran.code, ran.last) == (0, "applied=2 unchanged=1 files=1 profile=v1.0.0")
    assert b"# fix: alpha" in engine.read_bytes()
    world.run("--revert", profile=None)
    assert engine.read_bytes() == original


def test_a_package_that_was_upgraded_is_taken_for_what_it_is(world: World) -> None:
    world.run()
    engine = world.site / "vllm" / "engine.py"
    other = world.site.with_name("other") / "vllm" / "engine.py"
    engine.write_bytes(other.read_bytes())
    runner = world.site / "vllm_gaudi" / "runner.py"
    assert world.run(profile="v2.0.0").code == 0
    assert b"# fix: alpha" in engine.read_bytes()
    world.run("--revert", profile=None)
    assert engine.read_bytes() == other.read_bytes()
    assert b"# fix" not in runner.read_bytes()


def test_a_package_that_was_uninstalled_is_forgotten(world: World) -> None:
    shipped = (world.site / "vllm" / "engine.py").read_bytes()
    world.run("delta")
    shutil.rmtree(world.site / "vllm_gaudi")
    status = world.run("--status", profile=None)
    assert status.code == 3
    assert "vllm_gaudi: not installed any more" in status.err
    ran = world.run("--package", "vllm")
    assert ran.code == 0
    assert "vllm_gaudi is not installed any more" in ran.err
    assert world.run("--status", profile=None).code == 0
    assert world.run("--revert", profile=None).code == 0
    assert (world.site / "vllm" / "engine.py").read_bytes() == shipped


@pytest.mark.parametrize("group", [0o000, 0o020])
def test_who_may_write_the_package_may_go_on_with_its_state(world: World, group: int) -> None:
    """A layer made by root, a pod that runs as any user of the image's group (OpenShift)."""
    (world.site / "vllm").chmod(0o755 | group)

    def run() -> None:
        os.umask(0)  # in a process of its own: the mask is the whole process's
        world.run("delta")

    assert in_child(run) == 0
    state = world.site / "vllm" / ".gaudi-fix-pack"
    for path in (state, state / "objects", state / "lock"):
        assert path.stat().st_mode & 0o022 == group, path
    assert not [path for path in state.rglob("*") if path.stat().st_mode & 0o002]


def test_marks_of_the_pack_without_its_state_are_refused(world: World) -> None:
    world.run()
    for path in sorted((world.site / "vllm" / ".gaudi-fix-pack").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (world.site / "vllm" / ".gaudi-fix-pack").rmdir()
    ran = world.run("--without", "alpha", "--without", "beta", "--without", "gamma")
    assert ran.code == 0, "no fix is chosen, so no file is looked at"
    ran = world.run()
    assert ran.code == 3
    assert "carries the marks of this pack" in ran.err


def test_a_damaged_copy_of_the_pristine_file_is_never_restored(world: World) -> None:
    world.run()
    objects = world.site / "vllm" / ".gaudi-fix-pack" / "objects"
    for path in objects.iterdir():
        path.write_bytes(path.read_bytes() + b"x")
    before = world.snapshot(times=True, state=True)
    ran = world.run("--revert", profile=None)
    assert ran.code == 3
    assert "missing or damaged" in ran.err
    assert world.snapshot(times=True, state=True) == before


def test_nothing_is_said_to_be_stock_that_is_not(world: World) -> None:
    """Without its state folder nobody knows how a rewritten file was."""
    world.run("delta")
    shutil.rmtree(world.site / "vllm" / ".gaudi-fix-pack")
    before = world.snapshot(times=True, state=True)
    for words in (["--status"], ["--revert"], ["--revert", "--dry-run"]):
        ran = world.run(*words, profile=None)
        assert (ran.code, "carries the marks" in ran.err) == (3, True), ran
    assert world.snapshot(times=True, state=True) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_is_exit_4(world: World) -> None:
    _assert_refused_when_not_writable(world)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_no_permission_is_exit_4_for_another_user(world: World) -> None:
    for path in [*world.site.parents, world.site, *world.site.rglob("*"), *world.pack.rglob("*")]:
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o555)
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            _assert_refused_when_not_writable(world)
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def _assert_refused_when_not_writable(world: World) -> None:
    world.site.chmod(0o555) if os.geteuid() == world.site.stat().st_uid else None
    before = world.snapshot(times=True, state=True)
    for words in ([], ["--dry-run"]):
        ran = world.run(*words)
        assert ran.code == 4, ran.err
        assert str(world.site) in ran.err
    assert world.snapshot(times=True, state=True) == before


def test_a_change_outside_of_every_site_is_accepted_and_said(world: World) -> None:
    engine = world.site / "vllm" / "engine.py"
    engine.write_text(engine.read_text().replace("size = 1", "size = 2"))
    ran = world.run()
    assert ran.code == 0
    assert "size = 2" in engine.read_text()
    noted = [line for line in ran.err.splitlines() if "not the file of v1.0.0" in line]
    assert [str(engine) in line for line in noted] == [True]

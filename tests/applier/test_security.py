"""What must not happen whoever wrote the files: nothing of the target runs, nothing outside of the
packages is touched, and a state folder with true hashes in it has little to say."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixes.applier.errors import PackError
from fixes.applier.files import FileState, sha256
from fixes.applier.profiles import load_lock
from tests.applier.faults import in_child, killed_after_placing
from tests.applier.world import World
from tests.faults.calls import Call, Calls

STATE = Path("vllm") / ".gaudi-fix-pack"
WAYS = (["--status"], ["--revert"], ["--without", "alpha"], ["delta", "--dry-run"])
HOSTILE = b"import os\nos.system('true')\n"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def go(world: World, words: list[str]) -> Any:
    """Run, with a profile where one is needed."""
    other = {"--status", "--revert"} & set(words)
    return world.run(*words, profile=None if other else "v1.0.0")


# Nothing of the target runs -----------------------------------------------------------------------


def test_nothing_of_the_target_is_executed(world: World) -> None:
    """Watched by the interpreter itself: what code it is given, what processes it starts."""
    site = str(world.site)
    for name, text in {
        "sitecustomize.py": "raise SystemExit(70)\n",
        "usercustomize.py": "raise SystemExit(70)\n",
        "x.pth": "import sys; sys.exit(70)\n",
        "__editable___x_finder.py": "MAPPING = {'x': '/x'}\nraise SystemExit(70)\n",
    }.items():
        (world.site / name).write_text(text)

    def run() -> None:
        seen: list[str] = []

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "exec" and str(args[0].co_filename).startswith(site):
                seen.append(f"{event} {args[0].co_filename}")
            if event.split(".")[0] in ("subprocess", "socket", "ctypes") or event in (
                "os.exec",
                "os.fork",
                "os.posix_spawn",
                "os.system",
                "os.startfile",
            ):
                seen.append(event)

        sys.addaudithook(hook)
        exec(compile("1", f"{site}/proof", "exec"))
        if len(seen) != 1:
            os._exit(71)
        overlays = str(world.site.with_name("overlays"))
        for words in (["delta"], *WAYS, ["delta", "--overlay", overlays], ["--list"]):
            if go(world, words).code != 0:
                os._exit(72)
        os._exit(len(seen) - 1)

    assert in_child(run) == 0


# No path leaves the packages ----------------------------------------------------------------------

OUTSIDE = (
    "vllm/../../outside.py",
    "../outside.py",
    "/outside.py",
    "vllm//outside.py",
    "vllm/./engine.py",
    "vllm/a\\..\\outside.py",
    "vllm/a\0.py",
    "vllm",
    "VLLM/engine.py",
    "vllm/.gaudi-fix-pack/lock",
    "vllm/.gaudi-fix-pack/a.py",
    "vllm/data.json",
    "vllm/__pycache__/other.cpython-311.pyc",
    "",
)


def manifest_of(world: World) -> tuple[Path, dict[str, Any]]:
    """The manifest of what is applied."""
    path = world.site / STATE / "manifest.json"
    return path, json.loads(path.read_text())


def state_of(data: bytes, mode: int = 0o644) -> dict[str, Any]:
    """A file's state, as in a manifest."""
    facts = FileState(sha256(data), mode, os.geteuid(), os.getegid(), 1)
    return {**vars(facts)}


def keep(world: World, data: bytes) -> None:
    """Content in the state folder, under its true hash."""
    (world.site / STATE / "objects" / sha256(data)).write_bytes(data)


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("words", WAYS)
def test_a_path_of_a_manifest_stays_inside(world: World, path: str, words: list[str]) -> None:
    world.run()
    file, document = manifest_of(world)
    there = world.site.with_name("outside.py")
    there.write_bytes(b"outside\n")
    keep(world, HOSTILE)
    document["files"][path] = {
        "pristine": state_of(HOSTILE),
        "applied": state_of(b"outside\n"),
        "fixes": ["alpha"],
    }
    file.write_text(json.dumps(document))
    before = world.snapshot(times=True)
    ran = go(world, words)
    assert ran.code == 3
    assert f"{file}: not written by this pack" in ran.err
    assert world.snapshot(times=True) == before
    assert there.read_bytes() == b"outside\n"


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_of_a_journal_stays_inside(world: World, path: str) -> None:
    killed_after_placing("engine.py", world.run)
    file = world.site / STATE / "journal.json"
    document = json.loads(file.read_text())
    keep(world, HOSTILE)
    document["changes"].append({"path": path, "old": state_of(HOSTILE), "new": None})
    file.write_text(json.dumps(document))
    before = world.snapshot(times=True)
    for words in WAYS:
        ran = go(world, words)
        assert ran.code == 3
        assert f"{file}: not written by this pack" in ran.err
    assert world.snapshot(times=True) == before


@pytest.mark.parametrize("path", [path for path in OUTSIDE if not path.endswith((".json", ".pyc"))])
def test_a_path_of_a_lock_stays_inside(world: World, path: str) -> None:
    file = world.pack / "profiles" / "v1.0.0.lock"
    document = json.loads(file.read_text())
    document["fixes"]["alpha"][0]["file"] = path
    file.write_text(json.dumps(document))
    with pytest.raises(PackError, match="path"):
        load_lock(file)
    before = world.snapshot(times=True, state=True)
    assert world.run().code == 2
    assert world.snapshot(times=True, state=True) == before


@pytest.mark.parametrize("path", OUTSIDE[:5])
def test_a_path_of_an_overlay_s_document_stays_inside(world: World, path: str) -> None:
    """It is only compared: with a pipe outside, that would have waited for ever."""
    overlays = world.site.with_name("overlays")
    os.mkfifo(world.site.with_name("outside.py"))
    words = ["--overlay", str(overlays)]
    assert world.run(*words).code == 0
    file = overlays / "current" / "gaudi-fix-pack-overlay.json"
    document = json.loads(file.read_text())
    document["files"][path] = {"image": None, "own": None, "fixes": []}
    file.write_text(json.dumps(document))
    first = os.readlink(overlays / "current")
    assert world.run(*words).code == 0
    assert os.readlink(overlays / "current") != first, "it is not that overlay any more"


@pytest.mark.parametrize("name", ["vllm", "sub"])
def test_a_folder_that_became_a_link_is_not_followed(world: World, name: str) -> None:
    """After the pack had written there: neither a run nor a revert goes through it."""
    elsewhere = world.site.with_name("elsewhere")
    assert world.run().code == 0
    runner = world.site / "vllm_gaudi"
    if name == "sub":
        file, document = manifest_of(world)
        document["files"]["vllm_gaudi/sub/runner.py"] = document["files"]["vllm_gaudi/runner.py"]
        file.write_text(json.dumps(document))
        shutil.copytree(runner, elsewhere)
        (runner / "sub").symlink_to(elsewhere)
        content = (elsewhere / "runner.py").read_bytes()
        for words in (["--revert"], ["--without", "alpha"]):
            ran = go(world, words)
            assert ran.code == 3
            assert "symbolic link" in ran.err
        assert (elsewhere / "runner.py").read_bytes() == content
    else:  # of a package itself: what is behind it is what Python imports, and it is said
        os.rename(world.site / "vllm", elsewhere)
        (world.site / "vllm").symlink_to(elsewhere)
        ran = go(world, ["--without", "alpha"])
        assert ran.code == 0
        assert f"the folder behind it, {elsewhere}, is what is rewritten" in ran.err


# A state folder with true hashes ------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--revert"], ["--without", "alpha"]])
@pytest.mark.parametrize("shipped", [HOSTILE, None])
def test_a_file_that_the_pack_never_wrote_is_left_alone(
    world: World, words: list[str], shipped: bytes | None
) -> None:
    """All hashes are true, but the file carries no mark, so the pack has not written it."""
    world.run()
    file, document = manifest_of(world)
    victim = world.site / "vllm" / "__init__.py"
    keep(world, HOSTILE)
    document["files"]["vllm/__init__.py"] = {
        "pristine": shipped and state_of(shipped),
        "applied": state_of(victim.read_bytes()),
        "fixes": ["alpha"],
    }
    file.write_text(json.dumps(document))
    before = world.snapshot(times=True)
    ran = go(world, words)
    assert ran.code == 3
    assert f"{victim}: " in ran.err
    assert "carries no mark of the pack" in ran.err
    assert world.snapshot(times=True) == before


@pytest.mark.parametrize("old", [HOSTILE, None])
def test_a_journal_does_not_bring_code_that_the_pack_never_wrote(
    world: World, old: bytes | None
) -> None:
    killed_after_placing("engine.py", world.run)
    file = world.site / STATE / "journal.json"
    document = json.loads(file.read_text())
    victim = world.site / "vllm" / "__init__.py"
    keep(world, HOSTILE)
    document["changes"] = [
        {
            "path": "vllm/__init__.py",
            "old": old and state_of(old),
            "new": state_of(victim.read_bytes()),
        }
    ]
    file.write_text(json.dumps(document))
    before = world.snapshot(times=True)
    for words in WAYS:
        ran = go(world, words)
        assert ran.code == 3
        assert "carries no mark" in ran.err
    assert world.snapshot(times=True) == before


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1644, 0o666, 0o777, 0o664])
def test_a_manifest_grants_no_permission(world: World, mode: int) -> None:
    """Root may run this: a file that anyone can write, or run as root, must not come of it."""
    pristine = world.snapshot()
    world.run()
    file, document = manifest_of(world)
    for entry in document["files"].values():
        for state in filter(None, (entry["pristine"], entry["applied"])):
            state["mode"] = mode
    file.write_text(json.dumps(document))
    assert world.run("--revert", profile=None).code == 0
    now = world.snapshot()
    assert {name: facts[0] for name, facts in now.items()} == {
        name: facts[0] for name, facts in pristine.items()
    }
    for path in world.site.rglob("*.py*"):
        assert path.stat().st_mode & 0o7777 & ~0o755 == 0, path


@pytest.mark.parametrize("mode", [0o600, 0o604, 0o664, 0o666, 0o755, 0o2664])
def test_a_file_keeps_its_mode(world: World, mode: int) -> None:
    """Whatever the image gave it, also to bytecode that goes and comes back with its source."""
    for path in (world.site / "vllm").rglob("engine.*"):
        path.chmod(mode)
    pristine = world.snapshot(times=True)
    world.run()
    assert (world.site / "vllm" / "engine.py").stat().st_mode & 0o7777 == mode
    world.run("--without", "alpha")
    assert (world.site / "vllm" / "engine.py").stat().st_mode & 0o7777 == mode
    assert world.run("--revert", profile=None).code == 0
    assert world.snapshot(times=True) == pristine


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077, 0o777])
def test_nothing_is_ever_made_that_everyone_may_write(world: World, umask: int) -> None:
    """Looked at after every single call, not only at the end."""
    overlays = world.site.with_name("overlays") / "deep" / "er"
    seen: set[str] = set()
    wrong: list[str] = []

    def look(call: Call, args: object, result: object) -> None:
        if call.changes and os.path.lexists(call.path):
            mode = os.lstat(call.path).st_mode
            seen.add(call.name)
            if mode & 0o002 and not stat.S_ISLNK(mode):
                wrong.append(f"{call}: {mode:o}")

    before = os.umask(umask)
    try:
        with Calls([world.site.parent], observe=look).watched():
            for words in (["delta"], ["--without", "alpha"], ["--revert"]):
                assert go(world, words).code == 0
            ran = go(world, ["delta", "--overlay", str(overlays)])
            if umask != 0o777:  # the folders above the overlay are the user's, as he makes folders
                assert ran.code == 0, ran.err
    finally:
        os.umask(before)
    assert wrong == []
    assert {"mkdir", "open", "replace", "fchmod"} <= seen


# What is printed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plant",
    [
        lambda site, text: (site / ".git" / "HEAD").write_text(f"ref: {text}"),
        lambda site, text: (site / ".git" / "HEAD").symlink_to(text),
    ],
)
def test_no_other_file_is_printed_as_a_commit(
    world: World, tmp_path: Path, plant: Callable[[Path, str], object]
) -> None:
    """Run as root, it would tell whoever reads the log what only root may read."""
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0\n")
    (world.site / ".git").mkdir()
    plant(world.site, str(secret))
    ran = world.run("--json")
    assert ran.code == 0, ran.err
    assert "root:x" not in ran.out + ran.err
    assert json.loads(ran.out)["packages"][0]["commit"] == ""


def test_a_version_is_no_way_to_write_to_a_terminal(world: World) -> None:
    info = world.site / "vllm-1.0.0.dist-info" / "METADATA"
    info.write_text("Name: vllm\nVersion: 1.0\x1b[2J\x1b]0;x\x07\n")
    ran = world.run()
    assert ran.code == 0
    assert "\x1b" not in ran.out + ran.err
    assert "vllm unknown in" in ran.out

"""Overlays: repaired packages beside an image that cannot be written."""

from __future__ import annotations

import _heapq
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fixes.applier import fast, overlay
from tests.applier.command import install_command, run_command
from tests.applier.faults import at_call, die, in_child
from tests.applier.world import Ran, World


@pytest.fixture
def overlays(world: World) -> Path:
    """A folder for overlays, not there yet."""
    return world.site.with_name("overlays")


def folder_of(ran: Ran) -> Path:
    """The overlay that a run names."""
    assert ran.code == 0, ran.err
    line = next(line for line in ran.out.splitlines() if line.startswith("export PYTHONPATH="))
    done = subprocess.run(
        ["sh", "-c", f'unset PYTHONPATH; {line}; printf %s "$PYTHONPATH"'],
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout)


def python(path: Path, code: str, *more: Path) -> str:
    """What an interpreter prints that has the overlay, then ``more``, first on its path."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [path, *more]))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def importable(world: World) -> None:
    """Let the small packages be imported: the overlay is for those who do."""
    for package in ("vllm", "vllm_gaudi"):
        (world.site / package / "__init__.py").write_text("")


def content(root: Path) -> dict[str, str | bytes]:
    """Links and files below a folder."""
    found: dict[str, str | bytes] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def test_the_image_is_not_touched_and_the_overlay_is_as_an_image_would_be(
    world: World, overlays: Path
) -> None:
    before = world.snapshot(times=True, state=True)
    path = folder_of(world.run("delta", "--overlay", str(overlays)))
    assert world.snapshot(times=True, state=True) == before
    assert path.parent == overlays
    assert (overlays / "current").resolve() == path
    world.run("delta")
    for source in ("vllm/engine.py", "vllm_gaudi/runner.py", "vllm_gaudi/_fix_delta.py"):
        assert (path / source).read_bytes() == (world.site / source).read_bytes()
        assert not (path / source).is_symlink()
    assert os.readlink(path / "vllm" / "__init__.py") == str(world.site / "vllm" / "__init__.py")


def test_what_an_interpreter_imports(world: World, overlays: Path) -> None:
    importable(world)
    (world.site / "vllm" / "data.txt").write_text("image's own")
    (world.site / "vllm" / "sub").mkdir()
    (world.site / "vllm" / "sub" / "__init__.py").write_text("NAME = __name__\n")
    extension = Path(_heapq.__file__)
    shutil.copy(extension, world.site / "vllm" / extension.name)
    path = folder_of(world.run("--overlay", str(overlays)))
    code = """
import importlib.metadata, os
import vllm.engine, vllm.sub, vllm._heapq
print(vllm.engine.__file__)
print(vllm.engine.Engine().step(0), vllm.sub.NAME, vllm._heapq.heappop([3]))
print(open(os.path.join(os.path.dirname(vllm.__file__), "data.txt")).read())
print(importlib.metadata.version("vllm"))
"""
    told = python(path, code, world.site).splitlines()
    assert told == [f"{path}/vllm/engine.py", "1 vllm.sub 3", "image's own", "1.0.0"]


def test_spawned_processes_see_the_overlay_too(world: World, overlays: Path) -> None:
    importable(world)
    path = folder_of(world.run("--overlay", str(overlays)))
    script = world.site.with_name("script.py")
    script.write_text(
        "import multiprocessing\n"
        "def child(queue):\n"
        "    import vllm.engine\n"
        "    queue.put(vllm.engine.__file__)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.SimpleQueue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    print(queue.get())\n"
        "    process.join()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": f"{path}:{world.site}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == f"{path}/vllm/engine.py", done.stderr


def test_old_bytecode_does_not_answer_for_a_rewritten_module(world: World, overlays: Path) -> None:
    importable(world)
    path = folder_of(world.run("--overlay", str(overlays)))
    names = {p.name.split(".")[0] for p in (path / "vllm" / "__pycache__").iterdir()}
    assert "engine" not in names
    assert python(path, "import vllm.engine as e; print(e.Engine().step(0))", world.site) == "1"


def test_a_second_run_finds_it_and_writes_nothing(
    world: World, overlays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.run("delta", "--overlay", str(overlays))
    before = content(overlays)
    again = world.run("delta", "--overlay", str(overlays))
    assert folder_of(again) == folder_of(first)
    assert again.last == "applied=0 unchanged=4 files=0 profile=v1.0.0"
    monkeypatch.setattr(fast, "nothing_to_do", lambda *_: None)
    full = world.run("delta", "--overlay", str(overlays))
    assert (full.code, full.out) == (0, again.out)
    assert content(overlays) == before


def test_the_second_run_takes_the_short_way(
    world: World, overlays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run("--overlay", str(overlays))
    monkeypatch.setattr("fixes.applier.pack.Pack.fix", None)
    assert world.run("--overlay", str(overlays)).code == 0


@pytest.mark.parametrize("what", ["set", "site", "beside", "gone", "link"])
def test_another_set_or_image_gets_another_overlay(world: World, overlays: Path, what: str) -> None:
    (world.site / "vllm" / "gone.py").write_text("")
    first = folder_of(world.run("--overlay", str(overlays)))
    kept = content(first)
    words: tuple[str, ...] = ()
    if what == "set":
        words = ("delta",)
    elif what == "site":
        engine = world.site / "vllm" / "engine.py"
        engine.write_text(engine.read_text() + "\nLATER = 1\n")
    elif what == "beside":
        (world.site / "vllm" / "new.py").write_text("")
    elif what == "gone":
        (world.site / "vllm" / "gone.py").unlink()
    else:
        (first / "vllm" / "__init__.py").unlink()
        (first / "vllm" / "__init__.py").write_text("somebody's own\n")
        kept = content(first)
    second = folder_of(world.run(*words, "--overlay", str(overlays)))
    assert second != first
    assert content(first) == kept  # whoever runs from it goes on
    assert (overlays / "current").resolve() == second
    if what == "beside":
        assert os.readlink(second / "vllm" / "new.py") == str(world.site / "vllm" / "new.py")


def test_going_back_to_an_earlier_set_takes_the_earlier_overlay(
    world: World, overlays: Path
) -> None:
    first = folder_of(world.run("--overlay", str(overlays)))
    folder_of(world.run("delta", "--overlay", str(overlays)))
    assert folder_of(world.run("--overlay", str(overlays))) == first
    assert (overlays / "current").resolve() == first


def test_a_hand_edited_overlay_is_not_used(world: World, overlays: Path) -> None:
    first = folder_of(world.run("--overlay", str(overlays)))
    (first / "vllm" / "engine.py").write_text("raise SystemExit\n")
    second = folder_of(world.run("--overlay", str(overlays)))
    assert second != first
    assert "fix: alpha" in (second / "vllm" / "engine.py").read_text()


def test_an_image_with_fixes_in_it_gets_an_overlay_of_the_asked_ones_alone(
    world: World, overlays: Path
) -> None:
    world.run("delta")
    before = world.snapshot(times=True, state=True)
    path = folder_of(world.run("--without", "beta", "--overlay", str(overlays)))
    assert world.snapshot(times=True, state=True) == before
    assert "fix: beta" not in (path / "vllm" / "engine.py").read_text()
    assert "fix: alpha" in (path / "vllm" / "engine.py").read_text()
    assert not (path / "vllm_gaudi" / "_fix_delta.py").exists()
    assert not (path / "vllm" / ".gaudi-fix-pack").exists()
    world.run("--revert")
    world.run("--without", "beta")
    rewritten = (world.site / "vllm_gaudi" / "runner.py").read_bytes()
    assert (path / "vllm_gaudi" / "runner.py").read_bytes() == rewritten


def test_with_an_overlay_on_the_path_it_is_the_image_that_is_looked_at(
    world: World, overlays: Path
) -> None:
    script = install_command(world)
    words = ("--profile", "v1.0.0", "--overlay", str(overlays))
    first, _ = run_command(world, *words, script=script, path=[world.site])
    path = folder_of(first)
    again, _ = run_command(world, *words, script=script, path=[path, world.site])
    assert folder_of(again) == path
    refused, _ = run_command(world, "--profile", "v1.0.0", script=script, path=[path, world.site])
    assert refused.code == 3
    assert "is an overlay that the pack built" in refused.err


def test_a_dry_run_builds_nothing(world: World, overlays: Path) -> None:
    ran = world.run("--dry-run", "--overlay", str(overlays))
    assert (ran.code, ran.last) == (0, "applied=3 unchanged=0 files=2 profile=v1.0.0 dry-run")
    assert not overlays.exists()


def test_the_quiet_run_is_one_line_for_a_shell(world: World, overlays: Path) -> None:
    ran = world.run("-q", "--overlay", str(overlays))
    assert ran.out == f"export PYTHONPATH={folder_of(ran)}${{PYTHONPATH:+:$PYTHONPATH}}\n"


def test_the_document_has_the_line(world: World, overlays: Path) -> None:
    found = json.loads(world.run("--json", "--overlay", str(overlays)).out)
    assert found["overlay"]["folder"] == str((overlays / "current").resolve())
    assert found["overlay"]["line"].startswith("export PYTHONPATH=")


@pytest.mark.parametrize("option", ["--status", "--revert", "--list"])
def test_overlay_goes_with_applying_only(world: World, overlays: Path, option: str) -> None:
    ran = world.run(option, "--overlay", str(overlays), profile=None, site=option != "--list")
    assert (ran.code, ran.out) == (2, "")
    assert "remove DIR to undo it" in ran.err


@pytest.mark.parametrize("where", ["a:b", ""])
def test_a_folder_that_cannot_be_on_the_path_is_refused(world: World, where: str) -> None:
    ran = world.run("--overlay", where)
    assert (ran.code, ran.out) == (2, "")


def test_an_overlay_inside_of_a_package_is_refused(world: World) -> None:
    before = world.snapshot()
    ran = world.run("--overlay", str(world.site / "vllm" / "deep"))
    assert (ran.code, world.snapshot()) == (2, before)


def test_a_mismatch_builds_nothing(world: World, overlays: Path) -> None:
    engine = world.site / "vllm" / "engine.py"
    engine.write_text(engine.read_text().replace("self.done = []", "self.done = [0]"))
    engine.write_text(engine.read_text().replace("# twice", "# double"))
    ran = world.run("--overlay", str(overlays))
    assert (ran.code, overlays.exists()) == (3, False)


def test_files_have_the_image_s_mode_whatever_the_umask(world: World, overlays: Path) -> None:
    os.chmod(world.site / "vllm" / "engine.py", 0o640)
    for umask in (0o000, 0o077):
        before = os.umask(umask)
        try:
            path = folder_of(world.run("--overlay", str(overlays / str(umask))))
        finally:
            os.umask(before)
        assert stat.S_IMODE((path / "vllm" / "engine.py").stat().st_mode) == 0o640
        modes = {
            stat.S_IMODE(p.stat().st_mode)
            for p in path.rglob("*")
            if p.is_dir() and not p.is_symlink()
        }
        assert modes == {0o755}


def test_pods_that_start_at_once_on_one_volume(world: World, overlays: Path) -> None:
    script = install_command(world)
    done: list[Ran] = []

    def start() -> None:
        words = ("--profile", "v1.0.0", "--site-packages", str(world.site))
        command = [sys.executable, str(script), *words, "--overlay", str(overlays)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        done.append(Ran(ran.returncode, ran.stdout, ran.stderr))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [folder_of(ran) for ran in done]
    first = {name: data for name, data in content(found[0]).items() if name != overlay.NAME}
    for path in found:
        assert {k: v for k, v in content(path).items() if k != overlay.NAME} == first
    assert (overlays / "current").resolve() in found
    assert not [p.name for p in overlays.iterdir() if p.name.startswith(".")]


def test_a_run_that_is_killed_leaves_nothing_that_could_be_used(
    world: World, overlays: Path
) -> None:
    """Killed at each of its calls: what is there afterwards is no overlay, or a whole one."""
    words = ("--overlay", str(overlays))

    def killed_at(call: int) -> bool:
        def run() -> None:
            with at_call(call, die):
                world.run(*words)

        return in_child(run) == -signal.SIGKILL

    calls = 0
    while killed_at(calls + 1):
        calls += 1
        whole = (
            [] if not overlays.exists() else [p for p in overlays.iterdir() if len(p.name) == 12]
        )
        for path in whole:
            assert "fix: alpha" in (path / "vllm" / "engine.py").read_text()
            assert "fix: gamma" in (path / "vllm_gaudi" / "runner.py").read_text()
        path = folder_of(world.run(*words))
        assert whole in ([], [path])
        assert (overlays / "current").resolve() == path
        shutil.rmtree(overlays)
    assert calls > 20


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_written_is_exit_4(world: World, overlays: Path, code: int) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    with at_call(0, fail) as counter:
        world.run("--overlay", str(overlays))
    shutil.rmtree(overlays)
    for call in range(1, counter.calls + 1):
        with at_call(call, fail):
            ran = world.run("--overlay", str(overlays))
        assert ran.code == 4, call
        left = [p.name for p in overlays.iterdir()] if overlays.exists() else []
        assert not [name for name in left if name.startswith(".")], (call, left)
        shutil.rmtree(overlays, ignore_errors=True)


def test_what_a_killed_run_left_is_removed_later(world: World, overlays: Path) -> None:
    for name in (".0123456789ab", ".other", ".abcdef012345"):
        (overlays / name).mkdir(parents=True)
    for name in (".0123456789ab", ".other"):
        os.utime(overlays / name, (1, 1))
    world.run("--overlay", str(overlays))
    assert sorted(p.name for p in overlays.glob(".*")) == [".abcdef012345", ".other"]


def test_a_dry_run_names_no_overlay_that_is_not_there(world: World, overlays: Path) -> None:
    ran = world.run("--overlay", str(overlays), "-q", "--dry-run")
    assert (ran.code, ran.out.startswith("applied=3")) == (0, True), ran.err
    assert not overlays.exists()
    built = folder_of(world.run("--overlay", str(overlays)))
    assert str(built) in world.run("--overlay", str(overlays), "-q", "--dry-run").out


def test_a_dry_run_sees_that_an_overlay_could_not_be_made(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    ran = world.run("--overlay", str(tmp_path / "a" / "b"), "--dry-run")
    assert ran.code == 4
    assert f"no permission to write in {tmp_path}\n" in ran.err
    assert "--overlay takes a folder" in ran.err


def test_an_overlay_that_cannot_be_made_says_what_would_do(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for more in ([], ["--dry-run"]):
        ran = world.run("--overlay", str(tmp_path / "file" / "a"), *more)
        assert ran.code == 4
        assert "--overlay" in ran.err


@pytest.mark.parametrize("first", [True, False])
def test_an_installation_that_comes_before_every_path(
    world: World, overlays: Path, first: bool
) -> None:
    """Some editable installs do: then the line that is printed would change nothing."""
    place = "0" if first else "len(sys.path)"
    custom = world.pack.parent / "custom"
    custom.mkdir()
    (custom / "usercustomize.py").write_text(
        f"import sys; sys.path.insert({place}, {str(world.site)!r})\n"
    )
    program = install_command(world)
    # As a .pth file of the environment would do it, after PYTHONPATH has been read.
    (custom / "sitecustomize.py").write_text("import usercustomize\n")
    done = subprocess.run(
        [sys.executable, program, "--profile", "v1.0.0", "--overlay", overlays],
        env={**os.environ, "PYTHONPATH": str(custom)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (3 if first else 0), done.stderr
    assert ("would not be imported" in done.stderr) == first
    assert overlays.exists() != first


def test_other_users_can_read_an_overlay_whatever_the_umask(world: World, overlays: Path) -> None:
    umask = os.umask(0o077)
    try:
        assert world.run("--overlay", str(overlays / "a" / "b")).code == 0
    finally:
        os.umask(umask)
    for folder in (overlays, overlays / "a", overlays / "a" / "b"):
        assert folder.stat().st_mode & 0o777 == 0o755

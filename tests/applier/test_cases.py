"""Faults that people had with comparable tools, turned into inputs and results for this one.

The numbers are those of the reports: "applied" but untouched (genesis-vllm-patches #12, NeMo-RL
#4155), half a series (patch-package #450), a pack that changed between starts (patch-package #557),
"already applied" guessed wrong (rattler-build #2693), written through a link (uv #10579), old
bytecode (cpython #121376), two fixes on one place (semgrep #6647), which copy (kvcached #470), line
ends (patch-package #191), imported first (vllm-ascend #15815).
"""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fixes.applier.definitions import fingerprint
from tests.applier.faults import at_call, killed_after_placing
from tests.applier.world import ENGINE, FIXES, World

STEP = "    def step(self, request):"


def edit(path: Path, old: str, new: str) -> None:
    """Change a file by hand, bytes as they are."""
    data = path.read_bytes()
    assert old.encode() in data
    path.write_bytes(data.replace(old.encode(), new.encode()))


def engine(world: World) -> Path:
    """The file that two fixes rewrite."""
    return world.site / "vllm" / "engine.py"


# 1. "Applied", but the file is untouched ----------------------------------------------------------


def test_a_renamed_method_is_refused_by_name(world: World) -> None:
    edit(engine(world), "def step(", "def steps(")
    before = world.snapshot(times=True, state=True)
    ran = world.run()
    assert ran.code == 3
    for fix in ("alpha", "beta"):
        assert f"{fix}: vllm/engine.py::Engine.step: there is no such definition" in ran.err
    assert "the file has Engine.steps" in ran.err
    assert "applied" not in ran.out + ran.err
    assert world.snapshot(times=True, state=True) == before


def test_a_changed_byte_is_refused_with_both_fingerprints(world: World) -> None:
    text = ENGINE[ENGINE.index(STEP) : ENGINE.index("\n    @property")].rstrip() + "\n"
    edit(engine(world), "# twice", "# twIce")
    before = world.snapshot(times=True, state=True)
    ran = world.run()
    assert ran.code == 3
    assert f"expected {fingerprint(text)} (commit 111111111111)" in ran.err
    assert f"found    {fingerprint(text.replace('twice', 'twIce'))}" in ran.err
    assert world.snapshot(times=True, state=True) == before


@pytest.mark.parametrize("body", ["pass", "code._root", "code.within('return value')"])
def test_a_codemod_that_does_nothing_is_an_error(world: World, body: str) -> None:
    world.write_fix("alpha", FIXES["alpha"].replace('code.replace_statement("value', f"{body} #"))
    before = world.snapshot(times=True, state=True)
    ran = world.run()
    assert ran.code == 3
    assert "changed nothing" in ran.err
    assert world.snapshot(times=True, state=True) == before


# 2. Half a series ---------------------------------------------------------------------------------


def test_an_exception_in_one_fix_leaves_all_as_it_was(world: World) -> None:
    world.write_fix("gamma", FIXES["gamma"].replace('code.remove("assert rows")', "1 / 0"))
    before = world.snapshot(times=True, state=True)
    ran = world.run()
    assert ran.code == 2
    assert "ZeroDivisionError" in ran.err
    assert world.snapshot(times=True, state=True) == before


def test_a_kill_between_two_files_is_settled_by_the_next_look(world: World) -> None:
    before = world.snapshot()
    killed_after_placing("engine.py", world.run)
    assert world.snapshot() != before
    status = world.run("--status", profile=None)
    assert "an interrupted run was rolled back" in status.out
    assert world.snapshot() == before


# 3. The pack changed between two starts -----------------------------------------------------------


def test_a_changed_pack_starts_from_pristine(world: World, tmp_path: Path) -> None:
    world.run("--without", "gamma")
    world.write_fix("alpha", FIXES["alpha"].replace("+ 1", "+ 2"))
    words = ["--without", "beta"]
    ran = world.run(*words)
    assert ran.code == 0
    assert "- beta: taken back" in ran.out
    changed = world.snapshot()
    world.run("--revert", profile=None)
    world.run(*words)
    assert world.snapshot() == changed
    assert "double(request) + 2" in engine(world).read_text()
    before = world.snapshot(times=True, state=True)
    assert world.run(*words).code == 0
    assert world.snapshot(times=True, state=True) == before


# 4. "Already applied" guessed wrong ---------------------------------------------------------------


def test_a_fix_that_only_deletes_is_applied(world: World) -> None:
    ran = world.run("--without", "alpha", "--without", "beta")
    assert "+ gamma: applied" in ran.out
    assert "assert rows" not in (world.site / "vllm_gaudi" / "runner.py").read_text()
    assert "= gamma: unchanged" in world.run("--without", "alpha", "--without", "beta").out


@pytest.mark.parametrize(
    "by",
    [
        lambda world: edit(engine(world), "double(request)  # twice", "double(request) + 1"),
        lambda world: edit(engine(world), "self.done.append", "self.done.insert"),
    ],
    ids=["upstream repaired it", "hand-edited"],
)
def test_code_that_is_not_the_recorded_one_is_refused(
    world: World, by: Callable[[World], None]
) -> None:
    by(world)
    before = world.snapshot(times=True, state=True)
    ran = world.run()
    assert ran.code == 3
    assert "its code is not the code this fix was written for" in ran.err
    assert "applied" not in ran.out + ran.err
    assert world.snapshot(times=True, state=True) == before


# 5. Written through a link into a package store ---------------------------------------------------


@pytest.mark.parametrize("how", ["hard", "symbolic"])
def test_the_store_behind_a_link_stays_as_it_is(world: World, tmp_path: Path, how: str) -> None:
    store = tmp_path / "store" / "engine.py"
    store.parent.mkdir()
    target = engine(world)
    target.chmod(0o604)
    os.rename(target, store)
    if how == "hard":
        os.link(store, target)
    else:
        target.symlink_to(store)
    before = store.read_bytes(), store.stat().st_mtime_ns
    shipped = world.snapshot(times=True)
    ran = world.run()
    assert ran.code == 0
    assert "link" in ran.err
    assert str(target) in ran.err
    assert (store.read_bytes(), store.stat().st_mtime_ns) == before
    assert not target.is_symlink()
    assert target.stat().st_ino != store.stat().st_ino
    assert target.stat().st_mode & 0o7777 == 0o604
    assert world.run("--revert", profile=None).code == 0
    assert world.snapshot(times=True) == shipped
    assert (store.read_bytes(), store.stat().st_mtime_ns) == before


def test_a_folder_that_is_a_link_is_refused(world: World, tmp_path: Path) -> None:
    """The whole kind: a store may link folders as well as files."""
    inner = world.site / "vllm_gaudi"
    store = tmp_path / "store"
    store.mkdir()
    (store / "runner.py").write_bytes((inner / "runner.py").read_bytes())
    (inner / "linked").symlink_to(store)
    for name in ("beta", "gamma"):
        text = FIXES[name].replace("vllm_gaudi/runner.py", "vllm_gaudi/linked/runner.py")
        world.write_fix(name, text)
    world.record("v1.0.0", world.site)
    before = world.snapshot(times=True, state=True)
    ran = world.run()
    assert ran.code == 3
    assert "symbolic link" in ran.err
    assert world.snapshot(times=True, state=True) == before


# 6. Old bytecode answers for new source -----------------------------------------------------------


@pytest.mark.parametrize("mode", ["unchecked", "same size and second", "prefix"])
def test_a_fresh_interpreter_imports_the_rewrite(
    world: World, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("vllm", "vllm_gaudi"):
        (world.site / package / "__init__.py").write_text("")
    target = engine(world)
    environment = {**os.environ, "PYTHONPATH": str(world.site)}
    code = "from vllm.engine import Engine; print(Engine().step(0))"
    if mode == "prefix":
        environment["PYTHONPYCACHEPREFIX"] = str(tmp_path / "prefix")
        monkeypatch.setattr(sys, "pycache_prefix", environment["PYTHONPYCACHEPREFIX"])
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    if mode == "same size and second":
        # The rewrite is made exactly as long as the original by a comment below the definition.
        edit(target, "\n    @property", "\n    # " + "x" * 200 + "\n    @property")
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    else:
        py_compile.compile(str(target), doraise=True, invalidation_mode=unchecked)

    def answer() -> str:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    assert answer() == "0"
    ran = world.run("--package", "vllm")
    assert ran.code == 0, ran.err
    if mode == "same size and second":
        stat = target.stat()
        assert stat.st_mtime_ns // 10**9 != 1_700_000_000
    assert answer() == "1"


# 7. Two fixes on the same code --------------------------------------------------------------------


def test_a_fix_inside_another_ones_definition_is_a_profile_error(world: World) -> None:
    world.write_fix(
        "gamma",
        FIXES["gamma"]
        .replace("vllm_gaudi/runner.py", "vllm/engine.py")
        .replace('"collate"', '"Engine"'),
    )
    before = world.snapshot(times=True, state=True)
    ran = world.run()
    assert ran.code == 2
    assert (
        "gamma rewrites vllm/engine.py::Engine and alpha rewrites Engine.step inside it" in ran.err
    )
    assert world.snapshot(times=True, state=True) == before


# 8. Which copy? -----------------------------------------------------------------------------------


def test_the_report_names_the_folders_python_imports_from(world: World, tmp_path: Path) -> None:
    """A checkout in the working directory is not what the `vllm` command imports."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    launcher = (
        "import sys; from fixes.applier.cli import main; sys.exit(main(sys.argv[1], sys.argv[2:]))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [
            sys.executable,
            "-P" if sys.version_info >= (3, 11) else "-s",
            "-c",
            launcher,
            str(world.pack),
            "--profile",
            "v1.0.0",
        ],
        env={**os.environ, "PYTHONPATH": f"{world.site}{os.pathsep}{root}"},
        cwd=tmp_path if sys.version_info >= (3, 11) else "/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"in {world.site / 'vllm'}\n" in done.stdout
    assert f"in {world.site / 'vllm_gaudi'}\n" in done.stdout
    if sys.version_info >= (3, 11):
        assert "the working directory holds another vllm" in done.stderr


# 9. Line ends and odd bytes -----------------------------------------------------------------------

ODD = {
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "mixed": lambda text: text.replace("LIMIT = 3\n", "LIMIT = 3\r\n"),
    "form feed": lambda text: text.replace("class Engine", "\x0c\nclass Engine"),
    "other separators": lambda text: text.replace("LIMIT = 3", "LIMIT = '\x1c\x85\u2028'"),
    "no final newline": lambda text: text.rstrip("\n"),
    "byte order mark": lambda text: "\ufeff" + text,
    "not ASCII": lambda text: text.replace("The engine.", "Der Motor \u00e4\u4e2d\U0001f600."),
    "tabs": lambda text: text.replace("    ", "\t"),
}


@pytest.mark.parametrize("kind", list(ODD))
def test_only_the_edited_lines_differ(world: World, kind: str) -> None:
    target = engine(world)
    target.write_bytes(ODD[kind](ENGINE).encode())
    world.record("v1.0.0", world.site)
    shipped = target.read_bytes()
    assert world.run().code == 0
    now = target.read_bytes()
    old, new = shipped.split(b"\n"), now.split(b"\n")
    assert [line for line in old if line not in new and b"twice" not in line] == []
    added = [line for line in new if line not in old]
    assert len(added) == 4, added
    if kind == "crlf":
        assert all(line.endswith(b"\r") for line in new[:-1])
    compile(now, "engine.py", "exec")
    world.run("--revert", profile=None)
    assert target.read_bytes() == shipped


def test_a_file_converted_to_other_line_ends_is_refused(world: World) -> None:
    target = engine(world)
    target.write_bytes(target.read_bytes().replace(b"\n", b"\r\n"))
    ran = world.run()
    assert ran.code == 3
    assert "its line ends are crlf, recorded were lf: the file was converted" in ran.err


def test_a_checkout_of_the_pack_with_other_line_ends_works_the_same(world: World) -> None:
    world.run("delta")
    expected = world.snapshot()
    world.run("--revert", profile=None)
    for path in [
        *world.pack.rglob("*.py"),
        *world.pack.rglob("*.toml"),
        *world.pack.rglob("*.txt"),
    ]:
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert world.run("delta").code == 0
    assert world.snapshot() == expected


# 10. The package was imported first ---------------------------------------------------------------


def test_nothing_of_the_target_is_imported(world: World) -> None:
    """Their `__init__` raises, so a run that ends well has not imported them."""
    for words in ([], ["--dry-run"], ["--status"], ["--revert"]):
        profile = None if words and words[0] in ("--status", "--revert") else "v1.0.0"
        assert world.run(*words, profile=profile).code == 0
    assert not {"vllm", "vllm_gaudi", "torch"} & set(sys.modules)


def test_a_second_definition_of_the_same_name_is_refused(world: World) -> None:
    target = engine(world)
    target.write_text(target.read_text() + "\n" + STEP + "\n        return request\n")
    ran = world.run()
    assert ran.code == 3
    assert "the file defines it 2 times" in ran.err


def test_a_run_that_fails_at_a_call_can_be_repeated(world: World) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", "somewhere")

    before = world.snapshot(times=True, state=True)
    with at_call(12, fail):
        ran = world.run()
    assert ran.code == 4
    assert "No space left on device" in ran.err
    assert world.snapshot(times=True, state=True) == before
    assert world.run().code == 0

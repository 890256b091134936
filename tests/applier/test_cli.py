"""The command line: what is printed where, in which form, and the exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixes.applier import cli, errors, fast, runner
from fixes.applier.digest import VERSION
from tests.applier.command import install_command, run_command
from tests.applier.world import Ran, World

LAST_LINE = r"applied=\d+ unchanged=\d+ files=\d+ profile=(v\d+\.\d+\.\d+|none)( dry-run)?"
ENGINE_PY, RUNNER_PY = "vllm/engine.py", "vllm_gaudi/runner.py"


def document(world: World, *argv: str, profile: str | None = "v1.0.0") -> dict[str, Any]:
    """The document of a run; standard output holds nothing else, standard error no result."""
    ran = world.run(*argv, "--json", profile=profile)
    found = json.loads(ran.out)
    assert isinstance(found, dict)
    assert found["exit_code"] == ran.code
    return found


def states(found: dict[str, Any], what: str = "fixes") -> dict[str, str]:
    """The state of every fix or file of a document."""
    key = "id" if what == "fixes" else "path"
    return {entry[key]: entry["state"] for entry in found[what]}


# The document -------------------------------------------------------------------------------------

FIELDS = {
    "schema_version",
    "command",
    "pack",
    "profile",
    "dry_run",
    "packages",
    "fixes",
    "unwritten",
    "files",
    "notes",
    "recovered",
    "counts",
    "exit_code",
    "milliseconds",
}


@pytest.mark.parametrize("argv", [(), ("--dry-run",), ("--diff",), ("delta",)])
def test_the_document_of_a_run_has_the_same_fields_always(
    world: World, argv: tuple[str, ...]
) -> None:
    expected = FIELDS | ({"diff"} if "--diff" in argv else set())
    assert set(document(world, *argv)) == expected
    assert set(document(world, *argv)) == expected
    assert set(document(world, "--status", profile=None)) == FIELDS
    assert set(document(world, "--revert", profile=None)) == FIELDS


def test_the_document_says_who_did_what_where(world: World) -> None:
    found = document(world)
    assert (found["schema_version"], found["command"], found["profile"]) == (1, "apply", "v1.0.0")
    assert found["pack"]["version"] == VERSION
    assert re.fullmatch(r"[0-9a-f]{64}", found["pack"]["digest"])
    assert found["packages"] == [
        {"name": name, "folder": str(world.site / name), "version": "1.0.0", "commit": ""}
        for name in ("vllm", "vllm_gaudi")
    ]
    assert found["unwritten"] == ["epsilon"]
    assert (found["notes"], found["recovered"], found["dry_run"]) == ([], "", False)
    assert found["milliseconds"] > 0


def test_the_document_has_every_fix_with_its_definitions(world: World) -> None:
    found = document(world)
    assert states(found) == dict.fromkeys(["alpha", "beta", "gamma"], "applied")
    lock = json.loads((world.pack / "profiles" / "v1.0.0.lock").read_text())["fixes"]
    for fix in found["fixes"]:
        assert [(s["file"], s["definition"], s["sha256"]) for s in fix["sites"]] == [
            (s["file"], s["definition"], s["sha256"]) for s in lock[fix["id"]]
        ]
        assert all(isinstance(s["rewritten"], bool) and s["evidence"] for s in fix["sites"])


def test_the_document_has_every_file_with_its_hashes(world: World) -> None:
    before = world.snapshot()
    found = document(world)
    after = world.snapshot()
    assert states(found, "files") == {ENGINE_PY: "rewritten", RUNNER_PY: "rewritten"}
    for file in found["files"]:
        assert file["before"] == before[file["path"]][0]
        assert file["after"] == after[file["path"]][0]
    assert found["files"][0]["fixes"] == ["alpha", "beta"]
    assert found["counts"] == {"applied": 3, "unchanged": 0, "files": 2}


def test_a_dry_run_says_what_a_run_would_do(world: World) -> None:
    dry, real = document(world, "delta", "--dry-run"), document(world, "delta")
    assert dry["dry_run"]
    assert set(states(dry).values()) == {"would apply"}
    assert dry["files"] == real["files"]
    assert dry["counts"] == real["counts"]


def test_a_run_with_nothing_to_do_says_so(world: World) -> None:
    first, again = document(world), document(world)
    assert set(states(again).values()) == {"unchanged"}
    assert set(states(again, "files").values()) == {"unchanged"}
    assert {file["after"] for file in again["files"]} == {f["after"] for f in first["files"]}
    assert again["counts"] == {"applied": 0, "unchanged": 3, "files": 0}


def test_what_is_taken_back_is_told(world: World) -> None:
    world.run("delta")
    found = document(world, "--without", "beta")
    assert states(found) == {
        "beta": "taken back",
        "delta": "taken back",
        "alpha": "unchanged",
        "gamma": "unchanged",
    }
    assert states(found, "files") == {
        ENGINE_PY: "rewritten",
        "vllm_gaudi/_fix_delta.py": "removed",
        RUNNER_PY: "rewritten",
    }


def test_a_file_of_the_pack_s_own_is_added(world: World) -> None:
    (added,) = [file for file in document(world, "delta")["files"] if file["state"] == "added"]
    assert (added["path"], added["before"]) == ("vllm_gaudi/_fix_delta.py", None)


def test_reverting_restores_every_file(world: World) -> None:
    before = world.snapshot()
    world.run("delta")
    found = document(world, "--revert", profile=None)
    assert found["command"] == "revert"
    assert set(states(found).values()) == {"taken back"}
    assert states(found, "files") == {
        ENGINE_PY: "restored",
        "vllm_gaudi/_fix_delta.py": "removed",
        RUNNER_PY: "restored",
    }
    assert world.snapshot() == before


def test_the_status_is_what_was_applied(world: World) -> None:
    assert document(world, "--status", profile=None)["profile"] == ""
    world.run("delta")
    found = document(world, "--status", profile=None)
    assert (found["command"], found["profile"]) == ("status", "v1.0.0")
    assert list(states(found)) == ["alpha", "beta", "gamma", "delta"]


@pytest.mark.parametrize(
    "argv",
    [(), ("delta",), ("--without", "beta"), ("--package", "vllm"), ("--package", "vllm-gaudi")],
)
def test_the_fast_path_reports_what_the_full_one_does(
    world: World, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    assert world.run(*argv).code == 0
    monkeypatch.setattr(runner, "apply", lambda *_a, **_k: pytest.fail("the full run"))
    quick = document(world, *argv)
    monkeypatch.undo()
    monkeypatch.setattr(fast, "nothing_to_do", lambda *_: None)
    full = document(world, *argv)
    for found in (quick, full):
        del found["milliseconds"]
    assert quick == full


def test_the_list_as_a_document(world: World) -> None:
    found = document(world, "--list")
    rows = {row["id"]: row for row in found["fixes"]}
    assert list(rows) == ["alpha", "beta", "gamma", "delta", "epsilon"]
    assert (rows["beta"]["kind"], rows["beta"]["after"]) == ("default", ["alpha"])
    assert (rows["delta"]["kind"], rows["delta"]["requires"]) == ("opt-in", ["gamma"])
    assert (rows["epsilon"]["written"], rows["epsilon"]["summary"]) == (False, "")
    assert rows["alpha"]["evidence"] == ["written by this test"]
    assert {row["profile"] for row in found["fixes"]} == {"v1.0.0"}


# Errors as documents ------------------------------------------------------------------------------


def test_an_error_is_a_document_too(world: World) -> None:
    found = document(world, "nine")
    assert found["error"] == {
        "kind": "UsageError",
        "message": "profile v1.0.0 has no fix 'nine'",
    }
    assert (found["exit_code"], found["profile"], found["schema_version"]) == (2, "v1.0.0", 1)


def test_all_mismatches_are_in_the_document(world: World) -> None:
    engine, gaudi = world.site / ENGINE_PY, world.site / RUNNER_PY
    engine.write_text(engine.read_text().replace("limit = LIMIT", "limit = LIMIT  # mine"))
    gaudi.write_text(gaudi.read_text().replace("def collate", "def collete"))
    found = document(world)
    assert found["exit_code"] == 3
    mismatches = found["error"]["mismatches"]
    assert [(one["fix"], one["definition"]) for one in mismatches] == [
        ("alpha", "Engine.step"),
        ("beta", "Engine.step"),
        ("beta", "collate"),
        ("gamma", "collate"),
    ]
    lock = json.loads((world.pack / "profiles" / "v1.0.0.lock").read_text())["fixes"]
    assert mismatches[0]["expected"] == [lock["alpha"][0]["sha256"]]
    assert re.fullmatch(r"[0-9a-f]{64}", mismatches[0]["found"])
    assert mismatches[0]["commit"] == "1" * 12
    assert mismatches[2]["found"] == ""
    assert "the file has collete" in mismatches[2]["reason"]


def test_an_internal_error_is_a_document_and_exit_1(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object, **_more: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(runner, "apply", broken)
    found = document(world)
    assert (found["exit_code"], found["error"]["kind"]) == (1, "ZeroDivisionError")


# Lines for people ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "profile"),
    [
        ((), "v1.0.0"),
        (("delta",), "v1.0.0"),
        (("--dry-run",), "v1.0.0"),
        (("-v",), "v1.0.0"),
        (("--status",), None),
        (("--revert",), None),
        (("--revert", "--dry-run"), None),
    ],
)
@pytest.mark.parametrize("applied", [False, True])
def test_the_last_line_has_one_form(
    world: World, argv: tuple[str, ...], profile: str | None, applied: bool
) -> None:
    if applied:
        world.run("--without", "gamma")
    ran = world.run(*argv, profile=profile)
    assert ran.code == 0
    match = re.fullmatch(LAST_LINE, ran.last)
    assert match, ran.last
    assert bool(match[2]) == ("--dry-run" in argv)


@pytest.mark.parametrize("argv", [(), ("--dry-run",), ("--status",), ("--revert",)])
def test_quiet_is_the_last_line_alone(world: World, argv: tuple[str, ...]) -> None:
    ran = world.run(*argv, "-q", profile="v1.0.0" if argv in ((), ("--dry-run",)) else None)
    assert ran.code == 0
    assert ran.out == ran.last + "\n"
    assert re.fullmatch(LAST_LINE, ran.last)


def test_a_run_says_the_folders_and_the_fixes(world: World) -> None:
    lines = world.run("delta").out.splitlines()
    assert lines[:2] == [
        f"vllm 1.0.0 in {world.site / 'vllm'}",
        f"vllm_gaudi 1.0.0 in {world.site / 'vllm_gaudi'}",
    ]
    assert [line for line in lines if line.startswith("+ ")] == [
        f"+ {fix}: applied" for fix in ("alpha", "beta", "gamma", "delta")
    ]


def test_a_dry_run_never_says_that_something_was_applied(world: World) -> None:
    lines = world.run("--dry-run").out.splitlines()
    assert "dry run: nothing is written" in lines
    assert "+ alpha: would apply" in lines
    assert not [line for line in lines if line.endswith(": applied")]


def test_verbose_adds_definitions_and_files(world: World) -> None:
    plain = world.run("--dry-run").out.splitlines()
    verbose = world.run("--dry-run", "-v").out.splitlines()
    assert [line for line in verbose if not line.startswith(" ")] == plain
    more = [line.strip() for line in verbose if line.startswith(" ")]
    assert [line for line in more if line.startswith(f"{ENGINE_PY}::Engine.step ")]
    assert [line for line in more if line.startswith(f"rewritten {ENGINE_PY} ")]


def test_notes_are_log_lines_and_said_once(world: World) -> None:
    target = world.site / ENGINE_PY
    os.link(target, world.pack.parent / "stored.py")
    ran = world.run()
    assert ran.err.count("was shared with a package store by a hard link") == 1
    assert "hard link" not in ran.out


def test_the_list_for_people(world: World) -> None:
    lines = world.run("--list", profile=None).out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["v1.0.0:", "v2.0.0:"]
    assert "  delta (opt-in, requires gamma)" in lines
    assert "  epsilon (default, not written yet)" in lines
    assert "      step is off by one" in lines


def test_explaining_a_fix(world: World) -> None:
    out = world.run("--explain", "alpha", profile=None).out
    for part in (
        "alpha: step is off by one.",
        "In profiles: v1.0.0, v2.0.0",
        "Reference: #1",
        "Rewrites vllm/engine.py::Engine.step",
        "Relies on vllm/engine.py::double",
        "Can be dropped: never",
    ):
        assert part in out.splitlines()
    assert "Adds vllm_gaudi/_fix_delta.py" in world.run("--explain", "delta", profile=None).out


def test_the_version(world: World) -> None:
    assert world.run("--version", profile=None, site=False).out == f"gaudi-fix-pack {VERSION}\n"


# Standard error -----------------------------------------------------------------------------------


def failing(world: World, how: str) -> tuple[str, ...]:
    """Arrange for a failure; the words that then fail."""
    if how == "mismatch":
        engine = world.site / ENGINE_PY
        engine.write_text(engine.read_text().replace("limit = LIMIT", "limit = 4"))
    elif how == "broken fix":
        world.write_fix("gamma", "raise ValueError('a\\nb')")
    elif how == "broken profile":
        (world.pack / "profiles" / "v1.0.0.toml").write_text("release = \n")
    elif how == "failing codemod":
        world.write_fix(
            "gamma",
            '''
            """gamma: broken."""
            from fixes.applier.fix import Fix, site
            FIX = Fix(summary="x", symptom="x", references=(), drop_when="never")
            @site("vllm_gaudi/runner.py", "collate")
            def collate(code):
                raise ZeroDivisionError("first\\nsecond")
            ''',
        )
    words = {"usage": ("--nonsense",), "no number": ("--lock-timeout", "soon"), "fix": ("nine",)}
    return words.get(how, ())


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("usage", 2),
        ("no number", 2),
        ("fix", 2),
        ("mismatch", 3),
        ("broken fix", 2),
        ("broken profile", 2),
        ("failing codemod", 2),
        ("internal error", 1),
    ],
)
def test_every_line_on_standard_error_has_the_prefix(
    world: World, how: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "internal error":
        monkeypatch.setattr("fixes.applier.runner.apply", lambda *_, **__: int("x"))
    ran = world.run(*failing(world, how))
    assert (ran.code, ran.out) == (code, "")
    lines = ran.err.splitlines()
    assert lines
    assert all(line.startswith(cli.PREFIX + " ") for line in lines), ran.err
    assert any(line.startswith(f"{cli.PREFIX} error: ") for line in lines)


def test_a_run_that_goes_well_says_nothing_on_standard_error(world: World) -> None:
    for argv in ((), (), ("delta",), ("--dry-run",), ("--diff",), ("-q",)):
        assert world.run(*argv).err == ""


@pytest.mark.parametrize("argv", [("--help",), ("--list",), ("--profile", "v1.0.0"), ("--nope",)])
def test_nothing_is_coloured_even_if_asked_to(world: World, argv: tuple[str, ...]) -> None:
    asked = {"TERM": "xterm-256color", "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}
    ran, _ = run_command(world, *argv, path=[world.site], environment=asked)
    assert ran.out or ran.err
    assert "\x1b" not in ran.out + ran.err


# Exit codes ---------------------------------------------------------------------------------------


def test_the_help_has_the_exit_codes_of_the_errors(world: World) -> None:
    text = world.run("--help", profile=None, site=False).out.partition("exit codes:")[2]
    told = {int(code) for code in re.findall(r"(?:^|\s{2,})(\d+)  \S", text, re.M)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    raised = {kind.exit_code for kind in kinds if issubclass(kind, errors.PackError)}
    assert told == raised | {0, 1}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--list", "delta"), "--list does not go with a fix"),
        (("--list", "--without", "alpha"), "--list does not go with --without"),
        (("--list", "--diff"), "--list does not go with --diff"),
        (("--explain", "alpha", "--diff"), "--explain does not go with --diff"),
        (("--explain", "nine"), "no profile has a fix 'nine'"),
        (("--explain", "alpah"), "did you mean alpha"),
        (("--explain", "epsilon"), "epsilon is planned for v1.0.0, v2.0.0"),
        (("--status", "delta"), "--status does not go with a fix"),
        (("--revert", "--package", "vllm"), "--revert does not go with --package"),
        (("--status", "--revert"), "not allowed with"),
        (("--package", "torch"), "--package torch: profile v1.0.0 is about vllm and vllm_gaudi"),
        (("--package", "vlm"), "did you mean vllm"),
    ],
)
def test_words_that_do_not_go_together_are_exit_2(
    world: World, argv: tuple[str, ...], said: str
) -> None:
    ran = world.run(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_without_a_profile_the_fitting_ones_are_named(world: World) -> None:
    ran = world.run(profile=None)
    assert ran.code == 2
    assert "profiles: v1.0.0, v2.0.0; the installed packages match v1.0.0" in ran.err


def test_without_a_profile_it_is_told_that_none_fits(world: World) -> None:
    (world.site / ENGINE_PY).write_text("")
    assert "none of them matches" in world.run(profile=None).err


def test_without_a_profile_and_packages_both_are_told(world: World) -> None:
    for name in ("vllm", "vllm_gaudi"):
        shutil.rmtree(world.site / name)
    assert "neither vllm nor vllm_gaudi is installed here" in world.run(profile=None).err


def test_an_unknown_profile_comes_with_the_nearest(world: World) -> None:
    ran = world.run(profile="v1.0")
    assert ran.code == 2
    assert "there is no profile 'v1.0'; did you mean v1.0.0" in ran.err


@pytest.mark.parametrize("profile", ["../v1.0.0", "/etc/passwd", "v1.0.0\0", "", "v1.0.0/"])
def test_a_profile_is_a_name_and_no_path(world: World, profile: str) -> None:
    assert world.run("--profile", profile, profile=None).code == 2


# Patches ------------------------------------------------------------------------------------------

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")


def patch_of(world: World, *argv: str) -> bytes:
    """What --diff prints, as bytes."""
    words = [sys.executable, str(install_command(world)), "--profile", "v1.0.0", *argv, "--diff"]
    done = subprocess.run(
        [*words, "--site-packages", str(world.site)], capture_output=True, check=True
    )
    assert done.stderr == b""
    return done.stdout


VARIANTS = {
    "plain": lambda data: data,
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "mixed line ends": lambda data: data.replace(b"\n\n", b"\r\n\n"),
    "form feeds": lambda data: data.replace(b"\n\n\n", b"\n\x0c\n\n").replace(b"twice", b"\x0c2"),
    "other separators": lambda data: data.replace(b"stock", "\x1c \x85 \u2028".encode()),
    "a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "Latin-1": lambda data: b"# coding: latin-1\n" + data.replace(b"stock", b"st\xf6ck"),
    "no final newline": lambda data: data.rstrip(b"\n"),
    "tabs": lambda data: data.replace(b"        ", b"\t\t").replace(b"    ", b"\t"),
}


@needs_git
@pytest.mark.parametrize("variant", VARIANTS)
def test_git_applies_the_diff_and_gets_the_rewritten_tree(world: World, variant: str) -> None:
    for name in (ENGINE_PY, RUNNER_PY):
        path = world.site / name
        path.write_bytes(VARIANTS[variant](path.read_bytes()))
    world.record("v1.0.0", world.site)
    copy = world.site.with_name("copy")
    shutil.copytree(world.site, copy)
    patch = patch_of(world, "delta")
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=copy, input=patch, check=True)
    assert world.run("delta").code == 0
    for name in (ENGINE_PY, RUNNER_PY, "vllm_gaudi/_fix_delta.py"):
        assert (copy / name).read_bytes() == (world.site / name).read_bytes()
    assert b"# fix: alpha" in (copy / ENGINE_PY).read_bytes()


@needs_git
def test_the_diff_of_an_applied_set_is_still_that_from_the_image(world: World) -> None:
    before = patch_of(world)
    world.run("delta")
    state = world.snapshot(times=True, state=True)
    assert patch_of(world) == before
    assert world.snapshot(times=True, state=True) == state


def test_a_diff_writes_nothing(world: World) -> None:
    before = world.snapshot(times=True, state=True)
    out = world.run("--diff").out
    assert out.startswith(f"--- a/{ENGINE_PY}\n+++ b/{ENGINE_PY}\n@@ ")
    assert world.snapshot(times=True, state=True) == before


# The program itself -------------------------------------------------------------------------------


def test_both_entry_points_are_the_same_program(world: World) -> None:
    inner = install_command(world)
    for argv in (["--list"], ["--profile", "v1.0.0", "--dry-run"], ["--version"], ["nine"]):
        words = [*argv, "--site-packages", str(world.site)]
        first, _ = run_command(world, *words, script=inner)
        second, _ = run_command(world, *words, script=world.pack / "apply_all.py")
        assert first == second
        assert first.out or first.err


@pytest.mark.parametrize("where", ["pack/fixes", "elsewhere"])
def test_the_program_runs_from_anywhere_and_finds_its_own_modules(world: World, where: str) -> None:
    inner = install_command(world)
    folder = world.pack.parent / where
    folder.mkdir(exist_ok=True)
    for name in ("json", "profiles", "argparse"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')\n")
    script = Path(os.path.relpath(inner, folder))
    ran, _ = run_command(
        world, "--profile", "v1.0.0", "--dry-run", script=script, cwd=folder, path=[world.site]
    )
    assert (ran.code, ran.err) == (0, "")


def piped(world: World, shell: str) -> Ran:
    """Run the command under a shell line in which "$@" stands for it."""
    words = [sys.executable, str(install_command(world)), "--profile", "v1.0.0"]
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *words, "--site-packages", str(world.site)],
        capture_output=True,
        text=True,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("more", ["", "--json", "--diff"])
def test_nobody_has_to_listen_to_the_end(world: World, more: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, str(install_command(world)), "--profile", "v1.0.0"]
    done = subprocess.run(
        [*words, *more.split(), "--site-packages", str(world.site)],
        stdout=write_end,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")
    applied = "# fix:" in (world.site / ENGINE_PY).read_text()
    assert applied == (more != "--diff")


def test_standard_output_may_be_closed(world: World) -> None:
    ran = piped(world, '"$@" >&-')
    assert (ran.code, ran.err) == (0, "")
    assert "# fix:" in (world.site / ENGINE_PY).read_text()


def test_folders_may_have_names_that_are_no_text(world: World) -> None:
    odd = Path(os.fsdecode(os.fsencode(world.site.parent) + b"/s\xffite"))
    world.site.rename(odd)
    words = [sys.executable, str(install_command(world)), "--profile", "v1.0.0"]
    done = subprocess.run(
        [*words, "--site-packages", str(odd)],
        env={**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"s\xffite/vllm\n" in done.stdout
    again = world.run("--site-packages", str(odd), "--json", site=False)
    assert json.loads(again.out)["counts"]["unchanged"] == 3


# Results that programs go by ---------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--bogus",), ("--status", "--revert"), ("--lock-timeout", "x")])
def test_words_that_are_not_understood_are_a_document_too(
    world: World, words: tuple[str, ...]
) -> None:
    ran = world.run("--json", *words)
    document = json.loads(ran.out)
    assert (ran.code, document["exit_code"], document["error"]["kind"]) == (2, 2, "UsageError")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    ("words", "code"),
    [((), 0), (("--json",), 0), (("--overlay", "OVERLAYS"), 4), (("--dry-run",), 4)],
)
def test_output_that_cannot_be_written(world: World, words: tuple[str, ...], code: int) -> None:
    """Packages that were rewritten are; the line of an overlay that nobody gets is of no use."""
    overlays = str(world.site.with_name("overlays"))
    argv = [overlays if word == "OVERLAYS" else word for word in words]
    program = install_command(world)
    command = [sys.executable, str(program), "--profile", "v1.0.0", "--site-packages", world.site]
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*map(str, command), *argv], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, b"No space left" in done.stderr) == (code, True), done.stderr


def test_a_python_that_is_too_old_is_told_so(world: World) -> None:
    program = install_command(world)
    text = program.read_text().replace("< (3, 10)", "< (9,)")
    program.write_text(text)
    done = subprocess.run([sys.executable, program, "--list"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "run the pack with the interpreter that runs vllm" in done.stderr


def test_a_folder_without_a_name_is_not_the_present_one(world: World) -> None:
    """What an unset variable of a script leaves."""
    ran = world.run("--site-packages", "", site=False)
    assert ran.code == 2
    assert "'' is no folder" in ran.err


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_optimised_python_applies_too(world: World, flag: str) -> None:
    """PYTHONOPTIMIZE=2 in an image: no module has its docstring then."""
    program = install_command(world)
    words = ["--profile", "v1.0.0", "--site-packages", str(world.site), "delta"]
    done = subprocess.run([sys.executable, flag, program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert world.run("delta").last == "applied=0 unchanged=4 files=0 profile=v1.0.0"

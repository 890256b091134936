"""The plugin of the two-sided tests, on a small pack with packages of a few lines."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support import environments
from tests.support.trees import TreeError, Trees

REPOSITORY = Path(__file__).resolve().parents[2]
BUGGY, REPAIRED = "return words[1]", "return words[0]"
APPLIER = f"""\
import argparse, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("fixes", nargs="*")
for option in ("--profile", "--site-packages", "--package"):
    parser.add_argument(option)
options = parser.parse_args()
file = pathlib.Path(options.site_packages, "vllm", "__init__.py")
text = file.read_text().replace({BUGGY!r}, {REPAIRED!r}) + f"applied = {{vars(options)}}\\n"
new = file.with_suffix(".new")
new.write_text(text)
os.replace(new, file)
"""
PROFILE = """\
release = "{release}"
[packages.vllm]
distribution = "vllm"
version = "{version}"
commit = "0123456789012345678901234567890123456789"
sdist-sha256 = "00"
[packages.vllm_gaudi]
distribution = "vllm-gaudi"
version = "{version}"
commit = "0123456"
repository = "{nowhere}"
branch = "releases/{release}"
[[fix]]
id = "first-word"
[[fix]]
id = "extra"
opt-in = true
[[fix]]
id = "planned"
opt-in = true
"""


@dataclass
class Result:
    """What a run of pytest on the small pack gave."""

    code: int
    output: str
    outcomes: dict[str, str]
    messages: dict[str, str]
    tests: list[dict[str, Any]]


@dataclass
class SmallPack:
    """A checkout of a pack with one fix, two releases, and vllm_gaudi for the first one only."""

    root: Path

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "GAUDI_FIX"))}
        return kept | {
            "PYTHONPATH": str(REPOSITORY),
            "GAUDI_FIX_PACK_CACHE": str(self.root / "cache"),
            "GAUDI_FIX_PACK_VLLM_V1": str(self.root / "upstream"),
            "GAUDI_FIX_PACK_VLLM_V2": str(self.root / "upstream"),
            "GAUDI_FIX_PACK_VLLM_GAUDI_V1": str(self.root / "upstream"),
            "NO_COLOR": "1",
            **variables,
        }

    def run(self, *arguments: str, **variables: str) -> Result:
        results = self.root / "results.json"
        results.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
        xml = self.root / "results.xml"
        command += ["-c", "pyproject.toml", "--results", str(results), f"--junitxml={xml}"]
        done = subprocess.run(
            [*command, *arguments],
            cwd=self.root,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        tests = json.loads(results.read_text())["tests"] if results.exists() else []
        outcomes = {each["test"].partition("::")[2]: each["outcome"] for each in tests}
        messages = {
            case.attrib["name"]: "".join(f"{each.attrib['message']}\n{each.text}" for each in case)
            for case in ElementTree.parse(xml).iter("testcase")
        }
        return Result(done.returncode, done.stdout, outcomes, messages, tests)


@pytest.fixture
def small(tmp_path: Path) -> SmallPack:
    return make_pack(tmp_path / "pack")


def make_pack(root: Path) -> SmallPack:
    pack = SmallPack(root)
    pack.write("upstream/pyproject.toml", '[project]\nname = "both"\n')
    pack.write("upstream/vllm/__init__.py", f"def first(words):\n    {BUGGY}\n")
    pack.write("upstream/vllm_gaudi/__init__.py", "from vllm import first\n")
    for release in ("v1", "v2"):
        text = PROFILE.format(release=release, version=release[1:], nowhere=root / "nowhere")
        pack.write(f"profiles/{release}.toml", text)
    pack.write("profiles/unwritten.toml", 'fixes = ["planned"]\n')
    pack.write("fixes/apply_all.py", APPLIER)
    pack.write("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '--strict-markers'\n")
    pack.write("tests/conftest.py", "pytest_plugins = ('tests.support.twosided',)\n")
    return pack


# -- verdicts --------------------------------------------------------------------------------------


def test_red_and_neighbour_on_both_sides_of_both_releases(small: SmallPack) -> None:
    small.write(
        "tests/fixes/test_first_word.py",
        """\
        import pytest

        @pytest.mark.red("IndexError: list index")
        def test_red():
            import vllm
            assert vllm.first(["a"]) == "a"

        def test_neighbour():
            import vllm
            assert vllm.first(["a", "a"]) == "a"
        """,
    )
    result = small.run()
    assert result.code == 0, result.output
    names = [f"test_{t}[{r}-{s}]" for r in ("v1", "v2") for s in ("stock", "fixed")
             for t in ("red", "neighbour")]  # fmt: skip
    assert result.outcomes == dict.fromkeys(names, "passed")
    assert "ran on real vllm: 8, on real vllm-gaudi: 0" in result.output
    assert {(t["fix"], t["level"]) for t in result.tests} == {("first-word", "class")}
    assert [t["red"] for t in result.tests] == [True, False] * 4


# One run of pytest for all of them; below, what each gives on stock and on fixed, and what is said.
VERDICTS = """\
import sys
import pytest


@pytest.mark.red("IndexError")
def test_red_that_passes_on_stock():
    import vllm


@pytest.mark.red("IndexError: list index")
def test_red_for_another_reason():
    raise KeyError("other")


@pytest.mark.red("IndexError")
def test_pattern_in_the_source_line_only():
    import vllm
    assert vllm.applied, "no" or IndexError


@pytest.mark.red("IndexError")
def test_red_that_the_fix_does_not_repair():
    raise IndexError("always")


def test_neighbour_that_fails_on_stock():
    import vllm
    vllm.first(["a"])


def test_neighbour_that_the_fix_breaks():
    import vllm
    assert not hasattr(vllm, "applied")


@pytest.mark.red("IndexError")
def test_message_of_the_cause():
    import vllm
    try:
        vllm.first(["a"])
    except IndexError as error:
        raise RuntimeError("dead") from error


@pytest.mark.red("from a worker", output=True)
def test_message_in_the_output():
    import os, vllm
    os.system("echo from a worker")
    vllm.first(["a"])


@pytest.mark.red("from a worker")
def test_output_counts_only_when_asked_for():
    import os, vllm
    os.system("echo from a worker")
    vllm.first(["a"])


@pytest.mark.red("(?s)^AssertionError: assert .* != 'start'.* 499,.* 'end'", release="v1")
def test_long_message():
    import vllm
    if not hasattr(vllm, "applied"):
        assert [*range(500), "end"] == [*range(500), "start"]


@pytest.fixture
def broken():
    raise OSError("no engine")


@pytest.mark.red("IndexError")
def test_error_in_a_fixture(broken):
    pass


@pytest.fixture
def leaks():
    yield
    raise OSError("left over")


def test_error_in_a_teardown(leaks):
    pass


@pytest.fixture
def dies():
    import vllm
    vllm.first(["a"])


@pytest.mark.red("IndexError")
def test_defect_in_a_fixture(dies):
    pass


@pytest.fixture
def dies_late():
    yield
    import vllm
    vllm.first(["a"])


@pytest.mark.red("IndexError")
def test_defect_in_a_teardown(dies_late):
    pass


@pytest.mark.red("No module named")
def test_imports_what_the_fix_adds():
    import vllm
    if not hasattr(vllm, "applied"):
        import vllm.gaudi_fix_words


@pytest.mark.red("not there")
def test_misses_what_the_fix_adds():
    import vllm
    try:
        hasattr(vllm, "applied") or vllm.gaudi_fix_words
    except AttributeError:
        pytest.fail("not there")


@pytest.mark.xfail
def test_xfail_hides_nothing():
    assert False


def test_skip():
    pytest.skip("not today")


@pytest.mark.skipif("sys.version_info > (3,)", reason="new")
def test_skip_mark():
    raise KeyError


@pytest.mark.red("IndexError")
def test_red_that_skips():
    pytest.skip("not today")


@pytest.mark.skipif("sys.version_info > (3,)", reason="new")
@pytest.mark.red("IndexError")
def test_red_with_a_skip_mark():
    raise IndexError


@pytest.mark.red("IndexError", release="v2")
def test_skip_where_it_is_not_red():
    pytest.skip("not today")
"""
OTHER = "but not with 'IndexError"
CASES = {
    "red_that_passes_on_stock": ("failed", "passed", "it does not show the defect"),
    "red_for_another_reason": ("failed", "failed", OTHER),
    "pattern_in_the_source_line_only": ("failed", "passed", OTHER),
    "red_that_the_fix_does_not_repair": ("passed", "failed", "must pass on the fixed packages"),
    "neighbour_that_fails_on_stock": ("failed", "passed", "must pass on the stock packages"),
    "neighbour_that_the_fix_breaks": ("passed", "failed", "must pass on the fixed packages"),
    "message_of_the_cause": ("passed", "passed", ""),
    "message_in_the_output": ("passed", "passed", ""),
    "output_counts_only_when_asked_for": ("failed", "passed", "but not with 'from a worker'"),
    "long_message": ("passed", "passed", ""),
    "error_in_a_fixture": ("failed", "failed", "in its setup"),
    "error_in_a_teardown": ("failed", "failed", "left over"),
    "defect_in_a_fixture": ("failed", "passed", "in its setup, not in the test itself"),
    "defect_in_a_teardown": ("failed", "passed", "in its teardown, not in the test itself"),
    "imports_what_the_fix_adds": ("failed", "passed", "gaudi_fix_ module"),
    "misses_what_the_fix_adds": ("failed", "passed", "gaudi_fix_ module"),
    "xfail_hides_nothing": ("failed", "failed", "xfail: use red"),
    "skip": ("skipped", "skipped", "not today"),
    "skip_mark": ("skipped", "skipped", "new"),
    "red_that_skips": (
        "failed",
        "failed",
        "skips (not today): a red test that skips shows nothing",
    ),
    "red_with_a_skip_mark": ("failed", "failed", "skips (new): a red test"),
    "skip_where_it_is_not_red": ("skipped", "skipped", "not today"),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Result:
    small = make_pack(tmp_path_factory.mktemp("verdicts") / "pack")
    small.write("tests/fixes/test_first_word.py", VERDICTS)
    return small.run("-k", "v1")


@pytest.mark.parametrize("name", CASES)
def test_verdict(verdicts: Result, name: str) -> None:
    stock, fixed, message = CASES[name]
    names = [f"test_{name}[v1-{state}]" for state in ("stock", "fixed")]
    assert [verdicts.outcomes[each] for each in names] == [stock, fixed]
    assert message in "".join(verdicts.messages.get(each, "") for each in names)


def test_all_cases_ran(verdicts: Result) -> None:
    assert (verdicts.code, len(verdicts.outcomes)) == (1, 2 * len(CASES))


@pytest.mark.parametrize(
    ("death", "message"),
    [
        ("os._exit(0)", "ended without a report"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("time.sleep(600)", "took longer than 3 s"),
    ],
)
def test_a_child_that_dies_fails_all_its_tests(small: SmallPack, death: str, message: str) -> None:
    small.write(
        "tests/fixes/test_first_word.py",
        f"""\
        import os, time, pytest

        def test_a():
            pass

        @pytest.mark.red("never seen")
        def test_b():
            {death}
        """,
    )
    result = small.run("-k", "v1-stock", GAUDI_FIX_PACK_CHILD_TIMEOUT="3")
    assert set(result.outcomes.values()) == {"failed"}
    assert message in result.output
    assert "test_first_word.py::test_b; the end of its output" in result.output


def test_a_module_that_only_the_child_cannot_import(small: SmallPack) -> None:
    text = "import os\nif 'GAUDI_FIX_PACK_CHILD' in os.environ:\n    import nothing\n"
    small.write("tests/fixes/test_first_word.py", text + "def test_x(): pass\n")
    result = small.run("-k", "v1-stock")
    assert result.outcomes == {"test_x[v1-stock]": "failed"}
    assert "No module named 'nothing'" in result.output


def test_workers_left_behind_are_killed(small: SmallPack) -> None:
    small.write(
        "tests/fixes/test_first_word.py",
        """\
        import subprocess, pathlib

        def test_x():
            worker = subprocess.Popen(["sleep", "600"])
            pathlib.Path("pid").write_text(str(worker.pid))
        """,
    )
    assert small.run("-k", "v1-stock").code == 0
    assert not alive((small.root / "pid").read_text())


def alive(pid: str) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether a condition becomes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def test_children_end_with_a_parent_that_is_killed(small: SmallPack) -> None:
    small.write(
        "tests/fixes/test_first_word.py",
        """\
        import os, pathlib, time

        def test_x():
            pathlib.Path("pid").write_text(str(os.getpid()))
            time.sleep(600)
        """,
    )
    command = [sys.executable, "-m", "pytest", "-k", "v1-stock"]
    parent = subprocess.Popen(command, cwd=small.root, env=small.environment())
    file = small.root / "pid"
    assert wait_until(lambda: file.exists() and file.read_text() != "")
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not alive(file.read_text()))


def test_packages_from_elsewhere_are_noticed(small: SmallPack) -> None:
    other = small.write("other/vllm/__init__.py", "")
    small.write(
        "tests/fixes/test_first_word.py",
        f"""\
        import sys

        def test_x():
            sys.path.insert(0, {str(other.parents[1])!r})
            import vllm
        """,
    )
    result = small.run("-k", "v1-stock")
    assert result.outcomes == {"test_x[v1-stock]": "failed"}
    assert f"vllm is not the one under test: it was imported from {other}" in result.output


# -- selection and collection ----------------------------------------------------------------------


def test_parametrised_tests_classes_and_node_ids(small: SmallPack) -> None:
    small.write(
        "tests/fixes/test_first_word_more.py",
        """\
        import pytest

        class TestGroup:
            @pytest.mark.parametrize("word", ["a", "b"])
            def test_x(self, word, release, state, tree):
                assert (tree / "vllm").is_dir() and release in tree.name and state in tree.name
                assert word == "a"
        """,
    )
    name = "TestGroup.test_x[v1-fixed-a]"
    result = small.run(f"tests/fixes/test_first_word_more.py::{name}")
    assert (result.code, result.outcomes) == (0, {name: "passed"}), result.output
    result = small.run("-k", "v2")
    assert result.outcomes["TestGroup.test_x[v2-stock-b]"] == "failed"
    assert len(result.outcomes) == 4


def test_marks_for_one_release(small: SmallPack) -> None:
    small.write(
        "tests/fixes/test_first_word.py",
        """\
        import pytest

        @pytest.mark.only("v2")
        @pytest.mark.level("definition")
        def test_only():
            pass

        @pytest.mark.red("KeyError", release="v1")
        @pytest.mark.red("IndexError", release="v2")
        def test_each(release):
            import vllm
            try:
                vllm.first(["a"])
            except IndexError:
                if release == "v2":
                    raise
                raise KeyError("another shape") from None
        """,
    )
    result = small.run()
    assert result.code == 0, result.output
    assert len(result.outcomes) == 2 + 4
    assert {t["level"] for t in result.tests if "test_only" in t["test"]} == {"definition"}


def test_a_test_file_of_no_fix_is_an_error(small: SmallPack) -> None:
    small.write("tests/fixes/test_frist_word.py", "def test_x(): pass\n")
    result = small.run()
    assert result.code == 2
    assert "no profile lists a fix of that name" in result.output


# What a mark says, and what is said of it.
BAD_MARKS = {
    "red": "one pattern",
    "red()": "one pattern",
    "red(pattern='IndexError')": "one pattern",
    "red('IndexError', 'v1')": "one pattern",
    "red(7)": "one pattern",
    "red('(')": "no regular expression: missing ), unterminated subpattern",
    "red('')": "it fits any failure",
    "red('.')": "it fits any failure",
    "red('x')": "it fits any failure",
    "red('...')": "it fits any failure",
    "red('IndexError|')": "it fits any failure",
    "red('IndexError', releases='v1')": "releases= is unknown",
    "red('IndexError', release='v0.26')": "'v0.26' is no release of first-word",
    "red('IndexError', release=None)": "None is no release of first-word",
    "red('IndexError', output='yes')": "output= is True or False",
    "level('engin')": "one of text, definition, class, engine",
    "level()": "one of text, definition, class, engine",
    "needs()": "at least one of torch, engine, vllm_gaudi",
    "needs('gpu')": "at least one of torch, engine, vllm_gaudi",
    "needs(['torch'])": "at least one of torch, engine, vllm_gaudi",
    "needs(what='torch')": "what= is unknown",
    "only()": "at least one of v1, v2",
    "only('v0.26')": "at least one of v1, v2",
    "only('v1', 'v0.26')": "at least one of v1, v2",
}


def test_a_mark_that_says_nothing_is_an_error(small: SmallPack) -> None:
    tests = [
        f"@pytest.mark.{mark}\ndef test_{number}(): pass\n" for number, mark in enumerate(BAD_MARKS)
    ]
    small.write("tests/fixes/test_first_word.py", "import pytest\n" + "\n".join(tests))
    result = small.run()
    assert result.code == 2
    for number, (mark, message) in enumerate(BAD_MARKS.items()):
        shown = mark if "(" in mark else f"{mark}()"
        start = f"test_{number}: @pytest.mark.{shown}: "
        assert message in "\n".join(s for s in result.output.splitlines() if start in s), mark


def test_red_belongs_to_the_tests_of_a_fix(small: SmallPack) -> None:
    small.write(
        "tests/test_other.py",
        """\
        import pytest

        @pytest.mark.red("IndexError")
        def test_x():
            pass
        """,
    )
    result = small.run()
    assert result.code == 2
    assert "test_x: @pytest.mark.red('IndexError'): only a test of a fix" in result.output


def test_a_file_that_skips_as_a_whole_is_an_error(small: SmallPack) -> None:
    """Its red tests would be in the table of proof, and show nothing."""
    text = "import pytest\npytest.importorskip('nothing')\ndef test_x(): pass\n"
    small.write("tests/fixes/test_first_word.py", text)
    result = small.run()
    assert result.code == 2
    assert "a test file of a fix must not skip as a whole: could not import 'noth" in result.output


def test_collecting_only_starts_nothing(small: SmallPack) -> None:
    small.write("tests/fixes/test_first_word.py", "def test_x(): pass\n")
    result = small.run("--collect-only")
    assert "test_x[v2-fixed]" in result.output
    assert not (small.root / "cache").exists()


def test_ordinary_tests_stay_here_and_those_with_needs_run_on_stock(small: SmallPack) -> None:
    small.write(
        "tests/test_other.py",
        """\
        import os, pytest

        def test_here():
            assert "GAUDI_FIX_PACK_CHILD" not in os.environ

        @pytest.mark.needs("vllm_gaudi")
        def test_there(state):
            import vllm_gaudi
            assert state == "stock"

        def test_on_a_tree(trees):
            assert trees.stock("v1").path.is_dir()
        """,
    )
    result = small.run()
    assert result.code == 0, result.output
    assert result.outcomes == {"test_there[v1-stock]": "passed", "test_there[v2-stock]": "skipped"}
    assert "test_other.py::test_here PASSED" in result.output
    assert "ran on real vllm: 2, on real vllm-gaudi: 2" in result.output


# -- what is not at hand ---------------------------------------------------------------------------


def test_only_tests_that_import_an_absent_package_skip(small: SmallPack) -> None:
    small.write(
        "tests/fixes/test_first_word.py",
        """\
        import pytest

        def test_with_the_plugin():
            import vllm_gaudi

        @pytest.mark.red("IndexError")
        def test_red_with_the_plugin():
            import vllm_gaudi
            vllm_gaudi.first(["a"])

        def test_without():
            import vllm
        """,
    )
    result = small.run()
    assert result.code == 0, result.output
    skipped = {name for name, outcome in result.outcomes.items() if outcome == "skipped"}
    assert skipped == {
        f"test_{name}[v2-{state}]"
        for name in ("with_the_plugin", "red_with_the_plugin")
        for state in ("stock", "fixed")
    }
    assert "skipped: 4" in result.output
    assert "4 vllm_gaudi of v2 is not at hand: commit 0123456 of" in result.output


def test_without_torch_tests_that_need_it_skip(small: SmallPack) -> None:
    marks = "import pytest\npytestmark = [pytest.mark.needs('torch'), pytest.mark.red('Index')]\n"
    small.write("tests/fixes/test_first_word.py", marks + "def test_x(): pass\n")
    result = small.run(GAUDI_FIX_PACK_ENGINE_PYTHON="/nowhere/python")
    assert set(result.outcomes.values()) == {"skipped"}
    assert "4 /nowhere/python cannot be started" in result.output


def test_what_must_run_is_not_skipped(small: SmallPack) -> None:
    small.write(
        "tests/fixes/test_first_word.py",
        """\
        import pytest

        @pytest.mark.needs("torch")
        def test_heavy():
            pass

        def test_with_the_plugin():
            import vllm_gaudi
        """,
    )
    variables = {"GAUDI_FIX_PACK_ENGINE_PYTHON": "/nowhere/python"}
    result = small.run(**variables, GAUDI_FIX_PACK_MUST_RUN="v2")
    assert result.code == 1, result.output
    assert result.outcomes == {
        f"test_{test}[{release}-{state}]": outcome
        for test, release, outcome in (
            ("heavy", "v1", "skipped"),
            ("heavy", "v2", "failed"),
            ("with_the_plugin", "v1", "passed"),
            ("with_the_plugin", "v2", "failed"),
        )
        for state in ("stock", "fixed")
    }
    told = "v2 must run here (GAUDI_FIX_PACK_MUST_RUN), and could not: vllm_gaudi of v2 is not at"
    assert told in result.output


def test_a_release_that_must_run_exists(small: SmallPack) -> None:
    small.write("tests/fixes/test_first_word.py", "def test_x():\n    import vllm\n")
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml"]
    environment = small.environment(GAUDI_FIX_PACK_MUST_RUN="v1 v3")
    done = subprocess.run(command, cwd=small.root, env=environment, capture_output=True, text=True)
    assert done.returncode == 4
    assert "GAUDI_FIX_PACK_MUST_RUN: no release v3; releases: v1, v2" in done.stderr


def test_every_skip_is_counted(small: SmallPack) -> None:
    text = """\
        import pytest
        from tests.support import absence

        def test_ordinary(trees):
            absence.skip("not at hand", "v1")

        @pytest.mark.skip(reason="on a mark")
        def test_marked():
            pass
        """
    small.write("tests/test_other.py", text)
    result = small.run()
    assert result.code == 0, result.output
    assert "skipped: 2" in result.output
    assert "1 not at hand" in result.output
    assert "1 on a mark" in result.output
    assert small.run(GAUDI_FIX_PACK_MUST_RUN="v1").code == 1


def test_which_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GAUDI_FIX_PACK_ENGINE_PYTHON", "GAUDI_FIX_PACK_NO_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environments, "_absent", lambda python: ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    heavy = frozenset({"torch"})

    def chosen() -> str:
        return environments.interpreter(heavy, tmp_path)

    assert environments.interpreter(frozenset(), tmp_path) == sys.executable
    with pytest.raises(environments.NoInterpreter, match="ci/run"):
        chosen()
    python = tmp_path / "engine-venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(environments.NoInterpreter, match="ci/run"):  # not complete yet
        chosen()
    (tmp_path / "engine-venv" / "requirements.sha256").touch()
    assert chosen() == str(python)
    monkeypatch.setenv("GAUDI_FIX_PACK_ENGINE_PYTHON", "/own")
    assert chosen() == "/own"
    monkeypatch.setenv("GAUDI_FIX_PACK_NO_ENGINE", "not today")
    with pytest.raises(environments.NoInterpreter, match="not today"):
        chosen()


# -- trees -----------------------------------------------------------------------------------------


@pytest.fixture
def small_trees(small: SmallPack, monkeypatch: pytest.MonkeyPatch) -> Trees:
    for name, value in small.environment().items():
        if name.startswith("GAUDI_FIX_PACK_"):
            monkeypatch.setenv(name, value)
    return Trees(small.root)


def test_the_fixed_tree_is_made_by_the_applier_with_all_written_opt_ins(small_trees: Trees) -> None:
    stock = small_trees.stock("v1").path / "vllm" / "__init__.py"
    before = stock.read_bytes()
    fixed = small_trees.fixed("v1").path / "vllm" / "__init__.py"
    text = fixed.read_text()
    assert REPAIRED in text
    assert "'fixes': ['extra'], 'profile': 'v1'" in text
    assert "'package': None" in text
    assert "'package': 'vllm'" in (small_trees.fixed("v2").path / "vllm/__init__.py").read_text()
    assert stock.read_bytes() == before


def test_trees_are_kept_until_something_changes(small: SmallPack, small_trees: Trees) -> None:
    def paths() -> tuple[Path, Path]:
        fresh = Trees(small.root)
        return fresh.stock("v1").path, fresh.fixed("v1").path

    stock, fixed = first = paths()
    assert paths() == first
    small.write("fixes/first_word.py", "# another fix")
    again = paths()
    assert again[0] == stock
    assert again[1] != fixed
    small.write("upstream/vllm/new.py", "")
    assert paths()[0] != stock
    assert (paths()[0] / "vllm/new.py").is_file()


def test_a_tree_that_was_cut_off_is_made_again(small: SmallPack, small_trees: Trees) -> None:
    path = small_trees.fixed("v1").path
    path.with_name(path.name + ".made").unlink()
    (path / "vllm" / "half").touch()
    again = Trees(small.root).fixed("v1").path
    assert again == path
    assert not (path / "vllm" / "half").exists()


def test_an_applier_that_fails_fails_the_tests_with_its_words(small: SmallPack) -> None:
    small.write("fixes/apply_all.py", "raise SystemExit('does not fit')")
    small.write("tests/fixes/test_first_word.py", "def test_x():\n    import vllm\n")
    result = small.run("-k", "v1")
    assert result.outcomes == {"test_x[v1-stock]": "passed", "test_x[v1-fixed]": "failed"}
    assert "does not fit" in result.output


def test_a_release_whose_vllm_cannot_be_had_is_an_error(
    small_trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAUDI_FIX_PACK_VLLM_V1", "/nowhere")
    with pytest.raises(TreeError, match="packages of v1 cannot be had"):
        small_trees.stock("v1")


def test_a_copy_is_ones_own(small_trees: Trees, tmp_path: Path) -> None:
    own = small_trees.copy("v1", tmp_path / "own")
    (own / "vllm" / "__init__.py").write_text("mine")
    assert BUGGY in (small_trees.stock("v1").path / "vllm" / "__init__.py").read_text()

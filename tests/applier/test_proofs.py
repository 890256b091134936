"""The table of proof counts what pytest collects, no more and no less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixes.applier.errors import UsageError
from fixes.applier.pack import Pack
from fixes.authoring import finished, proofs

ROOT = Path(__file__).resolve().parents[2]
PACK = Pack(ROOT)


def test_the_table_has_the_tests_that_pytest_collects() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.collected"]
    command += ["-p", "no:cacheprovider", "--collect-only", "-q", "tests/fixes"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    (line,) = [s for s in done.stdout.splitlines() if s.startswith("COLLECTED ")] or [done.stdout]
    collected = {tuple(each) for each in json.loads(line.removeprefix("COLLECTED "))}
    table = {
        (proof.fix, proof.file, proof.test, proof.level, release, release in proof.red_on)
        for proof in proofs.collect(PACK)
        for release in proof.releases
    }
    assert table == collected


def test_every_written_fix_is_shown_on_every_release_it_is_for() -> None:
    """At least one test that is red on that release's stock packages."""
    assert finished.without_red_test(PACK) == []


def test_marks_wherever_they_stand(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "fixes"
    folder.mkdir(parents=True)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    (folder / "test_bad_words_index_more.py").write_text(
        """\
import pytest

pytestmark = [pytest.mark.needs("engine"), pytest.mark.only("v0.30.0")]
level = pytest.mark.level("text")

@level
def test_named_mark(): ...

@pytest.mark.red("x", release="v0.26.0")
@pytest.mark.only("v0.26.0", "v0.30.0")
class TestThese:
    def test_inner(self): ...

    @pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.red("y"))])
    def test_parameter(self, a): ...

def helper(): ...
"""
    )
    (folder / "test_no_fix.py").write_text("def test_x(): ...\n")
    found = {p.test: (p.fix, p.level, p.releases, p.red_on) for p in proofs.collect(Pack(tmp_path))}
    both = ("v0.26.0", "v0.30.0")
    assert found == {
        "test_named_mark": ("bad-words-index", "text", ("v0.30.0",), frozenset()),
        "TestThese.test_inner": ("bad-words-index", "engine", both, frozenset({"v0.26.0"})),
        "TestThese.test_parameter": ("bad-words-index", "engine", both, frozenset(both)),
    }


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('only("v0.26")', "test_x: only() takes releases of bad-words-index, not v0.26;"),
        ("only(NAMED)", "test_x: only() takes releases of bad-words-index, not NAMED"),
        ("only()", "test_x: only() takes releases of bad-words-index: at least one"),
        ('red("x", release="v0.26")', "red() takes releases of bad-words-index, not v0.26;"),
        ('red("x", release=NAMED)', "red() takes releases of bad-words-index, not NAMED"),
    ],
)
def test_no_test_is_listed_on_no_release(tmp_path: Path, mark: str, message: str) -> None:
    folder = tmp_path / "tests" / "fixes"
    folder.mkdir(parents=True)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    text = f"import pytest\n@pytest.mark.{mark}\ndef test_x(): ...\n"
    (folder / "test_bad_words_index.py").write_text(text)
    with pytest.raises(UsageError) as error:
        proofs.collect(Pack(tmp_path))
    assert message in str(error.value)
    assert "v0.26.0, v0.30.0" in str(error.value)
    assert "tests/fixes/test_bad_words_index.py::test_x" in str(error.value)

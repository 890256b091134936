"""Generated pages and the places that have to agree with the code."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from fixes.applier import errors
from fixes.applier.digest import VERSION
from fixes.applier.pack import Pack
from fixes.authoring import cli, docs, finished

ROOT = Path(__file__).resolve().parents[2]
PACK = Pack(ROOT)
WRITTEN = sorted(
    {entry.id for name in PACK.profile_names for entry in PACK.profile(name).entries}
    - PACK.unwritten
)


def test_the_generated_pages_are_current() -> None:
    for path, text in docs.pages(PACK).items():
        assert path.read_text() == text, f"run `python3 fixes/dev.py docs`: {path.name} is stale"


def test_every_listed_fix_is_written_or_listed_as_unwritten() -> None:
    modules = {path.stem for path in (ROOT / "fixes").glob("*.py")}
    modules |= {path.parent.name for path in (ROOT / "fixes").glob("*/__init__.py")}
    tools = {"__init__", "apply_all", "dev", "applier", "authoring"}
    assert {name.replace("_", "-") for name in modules - tools} == set(WRITTEN)


@pytest.mark.parametrize("fix", WRITTEN)
def test_every_fix_has_all_that_a_fix_must_have(fix: str) -> None:
    assert list(finished.missing(PACK, fix)) == []


def test_the_readme_documents_every_exit_code() -> None:
    text = (ROOT / "README.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d) \|", text, re.M)}
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert documented == {0, *(c.exit_code for c in classes if issubclass(c, errors.PackError))}


def test_the_help_for_authors_documents_every_exit_code_it_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(str(ROOT), ["--help"])
    documented = set(re.findall(r"^  (\d)  \S", capsys.readouterr().out, re.M))
    assert documented == set("012346")  # 5 is the lock of an installation


def test_pages_that_cannot_be_written_are_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(*_args: object, **_more: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", read_only)
    assert cli.main(str(ROOT), ["docs"]) == 4
    said = capsys.readouterr().err
    assert "docs/fixes.md: Read-only file system; use a checkout of your own" in said


def test_the_version_is_said_once() -> None:
    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    assert found.group(1) == VERSION

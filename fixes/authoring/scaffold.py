"""Start a new fix: its module, its test and its lines in the profiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fixes.applier.errors import UsageError
from fixes.applier.pack import Pack

_MODULE = '''"""{id}: what it repairs, in one line.

What a user sees without it.

Why: the mechanism, by upstream's names.

What is changed: the rewrite of each site.

Reference: the upstream issue or pull request. Releases: which, and whether the code is the same.

Other places with the pattern: changed or left, and why.
"""

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="write me",
    symptom="write me",
    references=(),
    drop_when="write me",
)


@site("{file}", "{definition}")
def {function}(code: Definition) -> None:
    code.insert_first("pass")  # write me
'''

_TEST = '''"""{id}: red on stock, green on fixed."""

import pytest


@pytest.mark.needs("torch")
@pytest.mark.red(r"write me")
def test_the_defect() -> None:
    """Runs on stock and on fixed packages: import the real code in here, not above."""
    pytest.fail("write me")
'''


def new_fix(
    pack: Pack, fix_id: str, profiles: Sequence[str], file: str, definition: str, *, opt_in: bool
) -> list[Path]:
    """Start a fix: its module, its test and its lines in the profiles. Returns what was written.

    Raises :class:`UsageError` when the fix exists or its name is none.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", fix_id):
        raise UsageError(f"{fix_id!r} is no fix id: lower-case words joined by dashes")
    name = fix_id.replace("-", "_")
    module = pack.root / "fixes" / f"{name}.py"
    test = pack.root / "tests" / "fixes" / f"test_{name}.py"
    for path in (module, test, module.with_suffix("")):
        if path.exists():
            raise UsageError(f"{path} exists")
    words = {"id": fix_id, "file": file, "definition": definition}
    function = definition.rpartition(".")[2].strip("_") or "rewrite"
    written = [module, test]
    loaded = [pack.profile(profile) for profile in profiles]
    module.write_text(_MODULE.format(**words, function=function), encoding="utf-8")
    test.parent.mkdir(parents=True, exist_ok=True)
    test.write_text(_TEST.format(**words), encoding="utf-8")
    for profile in loaded:
        if profile.entry(fix_id) is None:
            path = pack.root / "profiles" / f"{profile.name}.toml"
            lines = f'\n[[fix]]\nid = "{fix_id}"\n' + ("opt-in = true\n" if opt_in else "")
            path.write_text(path.read_text("utf-8").rstrip("\n") + "\n" + lines, encoding="utf-8")
            written.append(path)
    unwritten = pack.root / "profiles" / "unwritten.toml"
    text = unwritten.read_text(encoding="utf-8")
    if fix_id in pack.unwritten:
        line = re.compile(rf'\s*"{re.escape(fix_id)}"\s*,?')
        unwritten.write_text(line.sub("", text), encoding="utf-8")
        written.append(unwritten)
    return written

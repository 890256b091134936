"""Start a new fix: its module, its test and its lines in the profiles."""

from __future__ import annotations

import ast
import keyword
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fixes.applier.edits import Definition, rewrite
from fixes.applier.errors import PackError, UsageError
from fixes.applier.pack import Pack
from fixes.applier.profiles import check_path

# What has one of these words in it is not written yet.
PLACEHOLDER = re.compile(r"\bTODO\b|\bwrite me\b")

_LONGEST_ID = 80  # file systems take names of 255 bytes, with `test_` and endings

_MODULE = '''"""{id}: TODO what it repairs, in one line.

TODO What a user sees without it.

Why: TODO the mechanism, by upstream's names.

What is changed: TODO the rewrite of each site.

Reference: TODO the upstream issue or pull request. Releases: which, and whether the code is the
same.

Other places with the pattern: TODO changed or left, and why.
"""

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="write me",
    symptom="write me",
    references=(),
    drop_when="write me",
)
'''

_SITE = """

@site({file}, {definition})
def {function}(code: Definition) -> None:
    {edit}
"""

_TEST = '''"""{id}: red on stock, green on fixed."""

import pytest


@pytest.mark.needs("torch")
@pytest.mark.red(r"write me")
def test_the_defect() -> None:
    """Runs on stock and on fixed packages: import the real code in here, not above."""
    pytest.fail("write me")
'''


@dataclass(frozen=True)
class _Edit:
    """What the codemod of a new fix does, to be run and to be written."""

    method: str
    arguments: tuple[str, ...]

    def __call__(self, code: Definition) -> None:
        getattr(code, self.method)(*self.arguments)

    def __str__(self) -> str:
        return f"code.{self.method}({', '.join(map(_quoted, self.arguments))})  # write me"


_IN_A_BODY = _Edit("insert_first", ("pass",))


@dataclass(frozen=True)
class Start:
    """A definition that a new fix rewrites, with the line its codemod starts as."""

    file: str
    definition: str
    edit: _Edit = _IN_A_BODY

    @classmethod
    def of(cls, word: str) -> Start:
        """What ``--site`` names; :class:`UsageError` when that cannot be a definition."""
        file, _, definition = word.partition("::")
        like = "give FILE::DEFINITION, as in vllm/x.py::Class.method"
        if not definition:
            raise UsageError(f"--site {word}: {like}")
        try:
            check_path(file)
        except ValueError as error:
            raise UsageError(f"--site {word}: {error}; {like}") from None
        if not file.endswith(".py"):
            raise UsageError(f"--site {word}: {file} is no Python file; {like}")
        return cls(file, definition)

    def on(self, text: str) -> Start:
        """The same with an edit that this text of the definition takes."""
        label = f"{self.file}::{self.definition}"
        for edit in (_IN_A_BODY, *islice(_of_expressions(text), 10)):
            try:
                rewrite(text, label, [("new", edit)], read_back=True)
            except PackError:
                continue
            return Start(self.file, self.definition, edit)
        raise UsageError(
            f"{label}: there is neither a body of lines in it to insert into nor an expression to"
            " replace: start with the class or the function around it"
        )


def _of_expressions(text: str) -> Iterator[_Edit]:
    """Edits of the expressions on one line in an assignment or a one-line body, outermost first."""
    code = textwrap.dedent(text)
    try:
        (node,) = ast.parse(code).body
    except (SyntaxError, ValueError):
        return
    lines = [line.encode() for line in code.split("\n")]  # columns count bytes

    def shown(inner: ast.AST) -> str:
        if not isinstance(inner, ast.expr) or inner.lineno != inner.end_lineno:
            return ""
        return lines[inner.lineno - 1][inner.col_offset : inner.end_col_offset].decode()

    count = Counter(map(shown, ast.walk(node)))
    value = getattr(node, "value", None)
    for part in [*([value] if value else []), *getattr(node, "body", ()), node]:
        for found in map(shown, ast.walk(part)):
            if found not in ("", "...") and count[found] == 1 and len(found) <= 60:
                yield _Edit("replace_expression", (found, "TODO"))


def _quoted(text: str) -> str:
    """A string literal, with double quotes where that is as short."""
    plain = '"' not in text and "\\" not in text and text.isprintable()
    return f'"{text}"' if plain else repr(text)


def new_fix(
    pack: Pack, fix_id: str, profiles: Sequence[str], sites: Sequence[Start], *, opt_in: bool
) -> dict[Path, str]:
    """The files that start a fix: its module, its test and its lines in the profiles.

    Nothing is written. Raises :class:`UsageError` when the fix exists or its name is none.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", fix_id):
        raise UsageError(f"{fix_id!r} is no fix id: lower-case words joined by dashes")
    if len(fix_id) > _LONGEST_ID:
        raise UsageError(
            f"{fix_id[:20]}... has {len(fix_id)} letters: a fix id has {_LONGEST_ID} at most"
        )
    name = fix_id.replace("-", "_")
    module = pack.root / "fixes" / f"{name}.py"
    test = pack.root / "tests" / "fixes" / f"test_{name}.py"
    for path in (module, test, module.with_suffix("")):
        if path.exists():
            raise UsageError(f"{path} exists")
    made = {
        module: _MODULE.format(id=fix_id) + "".join(_site_functions(sites)),
        test: _TEST.format(id=fix_id),
    }
    for profile in [pack.profile(each) for each in profiles]:
        for start in sites:
            if start.file.split("/")[0] not in profile.packages:
                raise UsageError(
                    f"{start.file} is in none of the packages of {profile.name}:"
                    f" {', '.join(profile.packages)}"
                )
        if profile.entry(fix_id) is None:
            path = pack.root / "profiles" / f"{profile.name}.toml"
            lines = f'\n[[fix]]\nid = "{fix_id}"\n' + ("opt-in = true\n" if opt_in else "")
            made[path] = path.read_text("utf-8").rstrip("\n") + "\n" + lines
    unwritten = pack.root / "profiles" / "unwritten.toml"
    if fix_id in pack.unwritten:
        line = re.compile(rf'\s*"{re.escape(fix_id)}"\s*,?')
        made[unwritten] = line.sub("", unwritten.read_text(encoding="utf-8"))
    return made


def _site_functions(sites: Sequence[Start]) -> Iterator[str]:
    taken = {"site"}
    for start in sites:
        words = re.findall(r"[^\W_]+(?:_+[^\W_]+)*", start.definition)
        names = ["_".join(words[-count:]).lower() for count in range(1, len(words) + 1)]
        names += [f"rewrite_{number}" for number in range(1, len(sites) + 1)]
        function = next(
            name
            for name in names
            if name.isidentifier() and not keyword.iskeyword(name) and name not in taken
        )
        taken.add(function)
        yield _SITE.format(
            file=_quoted(start.file),
            definition=_quoted(start.definition),
            function=function,
            edit=start.edit,
        )

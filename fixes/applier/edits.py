"""Strict edits on the libcst tree of exactly one definition.

A pattern is a snippet of Python in which ``...`` stands for anything: an expression, a run of
arguments (``f(x, ...)``), a run of statements (``if x: ...``). White space, comments, redundant
parentheses and trailing commas are not compared. Each edit says how many places it expects and
raises :class:`SiteMismatch` when it finds another number: a codemod never does nothing silently.

Why not libcst's visitors and metadata: on a 400 KB file an empty visit takes longer than parsing
and printing together. Here only what an edit touches is rebuilt.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fixes.applier.errors import PackError, SiteMismatch, UsageError

if TYPE_CHECKING:
    import libcst as cst
else:

    class _OnFirstUse:
        """libcst, imported when an edit needs it: --list and --explain work on a stock image."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(importlib.import_module("libcst"), name)
            setattr(self, name, found)  # from now on without coming here
            return found

    cst = _OnFirstUse()

# A step from a node to a child: the field, and the index where the field is a sequence.
Step = tuple[str, "int | None"]
Path = tuple[Step, ...]
# The same while walking, where few paths are ever asked for: the parent's place and the step.
Place = Any

_LAYOUT = re.compile(
    "whitespace.*|trailing_whitespace|leading_lines|lines_after_decorators|header|footer|indent"
    "|newline|comma|dot|equal|semicolon|first_colon|second_colon|[lr](par|brace|bracket)"
)


# A name in one of these fields is no expression: `x` does not match in `y.x` or `f(x=1)`.
_NAMING_FIELDS = ("attr", "keyword", "name")


@cache
def _code_fields(kind: Any) -> tuple[str, ...]:
    """The fields of a node class that hold code, not layout."""
    names = (field.name for field in dataclasses.fields(kind))
    return tuple(name for name in names if not _LAYOUT.fullmatch(name))


@cache
def _is_kind(kind: Any, *bases: Any) -> bool:
    """`isinstance` of libcst's abstract classes is slow, and asked of every node."""
    return issubclass(kind, bases)


def _children(node: cst.CSTNode) -> Iterator[tuple[Step, cst.CSTNode]]:
    for name in _code_fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                yield (name, index), item
        elif _is_kind(value.__class__, cst.CSTNode):
            yield (name, None), value


def _is_anything(node: object) -> bool:
    """Is this part of a pattern `...`, bare or as an argument, element or statement of its own?"""
    if isinstance(node, cst.SimpleStatementLine):
        return len(node.body) == 1 and _is_anything(node.body[0])
    if isinstance(node, (cst.Expr, cst.Element)):
        return _is_anything(node.value)
    if isinstance(node, cst.Arg):
        return node.keyword is None and not node.star and _is_anything(node.value)
    return isinstance(node, cst.Ellipsis)


def _same_run(pattern: Sequence[Any], code: Sequence[Any]) -> bool:
    if not pattern:
        return not code
    if _is_anything(pattern[0]):
        rest = pattern[1:]
        return any(_same_run(rest, code[skip:]) for skip in range(len(code) + 1))
    return bool(code) and _same(pattern[0], code[0]) and _same_run(pattern[1:], code[1:])


def _same(pattern: Any, code: Any) -> bool:
    """Is the code what the pattern describes?"""
    kind, found = pattern.__class__, code.__class__
    if kind is cst.Ellipsis:
        return _is_kind(found, cst.BaseExpression)
    if isinstance(pattern, (tuple, list)):
        return isinstance(code, (tuple, list)) and _same_run(pattern, code)
    if _is_kind(kind, cst.BaseSuite) and _is_kind(found, cst.BaseSuite):
        return _same_run(_statements_of(pattern), _statements_of(code))
    if kind is not found:
        return False
    if _is_kind(kind, cst.CSTNode):
        return all(
            _same(getattr(pattern, name), getattr(code, name)) for name in _code_fields(kind)
        )
    return bool(pattern == code)


def _statements_of(suite: cst.BaseSuite) -> list[Any]:
    """A suite's statements; those on the header's line (`if x: y`) as if they had their own."""
    if isinstance(suite, cst.SimpleStatementSuite):
        return [cst.SimpleStatementLine([statement]) for statement in suite.body]
    return list(suite.body)


def _path_to(place: Place) -> Path:
    steps: list[Step] = []
    while place is not None:
        place, step = place
        steps.append(step)
    return tuple(reversed(steps))


def _rebuilt(node: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy of the tree in which the node at the path is changed, sharing all the rest."""
    if not path:
        return change(node)
    (name, index), rest = path[0], path[1:]
    value = getattr(node, name)
    if index is None:
        return node.with_changes(**{name: _rebuilt(value, rest, change)})
    item = _rebuilt(value[index], rest, change)
    return node.with_changes(**{name: [*value[:index], item, *value[index + 1 :]]})


class Definition:
    """The definition that a codemod is given. Edits change it in place, in the order of the calls.

    ``where`` says in messages which definition this is; ``marker`` is the comment that the pack
    puts above every statement it adds or changes.
    """

    def __init__(self, root: cst.CSTNode, where: str, marker: str, layout: Layout) -> None:
        self._root = root
        self._where = where
        self._marker = marker
        self._layout = layout
        self._closed = ""

    # What a codemod calls -----------------------------------------------------------------------

    def replace_statement(self, pattern: str, source: str, *, count: int = 1) -> None:
        """Put statements in the place of one statement, or of a run of consecutive ones.

        Comments above the first one stay.
        """

        def change(old: list[Any]) -> list[Any]:
            new = self._parsed(source)
            return [self._with_lines_above(new[0], old[0].leading_lines), *new[1:]]

        self._edit_statements(pattern, change, count)

    def insert_before(self, pattern: str, source: str, *, count: int = 1) -> None:
        """Put statements before the statement (or the run of statements) of the pattern."""
        self._edit_statements(pattern, lambda old: [*self._parsed(source), *old], count)

    def insert_after(self, pattern: str, source: str, *, count: int = 1) -> None:
        """Put statements after the statement (or the run of statements) of the pattern."""
        self._edit_statements(pattern, lambda old: [*old, *self._parsed(source)], count)

    def insert_first(self, source: str) -> None:
        """Put statements first in the body, after a docstring."""
        self._edit_body(lambda body, after: [*body[:after], *self._parsed(source), *body[after:]])

    def insert_last(self, source: str) -> None:
        """Put statements last in the body."""
        self._edit_body(lambda body, _after: [*body, *self._parsed(source)])

    def remove(self, pattern: str, *, count: int = 1) -> None:
        """Take out a statement or a run of statements; an emptied block is left with `pass`.

        The marker goes above what follows: a file that the pack has written always carries one.
        """
        self._edit_statements(pattern, lambda _old: [], count)

    def wrap(self, pattern: str, header: str, *, footer: str = "", count: int = 1) -> None:
        """Move a statement (or a run) into a block, as in ``wrap("x = f()", "with lock:")``.

        ``footer`` is what stands below a block that does not end there: the handlers of a ``try:``.
        """

        def change(old: list[Any]) -> list[Any]:
            (block,) = self._parsed(f"{header}\n    pass\n{textwrap.dedent(footer).strip()}")
            above = old[0].leading_lines
            inner = [old[0].with_changes(leading_lines=()), *old[1:]]
            block = block.with_changes(body=block.body.with_changes(body=inner))
            return [self._with_lines_above(block, above)]

        self._edit_statements(pattern, change, count)

    def replace_expression(self, pattern: str, source: str, *, count: int = 1) -> None:
        """Put an expression in the place of another.

        The lines of a longer one are indented relative to the statement it comes into.
        """
        wanted = _expression(pattern)
        paths = [
            path
            for place, node in self._walk()
            if _is_kind(node.__class__, cst.BaseExpression)
            and _same(wanted, node)
            and (path := _path_to(place))[-1][0] not in _NAMING_FIELDS
        ]
        self._replace_at(paths, source, count, pattern)

    def replace_keyword(self, name: str, pattern: str, source: str, *, count: int = 1) -> None:
        """Put an expression in the place of the value of keyword argument ``name`` in a call."""
        wanted = _expression(pattern)
        paths = [
            (*_path_to(place), ("value", None))
            for place, node in self._walk()
            if type(node) is cst.Arg
            and node.keyword is not None
            and node.keyword.value == name
            and _same(wanted, node.value)
        ]
        self._replace_at(paths, source, count, f"{name}={pattern}")

    @contextmanager
    def within(self, pattern: str) -> Iterator[Definition]:
        """Narrow the edits of a ``with`` block to the one statement of the pattern.

        Only what it gives is edited in there, and only there.
        """
        ((path, start, stop),) = self._runs(pattern, 1)
        if stop - start != 1:
            raise UsageError(f"{self._where}: within() takes the pattern of one statement")
        here: Path = (*path[:-1], (path[-1][0], start))
        node = _at(self._root, here)
        inner = Definition(node, self._where, self._marker, self._layout)
        self._closed = "inside of a within() block, edit what it gives"
        try:
            yield inner
        finally:
            self._closed = ""
            inner._closed = "the within() block has ended"
        if inner._root is not node:
            self._change(here, lambda _old: inner._root)

    # How it works -------------------------------------------------------------------------------

    def _change(self, path: Path, change: Callable[[Any], Any]) -> None:
        if self._closed:
            raise UsageError(f"{self._where}: {self._closed}")
        self._root = _rebuilt(self._root, path, change)

    def _walk(self) -> Iterator[tuple[Place, cst.CSTNode]]:
        """All nodes that hold code, outermost first, in source order."""
        stack: list[tuple[Place, cst.CSTNode]] = [(None, self._root)]
        while stack:
            place, node = stack.pop()
            yield place, node
            inner = [((place, step), child) for step, child in _children(node)]
            stack.extend(reversed(inner))

    def _blocks(self) -> Iterator[Path]:
        """The paths of all statement lists, without walking into expressions."""
        stack: list[tuple[Path, cst.CSTNode]] = [((), self._root)]
        while stack:
            path, node = stack.pop()
            if type(node) is cst.IndentedBlock:
                yield (*path, ("body", None))
            inner = [
                ((*path, step), child)
                for step, child in _children(node)
                if not _is_kind(child.__class__, cst.BaseExpression, cst.SimpleStatementLine)
            ]
            stack.extend(reversed(inner))

    def _runs(self, pattern: str, count: int) -> list[tuple[Path, int, int]]:
        """Where the pattern's statements stand: the list's path, first and past-last index."""
        wanted = _statements(pattern, self._layout)
        found = []
        for path in self._blocks():
            body = _at(self._root, path)
            for start in range(len(body) - len(wanted) + 1):
                run = body[start : start + len(wanted)]
                if all(_same(one, other) for one, other in zip(wanted, run, strict=True)):
                    found.append((path, start, start + len(wanted)))
        self._expect(count, len(found), pattern)
        for (path, _, stop), (other, start, _) in pairwise(found):
            self._refuse_overlap(path == other and start < stop, pattern)
        return found

    def _edit_statements(
        self, pattern: str, change: Callable[[list[Any]], list[Any]], count: int
    ) -> None:
        # Last one first: the paths of the others stay true.
        for path, start, stop in reversed(self._runs(pattern, count)):

            def edited(body: Sequence[Any], start: int = start, stop: int = stop) -> list[Any]:
                new = change(list(body[start:stop]))
                before, after = list(body[:start]), list(body[stop:])
                if not new and after:
                    after[0] = self._marked(after[0])
                elif not new and before:
                    before[-1] = self._marked(before[-1])
                return [*before, *new, *after] or self._parsed("pass")

            self._change(path, edited)

    def _edit_body(self, change: Callable[[Sequence[Any], int], list[Any]]) -> None:
        def edited(body: Sequence[Any]) -> list[Any]:
            docstring = None
            if isinstance(self._root, (cst.FunctionDef, cst.ClassDef)):
                docstring = self._root.get_docstring(clean=False)
            return change(body, 0 if docstring is None else 1)

        if not isinstance(getattr(self._root, "body", None), cst.IndentedBlock):
            raise UsageError(f"{self._where}: it has no body of lines to insert into")
        self._change((("body", None), ("body", None)), edited)

    def _replace_at(self, paths: list[Path], source: str, count: int, pattern: str) -> None:
        self._expect(count, len(paths), pattern)
        for outer, inner in pairwise(paths):
            self._refuse_overlap(inner[: len(outer)] == outer, pattern)
        new = _expression(source)
        for path in reversed(paths):
            self._change(path, lambda old: self._with_parentheses(new, old))
            self._mark_statement_around(path)

    @staticmethod
    def _with_parentheses(new: Any, old: Any) -> Any:
        """Parentheses the old expression had stay: they may be what joins its lines."""
        return new.with_changes(lpar=old.lpar, rpar=old.rpar) if old.lpar and not new.lpar else new

    def _mark_statement_around(self, path: Path) -> None:
        node: Any = self._root
        around: Path = ()
        for depth, (name, index) in enumerate(path):
            if hasattr(node, "leading_lines"):
                around = path[:depth]
            node = getattr(node, name) if index is None else getattr(node, name)[index]
        self._change(around, self._marked)

    def _parsed(self, source: str) -> list[Any]:
        first, *rest = _statements(source, self._layout)
        return [self._marked(first), *rest]

    def _marked(self, statement: Any) -> Any:
        lines = list(statement.leading_lines)
        if any(line.comment is not None and line.comment.value == self._marker for line in lines):
            return statement
        comment = cst.EmptyLine(comment=cst.Comment(self._marker))
        return statement.with_changes(leading_lines=[*lines, comment])

    @staticmethod
    def _with_lines_above(statement: Any, above: Sequence[cst.EmptyLine]) -> Any:
        return statement.with_changes(leading_lines=[*above, *statement.leading_lines])

    def _refuse_overlap(self, overlaps: bool, pattern: str) -> None:
        if overlaps:
            raise SiteMismatch(f"{self._where}: places of `{_shown(pattern)}` overlap")

    def _expect(self, count: int, found: int, pattern: str) -> None:
        if found != count:
            shown = _shown(pattern)
            raise SiteMismatch(f"{self._where}: expected {count} x `{shown}`, found {found}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How inserted code is laid out: like the file around it."""

    newline: str = "\n"
    indent: str = "    "

    @property
    def config(self) -> cst.PartialParserConfig:
        """libcst's own form of it."""
        return cst.PartialParserConfig(default_newline=self.newline, default_indent=self.indent)


def _shown(pattern: str) -> str:
    return textwrap.shorten(pattern, 70, placeholder=" ...")


@cache
def _expression(source: str) -> cst.BaseExpression:
    return cst.parse_expression(textwrap.dedent(source).strip())


@cache
def _statements(source: str, layout: Layout) -> list[Any]:
    module = cst.parse_module(textwrap.dedent(source).strip() + "\n", layout.config)
    first, *rest = module.body
    # libcst keeps comments above a module's first statement in the module.
    header = [line for line in module.header if line.comment is not None]
    return [first.with_changes(leading_lines=[*header, *first.leading_lines]), *rest]


def _same_code(one: Any, other: Any) -> bool:
    """Do two trees differ in layout and comments alone? What they share is not looked at."""
    if one is other:
        return True
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same_code, one, other))
    if not isinstance(one, cst.CSTNode):
        return bool(one == other)
    return type(one) is type(other) and all(
        _same_code(getattr(one, name), getattr(other, name)) for name in _code_fields(one.__class__)
    )


def rewrite(
    text: str,
    where: str,
    codemods: Sequence[tuple[str, Callable[[Definition], None]]],
    *,
    read_back: bool = False,
) -> str:
    """Run codemods, each with the id of its fix, one after the other on a definition's text.

    The definition keeps its indentation: libcst is given it under ``if`` statements, so that no
    line of it moves, those of multi-line strings included. ``read_back`` parses the result, to see
    whether it reads as it was meant; that depends on text and codemods alone, so it is for those
    who record a lock. Raises :class:`SiteMismatch` when a codemod does not find what it expects or
    changes nothing but layout, :class:`UsageError` when it fails.
    """
    newline = "\r\n" if text.count("\r\n") * 2 > text.count("\n") else "\n"
    layout = Layout(newline, "\t" if text.startswith("\t") else "    ")
    indent = text[: len(text) - len(text.lstrip())]
    levels = -(-len(indent) // len(layout.indent))
    header = "".join(f"{layout.indent * level}if 1:{newline}" for level in range(levels))
    final = "" if text.endswith(("\n", "\r")) else newline
    path: Path = (("body", 0), *((("body", None), ("body", 0)) * levels))
    try:
        module = cst.parse_module(header + text + final, layout.config)
    except cst.ParserSyntaxError as error:
        raise SiteMismatch(f"{where}: libcst cannot parse it: {error.message}") from None
    root = _at(module, path)
    for fix_id, codemod in codemods:
        code = Definition(root, f"{where} ({fix_id})", f"# fix: {fix_id}", layout)
        _run(codemod, code)
        if _same_code(root, code._root):
            raise SiteMismatch(
                f"{where} ({fix_id}): the codemod changed nothing, or only comments and layout"
            )
        root = code._root
    printed: str = _rebuilt(module, path, lambda _old: root).code
    if read_back:
        _check_that_it_reads(printed, path, root, where)
    return printed[len(header) : len(printed) - len(final)]


def _at(node: Any, path: Path) -> Any:
    for name, index in path:
        node = getattr(node, name) if index is None else getattr(node, name)[index]
    return node


def _run(codemod: Callable[[Definition], None], code: Definition) -> None:
    try:
        with redirect_stdout(sys.stderr):  # what a run prints there may be run by a shell
            codemod(code)
    except PackError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"{code._where}: its codemod fails: {reason}") from error


def _check_that_it_reads(printed: str, path: Path, meant: Any, where: str) -> None:
    try:
        found = _at(cst.parse_module(printed), path)
    except (cst.ParserSyntaxError, IndexError, AttributeError):
        found = None
    if not _same_code(found, meant):
        raise SiteMismatch(
            f"{where}: what the codemods made reads as something else; put parentheses around an"
            " expression that takes the place of a part of another"
        )

"""Find definitions in a Python file, cut them out, fingerprint them and splice them back.

Only line numbers are taken from :mod:`ast`. Every byte outside a definition stays as it is,
whatever the file's line endings, encoding, form feeds or missing final newline.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fixes.applier.digest import LARGEST_TEXT
from fixes.applier.errors import ImageMismatch

_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What can hold statements: `if`, `try`, `with`, `match`, ... (a definition under one is still named
# by the classes and functions around it alone).
_BLOCK_FIELDS = ("body", "orelse", "handlers", "finalbody", "cases")


@dataclass(frozen=True)
class Span:
    """The lines ``[start, stop)`` of a definition, decorators included, counted from 0."""

    start: int
    stop: int


@dataclass(frozen=True)
class Source:
    """One Python file, decoded, with its definitions by qualified name.

    Raises :class:`ImageMismatch` when the bytes are not Python source that this interpreter parses.
    """

    path: str
    data: bytes

    @cached_property
    def encoding(self) -> str:
        """The codec named by byte order mark or coding cookie, UTF-8 otherwise (PEP 263)."""
        try:
            return tokenize.detect_encoding(io.BytesIO(self.data).readline)[0]
        except SyntaxError as error:
            raise ImageMismatch(f"{self.path}: {error}") from None

    @cached_property
    def lines(self) -> list[str]:
        """The file's lines with their line ends. A byte order mark is in none of them."""
        try:
            text = self.data.decode(self.encoding)
            # Not all codecs give back what they were given (UTF-7, escapes): then a rewrite would
            # change bytes outside of the definition.
            faithful = text.encode(self.encoding) == self.data
        except UnicodeError as error:
            raise ImageMismatch(f"{self.path}: not {self.encoding}: {error}") from None
        if not faithful:
            raise ImageMismatch(f"{self.path}: {self.encoding} does not give the same bytes back")
        # Python's own idea of a line; str.splitlines would also split at form feeds and the like.
        return list(io.StringIO(text, newline=""))

    @cached_property
    def definitions(self) -> dict[str, list[Span]]:
        """Functions, classes, methods and module- or class-level assignments by qualified name."""
        found: dict[str, list[Span]] = {}
        if len(self.data) > LARGEST_TEXT:
            size = f"{LARGEST_TEXT >> 20} MiB"
            raise ImageMismatch(f"{self.path}: larger than {size}, so it is not parsed")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # invalid escapes in the target are not our business
                tree = ast.parse(self.data)
            _ = self.lines  # what cannot be decoded is told here, not at some definition
            for name, span in self._walk(tree.body, "", in_function=False):
                found.setdefault(name, []).append(span)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = str(error) or type(error).__name__
            raise ImageMismatch(f"{self.path}: Python cannot parse it: {reason}") from None
        return found

    def _walk(
        self, body: list[ast.stmt], prefix: str, *, in_function: bool
    ) -> Iterator[tuple[str, Span]]:
        for node in body:
            if isinstance(node, _Definition):
                name = prefix + node.name
                yield name, Span(self._first_line(node), node.end_lineno or node.lineno)
                inside = in_function or not isinstance(node, ast.ClassDef)
                yield from self._walk(node.body, f"{name}.", in_function=inside)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                if not in_function and self._has_lines_to_itself(node):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in targets:
                        plain = target.id if isinstance(target, ast.Name) else ast.unparse(target)
                        name = prefix + plain
                        yield name, Span(node.lineno - 1, node.end_lineno or node.lineno)
            else:
                for field in _BLOCK_FIELDS:
                    inner = getattr(node, field, [])
                    yield from self._walk(inner, prefix, in_function=in_function)

    def _first_line(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
        if not node.decorator_list:
            return node.lineno - 1
        first = node.decorator_list[0].lineno - 1
        # `@(` may stand on a line above the expression that `ast` knows of.
        while first and not self.lines[first].lstrip().startswith("@"):
            first -= 1
        return first

    def _has_lines_to_itself(self, node: ast.stmt) -> bool:
        first = self.lines[node.lineno - 1].encode()[: node.col_offset]
        last = self.lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset or 0 :]
        return not first.strip() and (not last.strip() or last.lstrip().startswith(b"#"))

    def text(self, span: Span) -> str:
        """The lines of a definition as they stand in the file."""
        return "".join(self.lines[span.start : span.stop])

    def replaced(self, texts: dict[Span, str]) -> bytes:
        """The file's bytes with the lines of some definitions replaced."""
        lines = list(self.lines)
        for span in sorted(texts, key=lambda span: span.start, reverse=True):
            lines[span.start : span.stop] = [texts[span]]
        try:
            return "".join(lines).encode(self.encoding)
        except UnicodeEncodeError as error:
            raise ImageMismatch(f"{self.path}: cannot hold the rewritten text: {error}") from None


def fingerprint(text: str) -> str:
    """SHA-256 of a definition's text: dedented by its own indentation, ``\\n`` line ends, no blanks
    at line ends, no final newline. Nothing else is normalised, so it is the same under every
    Python version (``ast.dump`` and ``tokenize`` both change between versions).
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    plain = "\n".join(line.removeprefix(indent).rstrip() for line in lines).rstrip()
    return hashlib.sha256(plain.encode()).hexdigest()


def newlines(text: str) -> str:
    """The kinds of line end in a text: ``lf``, ``crlf``, ``cr`` or, where mixed, ``crlf+lf``.

    The fingerprint is the same for all of them; this is what tells a converted file apart.
    """
    pairs = text.count("\r\n")
    ends = {"cr": text.count("\r") - pairs, "crlf": pairs, "lf": text.count("\n") - pairs}
    return "+".join(name for name, count in ends.items() if count) or "lf"

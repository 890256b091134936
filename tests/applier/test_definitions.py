"""Definitions: where they are, what their fingerprint says, and that splicing keeps every byte."""

from __future__ import annotations

import codecs
import json
import subprocess
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixes.applier import definitions
from fixes.applier.definitions import Source, Span, fingerprint, newlines
from fixes.applier.errors import ImageMismatch
from tests.applier import interpreters

ROOT = Path(definitions.__file__).parents[2]


def source_of(text: str) -> Source:
    """A file with this text, dedented."""
    return Source("file.py", textwrap.dedent(text).encode())


def only(source: Source, name: str) -> str:
    """The text of a definition that there is once."""
    (span,) = source.definitions[name]
    return source.text(span)


# Where a definition is ----------------------------------------------------------------------------


def test_a_function_has_its_decorators_and_not_the_comment_above() -> None:
    source = source_of(
        """\
        # about f
        @first
        # between
        @second(
            1,
        )
        def f(): ...
        # after
        """
    )
    assert source.definitions["f"] == [Span(1, 7)]


@pytest.mark.parametrize("opening", ["@(\n    decorated\n)\n", "@\\\ndecorated\n", "@(a\n@ b)\n"])
def test_a_decorator_that_begins_above_its_expression_is_whole(opening: str) -> None:
    text = f"x = 1\n{opening}def f(): ...\n"
    assert only(Source("file.py", text.encode()), "f") == text.removeprefix("x = 1\n")


def test_methods_nested_functions_and_classes_are_named_by_what_is_around_them() -> None:
    source = source_of(
        """\
        class A:
            class B:
                async def run(self):
                    def helper(): ...
        def outer():
            class Local:
                def method(self): ...
        """
    )
    assert list(source.definitions) == [
        "A",
        "A.B",
        "A.B.run",
        "A.B.run.helper",
        "outer",
        "outer.Local",
        "outer.Local.method",
    ]


@pytest.mark.parametrize(
    "block",
    [
        "if a:\n    {}",
        "if a:\n    pass\nelif b:\n    {}",
        "if a:\n    pass\nelse:\n    {}",
        "try:\n    {}\nexcept E:\n    pass",
        "try:\n    pass\nexcept E:\n    {}",
        "try:\n    pass\nexcept E:\n    pass\nelse:\n    {}",
        "try:\n    pass\nfinally:\n    {}",
        "with a:\n    {}",
        "for a in b:\n    {}",
        "while a:\n    {}",
        "match a:\n    case 1:\n        {}",
    ],
)
def test_a_definition_under_a_block_is_found_by_its_plain_name(block: str) -> None:
    source = Source("file.py", (block.format("def f(): ...") + "\n").encode())
    assert only(source, "f").strip() == "def f(): ..."


def test_assignments_of_modules_and_classes_are_definitions() -> None:
    source = source_of(
        """\
        LIMIT = 3  # three
        pair, other = 1, 2
        first = second = (
            1
        )
        typed: int = 1
        class A:
            field: int
            table = {
                1: 2,
            }
            table[3] = 4
        """
    )
    assert only(source, "LIMIT") == "LIMIT = 3  # three\n"
    assert only(source, "A.table").splitlines()[-1] == "    }"
    assert source.definitions["first"] == source.definitions["second"] == [Span(2, 5)]
    assert {"typed", "A.field", "A.table[3]"} <= set(source.definitions)


@pytest.mark.parametrize("text", ["x = 1; y = 2", "if a: x = 1", "class A: x = 1", "y(); x = 1"])
def test_an_assignment_that_shares_its_line_is_none(text: str) -> None:
    assert set(Source("file.py", text.encode()).definitions) <= {"A"}


def test_assignments_of_functions_are_none() -> None:
    assert list(source_of("def f():\n    x = 1\n    if x:\n        y = 2\n").definitions) == ["f"]


def test_a_property_has_one_place_for_getter_and_setter_each() -> None:
    source = source_of(
        """\
        class A:
            @property
            def x(self): ...
            @x.setter
            def x(self, value): ...
        """
    )
    assert source.definitions["A.x"] == [Span(1, 3), Span(3, 5)]


def test_only_python_s_own_line_ends_count() -> None:
    text = "x = '\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029'\n\x0c\ndef f():\n    pass\n"
    assert only(Source("file.py", text.encode()), "f") == "def f():\n    pass\n"


def test_carriage_returns_alone_are_line_ends() -> None:
    assert only(Source("file.py", b"x = 1\rdef f():\r    pass\r"), "f") == "def f():\r    pass\r"


# A byte order mark is no part of the first definition ---------------------------------------------

MARKED = codecs.BOM_UTF8 + "X = 'ä'\ndef f(): ...\n".encode()


def test_an_assignment_after_a_byte_order_mark_is_found() -> None:
    assert only(Source("file.py", MARKED), "X") == "X = 'ä'\n"


def test_a_byte_order_mark_stays_when_the_first_line_is_rewritten() -> None:
    source = Source("file.py", MARKED)
    data = source.replaced({source.definitions["X"][0]: "X = 'ö'\n"})
    assert data == MARKED.replace("ä".encode(), "ö".encode())


# Fingerprints -------------------------------------------------------------------------------------

PLAIN = "def f(x):\n    return x\n"


@pytest.mark.parametrize(
    "same",
    [
        "    def f(x):\n        return x\n",
        "\tdef f(x):\n\t    return x\n",
        "def f(x):\r\n    return x\r\n",
        "def f(x):\r    return x",
        "def f(x):  \n    return x\t\n",
        "def f(x):\n    return x",
        "def f(x):\n    return x\n\n  \n",
    ],
)
def test_indentation_line_ends_and_blanks_at_line_ends_do_not_count(same: str) -> None:
    assert fingerprint(same) == fingerprint(PLAIN)


@pytest.mark.parametrize(
    "other",
    [
        "def f(x):\n     return x\n",
        "def f(x):\n\treturn x\n",
        "def f(x):\n    return  x\n",
        "def f(x):\n\n    return x\n",
        "def f(x):\n    return x  # x\n",
        "def f(y):\n    return x\n",
        "@d\ndef f(x):\n    return x\n",
    ],
)
def test_everything_else_counts(other: str) -> None:
    assert fingerprint(other) != fingerprint(PLAIN)


def test_lines_that_stand_left_of_the_definition_keep_their_text() -> None:
    text = '    def f():\n        """a\n  b\n        """\n'
    assert fingerprint(text) == fingerprint('def f():\n    """a\n  b\n    """\n')
    assert fingerprint(text) != fingerprint('def f():\n    """a\nb\n    """\n')


def test_the_fingerprint_is_the_plain_text_s_hash() -> None:
    """Pinned: a lock that was written once stays valid."""
    assert fingerprint(PLAIN) == "5f689f51f3af82cc6d348aee6b9b6dd2f1f6a7e5fe582ed5a5d00ee4521812bb"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("a\nb\n", "lf"),
        ("a\r\nb\r\n", "crlf"),
        ("a\rb", "cr"),
        ("a\r\nb\n", "crlf+lf"),
        ("a", "lf"),
        ("a\x0cb\x1c\u2028\r\n", "crlf"),
    ],
)
def test_line_ends_are_named(text: str, kinds: str) -> None:
    assert newlines(text) == kinds


# Splicing, on generated files ---------------------------------------------------------------------


@dataclass
class Generated:
    """A file's lines, without ends, and the definitions that were put into them."""

    lines: list[str] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)


# Characters that str.splitlines, but not Python, takes for line ends are among them.
_TEXT = st.text("ab ä\xa0\x0c\x1c\x1d\x85\t'#@", max_size=8)
_NAME = st.sampled_from(["f", "g", "run", "é"])


def _string(draw: st.DrawFn) -> str:
    return "'" + draw(_TEXT).replace("'", "") + "'"


def _block(draw: st.DrawFn, made: Generated, indent: str, prefix: str, kind: str) -> None:
    step = draw(st.sampled_from(["    ", "\t", "  "]))
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            made.lines.append(draw(st.sampled_from(["", "\x0c", "  \t", f"{indent}# @ä  "])))
        deep = len(indent) > 8
        choices = ["assign", "lines", "call"] + ([] if deep else ["def", "class", "if"])
        what = draw(st.sampled_from(choices))
        start = len(made.lines)
        at = len(made.spans)
        if what == "assign":
            name = draw(_NAME)
            made.lines.append(f"{indent}{name} = {_string(draw)}{draw(st.sampled_from(['', ' ']))}")
            if kind != "def":
                made.spans.append((prefix + name, start, start + 1))
        elif what == "lines":
            inner = [line.replace("'", "") for line in draw(st.lists(_TEXT, max_size=2))]
            made.lines += [f"{indent}call('''{_string(draw)[1:-1]}", *inner, "''')  # é"]
        elif what == "call":
            made.lines.append(f"{indent}call({_string(draw)}); x = 1")
        elif what == "if":
            made.lines.append(f"{indent}if a:")
            _block(draw, made, indent + step, prefix, kind)
        else:
            name = draw(_NAME)
            for _ in range(draw(st.integers(0, 2))):
                made.lines += draw(
                    st.sampled_from(
                        [
                            [f"{indent}@deco"],
                            [f"{indent}@deco(", "1", ")"],
                            [f"{indent}@(", "deco)"],
                        ]
                    )
                )
            made.lines.append(f"{indent}{what} {name}{'()' if what == 'def' else ''}:")
            inside = "def" if "def" in (what, kind) else what
            _block(draw, made, indent + step, f"{prefix}{name}.", inside)
            made.spans.insert(at, (prefix + name, start, len(made.lines)))
    if len(made.lines) and made.lines[-1].strip() in ("", "# @ä"):
        made.lines.append(f"{indent}pass")


@dataclass(frozen=True)
class File:
    """A generated file and the texts of its definitions, by name, in order."""

    data: bytes
    texts: list[tuple[str, str]]


@st.composite
def files(draw: st.DrawFn) -> File:
    """Python files with all that real ones have and few people think of."""
    made = Generated()
    cookie, codec = draw(
        st.sampled_from(
            [
                ([], "utf-8"),
                ([], "utf-8-sig"),
                (["# -*- coding: utf-8 -*-"], "utf-8-sig"),
                (["#!python", "# vim: set fileencoding=latin-1 :"], "latin-1"),
            ]
        )
    )
    made.lines += cookie
    _block(draw, made, "", "", "module")
    kinds = draw(st.sampled_from([["\n"], ["\r\n"], ["\r"], ["\n", "\r\n"], ["\n", "\r\n", "\r"]]))
    ends = [draw(st.sampled_from(kinds)) for _ in made.lines]
    # The standard library looks for a coding cookie with readline(), which knows no lone `\r`.
    ends[: len(cookie)] = [end if end != "\r" else "\n" for end in ends[: len(cookie)]]
    # An empty line's `\n` after a lone `\r` would be the second half of one line end.
    for number in range(1, len(ends)):
        if ends[number - 1] == "\r" and not made.lines[number] and ends[number] == "\n":
            ends[number] = "\r"
    if made.lines[-1] and draw(st.booleans()):
        ends[-1] = ""
    lines = [line + end for line, end in zip(made.lines, ends, strict=True)]
    texts = [(name, "".join(lines[start:stop])) for name, start, stop in made.spans]
    return File("".join(lines).encode(codec), texts)


@given(files())
@settings(max_examples=150, deadline=None)
def test_definitions_are_cut_where_they_were_put(file: File) -> None:
    source = Source("file.py", file.data)
    found = [(name, source.text(s)) for name, spans in source.definitions.items() for s in spans]
    assert sorted(found) == sorted(file.texts)


@given(files())
@settings(max_examples=100, deadline=None)
def test_splicing_unchanged_text_gives_the_same_bytes(file: File) -> None:
    source = Source("file.py", file.data)
    for spans in source.definitions.values():
        for span in spans:
            assert source.replaced({span: source.text(span)}) == file.data


@given(files(), st.data())
@settings(max_examples=100, deadline=None)
def test_splicing_other_text_keeps_every_byte_around_it(file: File, data: st.DataObject) -> None:
    source = Source("file.py", file.data)
    spans = [span for spans in source.definitions.values() for span in spans]
    if not spans:
        return
    span = data.draw(st.sampled_from(spans))
    codec = source.encoding
    text = source.text(span)
    before = "".join(source.lines[: span.start])
    after = "".join(source.lines[span.stop :])
    assert (before + text + after).encode(codec) == file.data
    assert source.replaced({span: "NEW = 'ä'\r\n"}) == f"{before}NEW = 'ä'\r\n{after}".encode(codec)


# Hostile files ------------------------------------------------------------------------------------

HOSTILE = {
    "null bytes": b"x = 1\0\n",
    "null bytes in a string": b"def f():\n    '''\0'''\n",
    "invalid UTF-8": b"x = '\xff'\n",
    "an encoded surrogate": b"x = '\xed\xa0\x80'\n",
    "UTF-16": "def f(): ...\n".encode("utf-16"),
    "an unknown codec": b"# coding: nonsense\n",
    "a codec for bytes": b"# coding: hex\n78\n",
    "two opinions on the codec": codecs.BOM_UTF8 + b"# coding: latin-1\n",
    "a codec that is not faithful": b"# coding: utf-7\nx = '+AOQ-'\n",
    "a codec that makes lines": b"# coding: unicode_escape\nx = 1\\ny = 2\n",
    "many parentheses": b"x = " + b"(" * 100_000,
    "many signs": b"x = " + b"-" * 100_000 + b"1\n",
    "many attributes": b"x" + b".a" * 100_000 + b" = 1\n",
    "many levels": b"".join(b" " * level + b"if 1:\n" for level in range(3000)),
    "a long line": b"x = [" + b"1, " * 1_000_000,
    "a merge conflict": b"<<<<<<< HEAD\nx = 1\n=======\n",
    "no Python": bytes(range(256)) * 1000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_read_is_a_mismatch_and_quick(data: bytes) -> None:
    started = time.process_time()
    with pytest.raises(ImageMismatch, match=r"^vllm/x\.py: "):
        _ = Source("vllm/x.py", data).definitions
    assert time.process_time() - started < 5


def test_a_huge_line_is_quick() -> None:
    started = time.process_time()
    text = only(Source("file.py", b"def f():\n    return '" + b"a" * 1_000_000 + b"'\n"), "f")
    assert len(fingerprint(text)) == 64
    assert time.process_time() - started < 5


def test_text_that_the_file_s_codec_has_not_is_refused() -> None:
    source = Source("file.py", b"# coding: latin-1\ndef f(): ...\n")
    with pytest.raises(ImageMismatch, match="cannot hold"):
        source.replaced({source.definitions["f"][0]: "def f(): '\u2192'\n"})


# Other interpreters -------------------------------------------------------------------------------

CORPUS = '''\
@decorated(f"{1!r:>{2}} {'a' + 'b'}")
async def f(x, /, y: "int" = 1, *, z=lambda: (yield)) -> None:
    """Ä
  \u2028 text\x0c
    """
    match x:
        case {"a": [1, *rest]} if (n := len(rest)) > 1:
            return n

(a, b), c = (1, 2), 3
(d, e) = 1, 2
table["key", 1:2] = other.attribute = x if y else -1
class A(B, metaclass=C):
    @property
    def x(self): return 1
    @x.setter
    def x(self, value): self._x = value; return None
    y: dict[str, int] = {**a, "b": 0x10_0}
'''

SCRIPT = """\
import json, sys
from pathlib import Path
from fixes.applier.definitions import Source, fingerprint
found = {}
for path in sys.argv[1:]:
    source = Source(path, Path(path).read_bytes())
    for name, spans in source.definitions.items():
        found[f"{Path(path).name}::{name}"] = [fingerprint(source.text(span)) for span in spans]
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of all kinds: written for this, and the pack's own."""
    folder = tmp_path_factory.mktemp("corpus")
    variants = {
        "plain.py": CORPUS.encode(),
        "crlf.py": CORPUS.replace("\n", "\r\n").encode(),
        "marked.py": codecs.BOM_UTF8 + CORPUS.encode(),
        "latin.py": ("# coding: latin-1\n" + CORPUS.replace("\u2028", "é")).encode("latin-1"),
    }
    for name, data in variants.items():
        (folder / name).write_bytes(data)
    own = sorted((ROOT / "fixes").rglob("*.py"))
    return [*(str(folder / name) for name in variants), *map(str, own)]


@pytest.mark.parametrize("version", interpreters.VERSIONS)
def test_fingerprints_are_the_same_under_every_python(version: str, corpus: list[str]) -> None:
    done = subprocess.run(
        [interpreters.need(version), "-S", "-c", SCRIPT, *corpus],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    here = {}
    for path in corpus:
        source = Source(path, Path(path).read_bytes())
        for name, spans in source.definitions.items():
            here[f"{Path(path).name}::{name}"] = [fingerprint(source.text(s)) for s in spans]
    assert json.loads(done.stdout) == here
    assert len(here) > 100

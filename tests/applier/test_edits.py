"""The edits: what they write, what they leave, and that they never do nothing silently."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from fixes.applier.edits import Definition, rewrite
from fixes.applier.errors import SiteMismatch, UsageError

METHOD = '''\
    @decorated(1)
    def method(self, rows, *, flag=False):
        """Text
    with a shallow line.
        """
        first = rows[0]  # the first

        # about the loop
        for row in rows:
            if flag:
                call(row, (1, 2), key="x")
            else:
                other(row)
        return helper(first, size=len(rows), fill=(0))
'''


def edited(codemod: Callable[[Definition], None], text: str = METHOD) -> str:
    """The text after one codemod of a fix named `a-fix`."""
    return rewrite(text, "file.py::C.method", [("a-fix", codemod)])


def changed_lines(after: str, before: str = METHOD) -> tuple[list[str], list[str]]:
    """Lines taken away and lines added, stripped."""
    old, new = before.splitlines(), after.splitlines()
    return (
        [line.strip() for line in old if line not in new],
        [line.strip() for line in new if line not in old],
    )


def test_replace_statement_keeps_the_comment_above() -> None:
    after = edited(
        lambda code: code.replace_statement("for row in rows: ...", "for row in rows:\n    pass")
    )
    assert "        # about the loop\n        # fix: a-fix\n        for row in rows:\n" in after
    assert after.endswith("            pass\n" + METHOD[METHOD.index("        return") :])


def test_a_run_of_statements_is_one_place() -> None:
    text = "def f():\n    a = 1\n    b = 2\n    c = 3\n"
    after = edited(lambda code: code.replace_statement("a = 1\nb = 2", "a = b = 1"), text)
    assert after == "def f():\n    # fix: a-fix\n    a = b = 1\n    c = 3\n"


def test_insertions() -> None:
    def codemod(code: Definition) -> None:
        code.insert_before("first = rows[0]", "zero = 0")
        code.insert_after("first = rows[0]", "second = rows[1]\nthird = rows[2]")
        code.insert_first("enter()")
        code.insert_last("leave()")

    gone, new = changed_lines(edited(codemod))
    assert gone == []
    statements = [line for line in new if not line.startswith("#")]
    assert statements == [
        "enter()",
        "zero = 0",
        "second = rows[1]",
        "third = rows[2]",
        "leave()",
    ]
    assert new.count("# fix: a-fix") == 4


def test_insert_first_in_a_body_without_docstring() -> None:
    after = edited(lambda code: code.insert_first("enter()"), "def f():\n    pass\n")
    assert after == "def f():\n    # fix: a-fix\n    enter()\n    pass\n"


def test_remove_leaves_the_marker_on_its_neighbour() -> None:
    after = edited(lambda code: code.remove("first = rows[0]"))
    assert changed_lines(after) == (["first = rows[0]  # the first"], ["# fix: a-fix"])
    last = edited(lambda code: code.remove("b()"), "def f():\n    a()\n    b()\n")
    assert last == "def f():\n    # fix: a-fix\n    a()\n"
    only = edited(lambda code: code.remove("b()"), "def f():\n    b()\n")
    assert only == "def f():\n    # fix: a-fix\n    pass\n"


def test_wrap_moves_a_run_into_a_block() -> None:
    text = "def f():\n    a()  # note\n    b('''x\n  y''')\n    c()\n"
    after = edited(lambda code: code.wrap("a()\nb(...)", "with lock:"), text)
    assert after == (
        "def f():\n    # fix: a-fix\n    with lock:\n        a()  # note\n"
        "        b('''x\n  y''')\n    c()\n"
    )


def test_wrap_with_what_stands_below_the_block() -> None:
    text = "def f():\n    a()\n    return b()\n"
    after = edited(
        lambda code: code.wrap("a()\nreturn ...", "try:", footer="except OSError:\n    return 0"),
        text,
    )
    assert after == (
        "def f():\n    # fix: a-fix\n    try:\n        a()\n        return b()\n"
        "    except OSError:\n        return 0\n"
    )


def test_replace_expression_and_keyword_mark_their_statement() -> None:
    def codemod(code: Definition) -> None:
        code.replace_expression("other(row)", "other(row, flag)")
        code.replace_keyword("size", "len(rows)", "max(1, len(rows))")

    gone, new = changed_lines(edited(codemod))
    assert gone == ["other(row)", "return helper(first, size=len(rows), fill=(0))"]
    assert new == [
        "# fix: a-fix",
        "other(row, flag)",
        "# fix: a-fix",
        "return helper(first, size=max(1, len(rows)), fill=(0))",
    ]


def test_wildcards_match_arguments_bodies_and_layout() -> None:
    def codemod(code: Definition) -> None:
        code.replace_expression("call(row, ...)", "called")
        code.insert_before("if flag:\n    ...\nelse:\n    ...", "seen = 1")
        code.insert_before("return helper(..., fill=0)", "almost = 1")

    assert "called\n" in edited(codemod)


def test_within_narrows_to_one_statement() -> None:
    text = "def f():\n    if a:\n        x = 1\n    if b:\n        x = 1\n"

    def codemod(code: Definition) -> None:
        with code.within("if b: ...") as inner:
            inner.replace_statement("x = 1", "x = 2")

    after = edited(codemod, text)
    assert after == text[: text.rindex("x = 1")] + "# fix: a-fix\n        x = 2\n"
    with pytest.raises(UsageError, match="one statement"):
        edited(lambda code: code.within("if a: ...\nif b: ...").__enter__(), text)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("codemod", "message"),
    [
        (lambda c: c.replace_statement("x = 1", "x = 2"), "expected 1 x `x = 1`, found 0"),
        (lambda c: c.insert_after("first = rows[1]", "x"), "found 0"),
        (lambda c: c.replace_expression("row", "r"), "expected 1 x `row`, found 3"),
        (lambda c: c.replace_expression("rows", "r", count=2), "expected 2 x `rows`, found 3"),
        (lambda c: c.replace_keyword("size", "1", "2"), "expected 1 x `size=1`, found 0"),
        (lambda c: None, "changed nothing"),
    ],
)
def test_another_number_of_places_is_an_error(
    codemod: Callable[[Definition], None], message: str
) -> None:
    with pytest.raises(SiteMismatch) as caught:
        edited(codemod)
    assert message in str(caught.value)
    assert "file.py::C.method (a-fix)" in str(caught.value)


def test_a_replacement_with_the_same_code_is_an_error() -> None:
    with pytest.raises(SiteMismatch, match="changed nothing, or only comments"):
        edited(lambda code: code.replace_expression("helper(...)", METHOD.rpartition("return ")[2]))


def test_fixes_compose_in_the_order_given() -> None:
    text = "def f():\n    return old()\n"
    after = rewrite(
        text,
        "f",
        [
            ("one", lambda code: code.replace_expression("old()", "new()")),
            ("two", lambda code: code.replace_expression("new()", "newer()")),
        ],
    )
    assert after == "def f():\n    # fix: one\n    # fix: two\n    return newer()\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", ["", "    ", "        ", "\t"])
def test_layout_of_the_file_is_kept(newline: str, indent: str) -> None:
    step = "\t" if indent == "\t" else "    "
    lines = ["def f(x):", step + '"""Ä', "", step + 'b"""', step + "y = (x,", "     1)", ""]
    text = newline.join(indent + line if line else "" for line in lines)
    after = edited(
        lambda code: code.insert_after("y = ...", "if y:\n    g()\nelse:\n    h()"), text
    )
    assert after.startswith(text)
    new = ["# fix: a-fix", "if y:", step + "g()", "else:", step + "h()"]
    assert after[len(text) :] == "".join(indent + step + line + newline for line in new)


def test_a_definition_at_the_end_of_a_file_without_newline() -> None:
    after = edited(
        lambda code: code.replace_statement("return 1", "return 2"), "def f():\n    return 1"
    )
    assert after == "def f():\n    # fix: a-fix\n    return 2"


# What would read as something else, or be lost --------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pattern", "source"),
    [
        ("return -(a // -b)", "a", "a + 1"),
        ("return a.real", "a", "a + b"),
        ("return g(a)", "a", "1, 2"),
        ("return not a.b", "a.b", "a or b"),
        ("return a ** 2", "a", "-a"),
        ("return a or 1", "a", "a if b else c"),
    ],
)
def test_an_expression_that_reads_as_another_is_found(text: str, pattern: str, source: str) -> None:
    def go(new: str) -> str:
        codemods = [("a-fix", lambda code: code.replace_expression(pattern, new))]
        return rewrite(f"def f(a, b, c):\n    {text}\n", "here", codemods, read_back=True)

    with pytest.raises(SiteMismatch, match="reads as something else"):
        go(source)
    assert f"({source})" in go(f"({source})")


LOOP = "def f(rows):\n    a = 1\n    for row in rows:\n        g(row)\n    return a\n"


def test_the_whole_is_not_edited_inside_of_within() -> None:
    def codemod(code: Definition) -> None:
        with code.within("for row in rows: ..."):
            code.remove("a = 1")

    with pytest.raises(UsageError, match="inside of a within"):
        edited(codemod, LOOP)


def test_the_part_is_not_edited_after_within() -> None:
    def codemod(code: Definition) -> None:
        with code.within("for row in rows: ...") as loop:
            loop.insert_first("h(row)")
        loop.insert_first("i(row)")

    with pytest.raises(UsageError, match="has ended"):
        edited(codemod, LOOP)


def test_first_and_last_in_a_block_that_is_no_definition() -> None:
    def codemod(code: Definition) -> None:
        with code.within("for row in rows: ...") as loop:
            loop.insert_first("h(row)")
            loop.insert_last("i(row)")

    after = edited(codemod, LOOP)
    inside = after[after.index("        #") : after.index("    return")]
    assert [line.strip() for line in inside.splitlines() if "#" not in line] == [
        "h(row)",
        "g(row)",
        "i(row)",
    ]


@pytest.mark.parametrize(
    "codemod",
    [
        lambda code: code.replace_statement("x()\nx()", "y()", count=2),
        lambda code: code.replace_expression("g(...)", "h()", count=2),
    ],
)
def test_places_that_overlap_are_refused(codemod: Callable[[Definition], None]) -> None:
    with pytest.raises(SiteMismatch, match="overlap"):
        edited(codemod, "def f(a):\n    x()\n    x()\n    x()\n    return g(g(a))\n")


@pytest.mark.parametrize(
    "codemod",
    [
        lambda code: code.replace("a", "b"),
        lambda code: code.insert_first("range(0,"),
        lambda code: code.insert_first("# only a comment"),
        lambda code: sys.exit(0),
    ],
)
def test_a_codemod_that_fails_is_named(codemod: Callable[[Definition], None]) -> None:
    with pytest.raises(UsageError, match=r"^file\.py::C\.method \(a-fix\): its codemod fails: \w+"):
        edited(codemod, LOOP)


def test_each_fix_changes_something_of_its_own() -> None:
    codemods = [
        ("one", lambda code: code.replace_statement("a = 1", "a = 2")),
        ("two", lambda code: code.replace_statement("return a", "return (a)")),
    ]
    with pytest.raises(SiteMismatch, match=r"\(two\): the codemod changed nothing"):
        rewrite(LOOP, "here", codemods)


def test_what_a_codemod_prints_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    def codemod(code: Definition) -> None:
        print("rm -rf x")
        code.remove("a = 1")

    edited(codemod, LOOP)
    assert capsys.readouterr() == ("", "rm -rf x\n")

"""The edits: what they write, what they leave, and that they never do nothing silently."""

from __future__ import annotations

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
    with pytest.raises(SiteMismatch, match="changed nothing but comments"):
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

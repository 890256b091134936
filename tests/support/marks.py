"""What the marks of a two-sided test may say.

A mark that says something else is an error when tests are collected: it would let a test pass that
shows nothing, or let it vanish.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence

import pytest

LEVELS = ("text", "definition", "class", "engine")
NEEDS = ("torch", "engine", "vllm_gaudi")
# What pytest shows of each, and what an error says is allowed.
USAGE = {
    "red": "red(pattern, release=None, output=False): must fail on stock, with this message",
    "needs": "needs(*what): torch, engine, vllm_gaudi: what the test's own process must have",
    "only": "only(*releases): the releases a test is for",
    "level": f"level(name): level of proof, one of {', '.join(LEVELS)}",
}
_KEYWORDS = {"red": {"release", "output"}}
# Messages without a meaning: a pattern that fits one of them fits any failure.
_MEANINGLESS = ("", *string.printable, "qz qz")


def faults(item: pytest.Item, fix: str, releases: Sequence[str]) -> Iterator[str]:
    """What is wrong with a test's marks; ``releases`` are those that its fix is for."""
    test = item.nodeid.partition("::")[2].partition("[")[0]
    for mark in item.iter_markers():
        if usage := USAGE.get(mark.name):
            for fault in _faults(mark, fix, releases):
                yield f"{test}: @pytest.mark.{_shown(mark)}: {fault}; the mark is {usage}"


def _shown(mark: pytest.Mark) -> str:
    keywords = (f"{name}={value!r}" for name, value in mark.kwargs.items())
    return f"{mark.name}({', '.join([*map(repr, mark.args), *keywords])})"


def _faults(mark: pytest.Mark, fix: str, releases: Sequence[str]) -> Iterator[str]:
    if mark.name == "red":
        yield from _faults_of_red(mark, fix, releases)
    elif mark.name == "level" and (len(mark.args) != 1 or mark.args[0] not in LEVELS):
        yield f"it takes one of {', '.join(LEVELS)}"
    elif mark.name == "needs" and not _some_of(NEEDS, mark.args):
        yield f"it takes at least one of {', '.join(NEEDS)}"
    elif mark.name == "only" and not _some_of(releases, mark.args):
        yield f"it takes at least one of {', '.join(releases)}, the releases of {fix or 'the pack'}"
    for name in mark.kwargs.keys() - _KEYWORDS.get(mark.name, set()):
        yield f"{name}= is unknown"


def _some_of(allowed: Sequence[str], given: Sequence[object]) -> bool:
    return bool(given) and all(each in allowed for each in given)


def _faults_of_red(mark: pytest.Mark, fix: str, releases: Sequence[str]) -> Iterator[str]:
    if not fix:
        yield "only a test of a fix (tests/fixes/test_<fix>.py) has a side where it must fail"
    if len(mark.args) == 1 and isinstance(mark.args[0], str):
        yield from _faults_of_pattern(mark.args[0])
    else:
        yield "it takes one pattern, a text that is no keyword argument"
    if "release" in mark.kwargs and mark.kwargs["release"] not in releases:
        wrong = repr(mark.kwargs["release"])
        yield f"{wrong} is no release of {fix}, which is for {', '.join(releases)}"
    if not isinstance(mark.kwargs.get("output", False), bool):
        yield "output= is True or False"


def _faults_of_pattern(pattern: str) -> Iterator[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        yield f"it is no regular expression: {error} (re.escape() or \\ for a literal text)"
        return
    if any(compiled.search(message) for message in _MEANINGLESS):
        yield "it fits any failure; name the words that only the defect's failure has"

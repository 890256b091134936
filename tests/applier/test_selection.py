"""Which fixes a run has: independent of the words' order, and refused with what would help."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from fixes.applier.errors import UsageError
from fixes.applier.profiles import Entry, Profile
from fixes.applier.selection import Selection, nearest, select
from tests.applier.world import World

PROFILE = Profile(
    "v1.0.0",
    "",
    {},
    (
        Entry("base"),
        Entry("prompt-order", requires=("base",)),
        Entry("prefix-cache", opt_in=True, requires=("base",)),
        Entry("long-prefill", opt_in=True, requires=("prefix-cache",), after=("prompt-order",)),
        Entry("other-prefill", opt_in=True, conflicts=("long-prefill",)),
        Entry("planned"),
        Entry("planned-too", opt_in=True),
        Entry("on-planned", opt_in=True, requires=("planned",)),
    ),
)
UNWRITTEN = frozenset({"planned", "planned-too"})
ELSEWHERE = {"async-inputs": ["v2.0.0", "v3.0.0"]}


def selected(named: Sequence[str] = (), without: Sequence[str] = ()) -> Selection:
    """What the words select."""
    return select(PROFILE, named, without, UNWRITTEN, ELSEWHERE)


def refusal(named: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """The message of a refused selection."""
    with pytest.raises(UsageError) as caught:
        selected(named, without)
    return str(caught.value)


def test_the_default_fixes_are_chosen_in_the_profile_s_order() -> None:
    assert selected().chosen == ("base", "prompt-order")


@pytest.mark.parametrize(
    "named", list(itertools.permutations(["long-prefill", "prefix-cache", "prompt-order", "base"]))
)
def test_the_order_of_the_words_does_not_matter(named: tuple[str, ...]) -> None:
    assert selected(named).chosen == ("base", "prompt-order", "prefix-cache", "long-prefill")


def test_a_word_may_be_said_twice() -> None:
    assert selected(["prefix-cache", "prefix-cache"]) == selected(["prefix-cache"])


def test_without_leaves_a_default_fix_out() -> None:
    assert selected(without=["prompt-order"]).chosen == ("base",)


def test_default_fixes_that_nobody_has_written_are_left_out_and_told() -> None:
    assert selected().unwritten == ("planned",)
    assert selected(without=["planned"]).unwritten == ()


@pytest.mark.parametrize("name", sorted(UNWRITTEN))
def test_a_named_fix_that_nobody_has_written_is_refused(name: str) -> None:
    assert refusal([name]).startswith(f"{name} is planned for v1.0.0 but not written yet")


def test_an_unknown_fix_comes_with_the_nearest_names() -> None:
    message = refusal(["prompt-ordr"])
    assert message == "profile v1.0.0 has no fix 'prompt-ordr'; did you mean prompt-order?"


def test_an_unknown_fix_to_leave_out_comes_with_the_nearest_names() -> None:
    assert "did you mean" in refusal(without=["prefixcache"])
    assert "prefix-cache" in refusal(without=["prefixcache"])


def test_a_fix_like_no_other_gets_no_suggestion() -> None:
    assert refusal(["zzz"]) == "profile v1.0.0 has no fix 'zzz'"


def test_a_fix_of_other_profiles_is_told_to_be_there() -> None:
    assert refusal(["async-inputs"]).endswith("; it is in v2.0.0, v3.0.0 only")


def test_leaving_out_what_another_chosen_fix_requires_is_refused() -> None:
    message = refusal(without=["base"])
    assert "prompt-order requires base, which --without leaves out" in message
    assert "leave out prompt-order as well" in message


def test_leaving_out_both_is_fine() -> None:
    assert selected(without=["base", "prompt-order"]).chosen == ()


def test_a_missing_requirement_says_what_to_add() -> None:
    message = refusal(["long-prefill"])
    assert "long-prefill requires prefix-cache" in message
    assert message.endswith("name it as well: long-prefill prefix-cache")


def test_what_the_message_says_to_add_helps() -> None:
    words = refusal(["long-prefill"]).rpartition(": ")[2].split()
    assert set(words) <= set(selected(words).chosen)


def test_a_requirement_that_nobody_has_written_is_told() -> None:
    assert refusal(["on-planned"]) == "on-planned requires planned, which is not written yet"


@pytest.mark.parametrize(
    "named", list(itertools.permutations(["long-prefill", "prefix-cache", "other-prefill"]))
)
def test_a_conflict_is_refused_in_any_order(named: tuple[str, ...]) -> None:
    message = refusal(named)
    assert message == "other-prefill conflicts with long-prefill; leave out one of them"


def test_either_side_of_a_conflict_alone_is_fine() -> None:
    assert "other-prefill" in selected(["other-prefill"]).chosen
    assert "long-prefill" in selected(["long-prefill", "prefix-cache"]).chosen


def test_a_fix_cannot_be_named_and_left_out() -> None:
    assert "both named and left out" in refusal(["base"], ["base"])


def test_an_opt_in_fix_needs_no_leaving_out() -> None:
    assert "opt-in" in refusal(without=["prefix-cache"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("prompt_order", "; did you mean prompt-order?"),
        ("", ""),
        ("\0\n", ""),
        ("x" * 10_000, ""),
    ],
)
def test_nearest_names(word: str, expected: str) -> None:
    assert nearest(word, ["prompt-order", "base"]) == expected


# The same from the command line -------------------------------------------------------------------


@pytest.mark.parametrize("words", list(itertools.permutations(["delta", "gamma", "alpha"])))
def test_the_tree_does_not_depend_on_the_order_of_the_words(
    world: World, words: tuple[str, ...]
) -> None:
    assert world.run(*words).code == 0
    runner = (world.site / "vllm_gaudi" / "runner.py").read_text()
    marks = [line.strip() for line in runner.splitlines() if "# fix:" in line]
    assert marks == ["# fix: gamma", "# fix: beta", "# fix: delta"]


def test_another_order_of_the_same_words_is_a_run_with_nothing_to_do(world: World) -> None:
    world.run("delta", "alpha")
    before = world.snapshot(times=True, state=True)
    ran = world.run("alpha", "delta")
    assert ran.last.startswith("applied=0 unchanged=4 files=0")
    assert world.snapshot(times=True, state=True) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["alpah"], "did you mean alpha"),
        (["epsilon"], "epsilon is planned for v1.0.0 but not written yet"),
        (["--without", "gamma", "delta"], "delta requires gamma, which --without leaves out"),
        (["--without", "delta"], "it is opt-in"),
    ],
)
def test_a_refused_selection_is_exit_2_and_changes_nothing(
    world: World, words: list[str], said: str
) -> None:
    before = world.snapshot(times=True, state=True)
    ran = world.run(*words)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert world.snapshot(times=True, state=True) == before


def test_unwritten_default_fixes_are_reported(world: World) -> None:
    ran = world.run()
    assert "not written yet, so left out: epsilon" in ran.out.splitlines()
    assert ran.last == "applied=3 unchanged=0 files=2 profile=v1.0.0"


def test_a_fix_of_another_profile_is_told_to_be_there(world: World) -> None:
    other = world.pack / "profiles" / "v2.0.0.toml"
    other.write_text(other.read_text() + '\n[[fix]]\nid = "zeta"\n')
    ran = world.run("zeta")
    assert ran.code == 2
    assert "it is in v2.0.0 only" in ran.err

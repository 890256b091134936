"""vllm-long-prefill-share on vLLM's real schedulers, with a clock that the steps move.

Eight streams decode as a long prompt comes. The times of a step are those of the recipe's model.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support import standin
from tests.support.scheduling import DECODE_SECONDS, Engine, Setup, recipe_cost

pytestmark = pytest.mark.needs("torch")

STREAMS = [f"stream {i}" for i in range(8)]
LONG = 100_000
SHORT = 600
ALL_THE_TIME = r"AssertionError: long prompts had [\d.]+ s of [\d.]+ s"
modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    standin.plain_vllm()


@pytest.fixture
def ask(monkeypatch):
    """ask(0.5): the share, asynchronous scheduling included, and the recipe's threshold."""

    def variables(share=None, min_tokens=32768, under_async=1):
        for name, value in {
            "VLLM_LONG_PREFILL_SHARE": share,
            "VLLM_LONG_PREFILL_MIN_TOKENS": min_tokens,
            "VLLM_LONG_PREFILL_SHARE_ASYNC": under_async,
        }.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))

    variables()
    return variables


@pytest.fixture
def start(tmp_path):
    """An engine with knobs of `Setup`."""

    def make(cost=recipe_cost, scheduler_class=None, **setup):
        return Engine(tmp_path, Setup(**setup), cost=cost, scheduler_class=scheduler_class)

    return make


@pytest.fixture
def busy(start):
    """An engine in which eight streams decode."""

    def make(tokens=10_000, **knobs):
        engine = start(**knobs)
        for name in STREAMS:
            engine.add(name, 500, tokens=tokens)
        first_token(engine, *STREAMS)
        return engine

    return make


def first_token(engine, *names):
    """Step until these requests have answered."""
    engine.run(lambda: all(n in engine.streams and engine.streams[n].tokens for n in names))


def is_long(step):
    return any(step.chunk_of(name) for name in step.work if name.startswith("long"))


def until_prefilled(engine, name):
    """The steps up to the last chunk of a request's prompt."""
    place = max(place for place, step in enumerate(engine.steps) if step.chunk_of(name))
    return engine.steps[: place + 1]


def assert_share(engine, share, since=0.0):
    """In each stretch from a chunk on, long prompts have the share and one chunk more at most."""
    steps = [step for step in engine.steps if step.begin >= since]
    starts = [place for place, step in enumerate(steps) if is_long(step)]
    assert len(starts) > 10
    for start in starts:
        charged = longest = 0.0
        for step in steps[start : starts[-1] + 1]:
            if is_long(step):
                charged += step.seconds
                longest = max(longest, step.seconds)
            whole = step.end - steps[start].begin
            assert charged <= share * whole + longest + 1e-6, (
                f"long prompts had {charged:.1f} s of {whole:.1f} s"
            )


# --- the fault -----------------------------------------------------------------------------------


@modes
@pytest.mark.red(ALL_THE_TIME)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.9])
def test_share_of_the_wall_time(busy, ask, asynchronous, share):
    """Invariant 1."""
    ask(share)
    engine = busy(asynchronous=asynchronous)
    engine.add("long", LONG, tokens=1)
    first_token(engine, "long")
    assert_share(engine, share)


@modes
@pytest.mark.red(r"AssertionError: a stream has 1\.\d+ of 16\.7\d tokens/s")
def test_half_the_speed_for_twice_the_wait(busy, ask, asynchronous):
    """What the share is for, and what it costs: 1/share of stock's TTFT and one chunk."""
    stock = busy(asynchronous=asynchronous)
    stock.add("long", 250_000, tokens=1)
    first_token(stock, "long")
    ask(0.5)
    engine = busy(asynchronous=asynchronous)
    begin, full_speed = engine.now, 1 / DECODE_SECONDS
    engine.add("long", 250_000, tokens=1)
    first_token(engine, "long")
    speeds = [engine.streams[name].rate(begin, engine.now) for name in STREAMS]
    assert min(speeds) > full_speed / 2, (
        f"a stream has {min(speeds):.2f} of {full_speed:.2f} tokens/s"
    )
    chunk = max(step.seconds for step in engine.steps if is_long(step))
    assert engine.streams["long"].ttft <= stock.streams["long"].ttft / 0.5 + chunk


@modes
@pytest.mark.red(r"AssertionError: the short prompt waited for \d+ s")
def test_short_prompt_is_let_in_while_the_long_one_is_held(busy, ask, asynchronous):
    """Invariant 5."""
    ask(0.5)
    engine = busy(asynchronous=asynchronous)
    engine.add("long", LONG, tokens=1)
    engine.run(lambda: sum(map(is_long, engine.steps)) == 10)
    engine.add("short", SHORT, tokens=1)
    first_token(engine, "short")
    ttft = engine.streams["short"].ttft
    assert ttft < 1.1, f"the short prompt waited for {ttft:.0f} s"
    (step,) = (step for step in engine.steps if "short" in step.work)
    assert not is_long(step)


@modes
@pytest.mark.red(ALL_THE_TIME)
def test_long_prompt_is_held_as_it_waits_and_those_behind_it_go_ahead(busy, ask, asynchronous):
    """A second one comes while there is a debt; the short one behind it does not wait for it."""
    ask(0.5)
    engine = busy(asynchronous=asynchronous)
    engine.add("long", LONG, tokens=1)
    engine.run(lambda: sum(map(is_long, engine.steps)) == 10)
    engine.add("long too", LONG, tokens=1)
    engine.add("short", SHORT, tokens=1)
    first_token(engine, "long", "short")
    assert_share(engine, 0.5)
    assert engine.streams["short"].ttft < 1.1


@modes
@pytest.mark.red(ALL_THE_TIME)
def test_two_long_prompts_share_one_account_and_keep_their_order(busy, ask, asynchronous):
    """Invariant 6."""
    ask(0.5)
    engine = busy(asynchronous=asynchronous)
    engine.add("long 1", LONG, tokens=1)
    engine.add("long 2", LONG, tokens=1)
    first_token(engine, "long 1", "long 2")
    assert_share(engine, 0.5)
    last = max(place for place, step in enumerate(engine.steps) if step.chunk_of("long 1"))
    assert not any(step.chunk_of("long 2") for step in engine.steps[:last])


@modes
@pytest.mark.red(ALL_THE_TIME)
def test_account_outlives_a_preemption(start, ask, asynchronous):
    """Invariant 8. Its blocks are taken for the streams; it waits again, and is held there."""
    ask(0.5)
    engine = start(asynchronous=asynchronous, blocks=318, block_size=128, sequences=10)
    for name in STREAMS:  # soon they need a block each, that the long one has; then some end
        engine.add(name, 509, tokens=100 if name < STREAMS[4] else 4000)
    first_token(engine, *STREAMS)
    begin = engine.now
    engine.add("long", 36_000, tokens=3)
    preempted = engine.scheduler._preempt_request
    taken = []

    def watch(request, *args, **more):
        taken.append(request.request_id)
        return preempted(request, *args, **more)

    engine.scheduler._preempt_request = watch
    first_token(engine, "long")
    assert "long" in taken, "the pool is too large for this test"
    steps = sum(map(is_long, engine.steps))
    assert steps > 12, "it did not begin anew"
    assert_share(engine, 0.5, since=begin)


@modes
@pytest.mark.red(r"AssertionError: the next long prompt had a chunk at once")
def test_abort_does_not_wipe_out_the_charge(busy, ask, asynchronous):
    """Invariant 9: the chunk in flight is still executed, and costs what it costs."""
    ask(0.5)
    engine = busy(asynchronous=asynchronous)
    engine.add("long", LONG, tokens=1)
    engine.run(lambda: any(map(is_long, engine.steps)))
    engine.abort("long")
    engine.add("long too", LONG, tokens=1)
    chunk = next(step for step in engine.steps if is_long(step))
    engine.run(lambda: any(step.chunk_of("long too") for step in engine.steps))
    held = engine.steps[-1].begin - chunk.end
    assert held > chunk.seconds - DECODE_SECONDS, "the next long prompt had a chunk at once"


@modes
@pytest.mark.red(ALL_THE_TIME)
def test_streams_that_come_within_a_long_prefill(start, ask, asynchronous):
    """Nothing is charged before somebody decodes, and everything from then on."""
    ask(0.5)
    engine = start(asynchronous=asynchronous)
    engine.add("long", LONG, tokens=1)
    engine.run(lambda: len(engine.steps) == 10)
    assert all(map(is_long, engine.steps))
    for name in STREAMS:  # short enough for what the chunk leaves of the budget
        engine.add(name, 20, tokens=10_000)
    first_token(engine, *STREAMS)
    begin = engine.now
    first_token(engine, "long")
    assert_share(engine, 0.5, since=begin)


# --- neighbours ----------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_no_step_is_empty(busy, ask, asynchronous, share):
    """Invariant 2, over the streams' ends too: an asynchronous one has nothing to run in its last
    step, and must not hold anybody.
    """
    ask(share)
    engine = busy(asynchronous=asynchronous, tokens=60)
    engine.add("long", LONG, tokens=5)
    engine.run()
    assert all(step.work for step in until_prefilled(engine, "long"))
    assert len(engine.streams["long"].tokens) == 5


@modes
def test_held_until_the_last_stream_is_done_and_no_longer(busy, ask, asynchronous):
    """A debt dies with the last one who decodes: the next step has a chunk."""
    ask(0.01)
    engine = busy(asynchronous=asynchronous, tokens=6)
    engine.add("long", LONG, tokens=1)
    first_token(engine, "long")
    steps = until_prefilled(engine, "long")
    place = max(i for i, step in enumerate(steps) if STREAMS[0] in step.work)
    assert all(map(is_long, steps[place + 1 :]))
    assert all(step.work for step in steps)


@modes
def test_nobody_decodes(start, ask, asynchronous):
    """Invariant 3."""
    ask(0.1)
    engine = start(asynchronous=asynchronous)
    engine.add("long", LONG, tokens=1)
    engine.add("long too", LONG, tokens=1)
    first_token(engine, "long")
    assert all(step.chunk_of("long") for step in until_prefilled(engine, "long"))


@modes
def test_prompt_below_the_threshold_is_not_held(busy, ask, asynchronous):
    """Invariant 4, at the threshold's edge."""
    ask(0.1, min_tokens=30_001)
    engine = busy(asynchronous=asynchronous)
    engine.add("medium", 30_000, tokens=1)
    first_token(engine, "medium")
    steps = until_prefilled(engine, "medium")
    first = next(place for place, step in enumerate(steps) if step.chunk_of("medium"))
    assert all(step.chunk_of("medium") for step in steps[first:])


@modes
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_held_no_longer_than_it_owes(busy, ask, asynchronous, share):
    """Invariant 7: what the chunk costs, and the whole steps in which it is paid."""
    ask(share)
    engine = busy(asynchronous=asynchronous)
    engine.add("long", 60_000, tokens=1)
    first_token(engine, "long")
    chunks = [step for step in engine.steps if is_long(step)]
    for one, next_one in pairwise(chunks):
        price = one.seconds * (1 - share) / share
        assert next_one.begin - one.end < price + (1 + asynchronous) * DECODE_SECONDS + 1e-6


@modes
@pytest.mark.parametrize("share", [None, 0.5])
def test_chunks_end_at_block_boundaries(busy, ask, asynchronous, share):
    """Invariant 10: what a chunk is does not change, only when it runs."""
    ask(share)
    engine = busy(asynchronous=asynchronous)
    engine.add("long", LONG, tokens=1)
    first_token(engine, "long")
    chunks = [step.chunk_of("long") for step in engine.steps if is_long(step)]
    assert sum(chunks) == LONG
    assert set(chunks[:-2]) == {3840}


@modes
def test_tokens_are_the_same(busy, ask, asynchronous):
    """Invariant 11, for the schedulers' part of it: none lost, repeated or out of order."""
    answers = []
    for share in (None, 0.5):
        ask(share)
        engine = busy(asynchronous=asynchronous, tokens=300)
        engine.add("long", LONG, tokens=40)
        engine.run()
        answers.append({name: stream.tokens for name, stream in engine.streams.items()})
    assert answers[0] == answers[1]
    assert [len(answers[0][name]) for name in (*STREAMS, "long")] == [300] * 8 + [40]


@modes
def test_priority_order_among_long_prompts(busy, ask, asynchronous):
    """The more urgent one first, as in stock."""
    ask(0.5)
    engine = busy(asynchronous=asynchronous, policy="priority")
    engine.add("long 1", 60_000, tokens=1, priority=1)
    engine.add("long 0", 60_000, tokens=1, priority=0)
    first_token(engine, "long 1", "long 0")
    assert engine.streams["long 0"].times < engine.streams["long 1"].times

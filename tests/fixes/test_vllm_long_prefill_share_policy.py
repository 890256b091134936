"""The account of vllm-long-prefill-share alone: no vLLM, no torch, any clock."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import hypothesis
import pytest

from fixes.vllm_long_prefill_share import long_prefill_share as module
from fixes.vllm_long_prefill_share.long_prefill_share import LongPrefillShare, Settings

strategies = hypothesis.strategies
no_deadline = hypothesis.settings(deadline=None)  # a busy machine is no failure

SHARE, MIN_TOKENS, ASYNC = module.SHARE, module.MIN_TOKENS, module.ASYNC


@pytest.fixture
def environment(monkeypatch):
    """environment(SHARE="0.5"): these variables and no other of the three."""

    def put(**values):
        for name in (SHARE, MIN_TOKENS, ASYNC):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(getattr(module, name), value)

    return put


def request(name, tokens, computed, pending=0, max_tokens=100, prompt=None):
    return SimpleNamespace(
        request_id=name,
        num_tokens=tokens,
        num_computed_tokens=computed,
        num_output_placeholders=pending,
        num_prompt_tokens=tokens if prompt is None else prompt,
        max_tokens=max_tokens,
    )


class World:
    """An account, and an engine that is told what to run."""

    def __init__(self, share):
        self.now = 100.0
        self.account = LongPrefillShare(share, 1000, 10_000, clock=lambda: self.now)
        self.long = request("long", 5000, 0)
        self.stream = request("stream", 10, 9, prompt=5)
        self.steps = []

    def schedule(self, decoding=True, wanted=True):
        """A step's output, with the long prompt in it if that is allowed (and wanted)."""
        running = [self.long] * wanted + [self.stream] * decoding
        names = ["stream"] * decoding
        if wanted and not self.account.holds(self.long, running):
            names.append("long")
        output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))
        self.account.scheduled(output)
        return output

    def complete(self, output, seconds):
        begin, self.now = self.now, self.now + seconds
        self.account.completed(output)
        self.steps.append((begin, self.now, "long" in output.num_scheduled_tokens))

    def step(self, seconds, **how):
        output = self.schedule(**how)
        self.complete(output, seconds)
        return "long" in output.num_scheduled_tokens


# --- what the environment says -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Settings(1.0, 32768, False)),
        ({"SHARE": "0.5"}, Settings(0.5, 32768, False)),
        ({"SHARE": "1"}, Settings(1.0, 32768, False)),
        (
            {"SHARE": "1e-3", "MIN_TOKENS": "1", "ASYNC": "1"},
            Settings(0.001, 1, True),
        ),
        ({"SHARE": ".25", "ASYNC": "0"}, Settings(0.25, 32768, False)),
    ],
)
def test_settings(environment, values, expected):
    environment(**values)
    assert Settings.from_environment() == expected


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        *(("SHARE", t, "above 0 and at most 1") for t in ("0", "-0.5", "1.01", "50", "half")),
        *(("SHARE", t, "above 0 and at most 1") for t in ("", "nan", "inf", "50%")),
        *(("MIN_TOKENS", t, "a positive whole number") for t in ("0", "-1", "32k", "1.5", "")),
        *(("ASYNC", t, "0 or 1") for t in ("2", "-1", "true", "")),
    ],
)
def test_value_that_makes_no_sense(environment, name, text, what):
    """Each is named with what it may be, also where the share itself is unset."""
    environment(**{name: text})
    expected = f"{getattr(module, name)} must be {what}, not {text!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        Settings.from_environment()


def scheduler(asynchronous=False, pipeline=1, data=1):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline, data_parallel_size=data),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        max_model_len=4096,
    )


@pytest.mark.parametrize(
    ("values", "set_up", "warning"),
    [
        ({}, {}, None),
        ({"SHARE": "1"}, {}, None),
        ({"SHARE": "0.5"}, {"asynchronous": True}, f"no effect .* without {ASYNC}=1"),
        ({"SHARE": "0.5"}, {"pipeline": 2}, "no effect with pipeline or data parallelism"),
        ({"SHARE": "0.5", "ASYNC": "1"}, {"data": 2}, "no effect with pipeline or data"),
    ],
)
def test_left_off(environment, caplog, values, set_up, warning):
    """Asked for in vain it says so, once."""
    environment(**values)
    assert module.for_scheduler(scheduler(**set_up)) is None
    assert len(caplog.messages) == bool(warning)
    assert not warning or re.search(warning, caplog.messages[0])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_switched_on(environment, asynchronous):
    environment(SHARE="0.25", MIN_TOKENS="7", ASYNC="1")
    account = module.for_scheduler(scheduler(asynchronous))
    assert (account.min_tokens, account.max_model_len) == (7, 4096)


def test_needs_the_standard_library_alone():
    """The scheduler imports it as it starts."""
    code = f"import sys; exec(open({module.__file__!r}).read()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


# --- the account ---------------------------------------------------------------------------------


def test_a_chunk_is_paid_by_the_others_time():
    world = World(0.5)
    assert world.step(1.0)
    assert world.account.owed == pytest.approx(1.0)
    ran = [world.step(0.3) for _ in range(5)]
    assert ran == [False, False, False, False, True]
    # What was paid too much is kept: 1.2 s of the others, of which 1.0 was due, then 0.3 more.
    assert world.account.owed == pytest.approx(0.1)


def test_time_before_it_comes_buys_nothing():
    world = World(0.5)
    for _ in range(50):
        world.step(1.0, wanted=False)
    assert [world.step(0.5) for _ in range(3)] == [True, False, True]


def test_idle_time_pays_but_buys_nothing():
    world = World(0.1)
    world.step(1.0)
    world.now += 3600
    world.step(0.1, wanted=False)
    assert world.account.owed == 0


def test_nobody_decodes():
    world = World(0.1)
    world.step(1.0)
    assert world.account.owed > 8
    assert all(world.step(1.0, decoding=False) for _ in range(5))
    assert world.step(1.0), "chunks that nobody had to wait for are not charged"
    assert not world.step(0.1)


def test_one_chunk_in_flight():
    """Asynchronous: its cost is not known yet, so no other is let in."""
    world = World(0.5)
    first = world.schedule()
    second = world.schedule()
    assert "long" in first.num_scheduled_tokens
    assert "long" not in second.num_scheduled_tokens
    world.complete(first, 1.0)
    assert world.account.owed == pytest.approx(1.0)
    world.complete(second, 0.25)
    assert world.account.owed == pytest.approx(0.75), "the second began as the first ended"


def test_scheduled_but_not_run():
    """Let in, and then there was no memory for it: nothing to charge."""
    world = World(0.5)
    assert not world.account.holds(world.long, [world.stream])
    output = SimpleNamespace(num_scheduled_tokens={"stream": 1})
    world.account.scheduled(output)
    world.complete(output, 1.0)
    assert world.account.owed == 0


def test_hold_that_left_a_step_empty_is_lifted():
    world = World(0.01)
    world.step(1.0)
    assert world.account.holds(world.long, [world.stream])
    empty = SimpleNamespace(num_scheduled_tokens={})
    world.account.scheduled(empty)
    world.complete(empty, 0.001)
    assert world.step(1.0)


def test_output_that_is_not_known():
    world = World(0.5)
    world.account.completed(SimpleNamespace(num_scheduled_tokens={}))
    assert world.account.owed == 0


@pytest.mark.parametrize(
    ("decoder", "runs"),
    [
        (request("d", 20, 19, prompt=10), True),
        (request("d", 20, 20, pending=1, prompt=10), True),
        (request("d", 20, 20, pending=1, prompt=10, max_tokens=11), False),  # its last is coming
        (request("d", 20, 20, pending=1, prompt=10, max_tokens=12), True),
        (request("d", 9999, 9999, pending=1, prompt=10, max_tokens=99_999), False),  # full length
        (request("d", 20, 5, prompt=20), False),  # a prefill
        (request("d", 20, 18, prompt=10), False),  # computes anew what it had before a preemption
    ],
)
def test_who_decodes(decoder, runs):
    world = World(0.5)
    world.step(1.0)
    assert world.account.holds(world.long, [world.long, decoder]) is runs


@pytest.mark.parametrize(
    ("one", "is_long"),
    [
        (request("r", 1000, 0), True),
        (request("r", 999, 0), False),
        (request("r", 1000, 999), False),  # all but a token is cached or loaded
        (request("r", 1000, 998), True),
        (request("r", 1200, 0, prompt=600), True),  # preempted: its answer is computed anew too
    ],
)
def test_who_is_long(one, is_long):
    world = World(0.5)
    world.step(1.0)
    assert world.account.holds(one, [world.stream]) is is_long


seconds = strategies.floats(0.001, 10.0)


@no_deadline
@hypothesis.given(
    share=strategies.floats(0.02, 0.98),
    depth=strategies.integers(1, 2),
    steps=strategies.lists(
        strategies.tuples(seconds, seconds, strategies.booleans(), strategies.floats(0, 1)),
        min_size=1,
        max_size=60,
    ),
)
def test_share_in_every_stretch(share, depth, steps):
    """Invariant 1, whatever steps last. In tuples: a chunk's and another step's seconds, whether
    there is a long prompt, idle seconds before.
    """
    world = World(share)
    queue = []
    for chunk, other, wanted, idle in steps:
        world.now += idle
        queue.append((world.schedule(wanted=wanted), chunk, other))
        if len(queue) == depth:
            output, chunk, other = queue.pop(0)
            # A step with a chunk decodes as well.
            is_long = "long" in output.num_scheduled_tokens
            world.complete(output, chunk + other if is_long else other)
    for place, (begin, _, is_long) in enumerate(world.steps):
        charged = longest = 0.0
        for start, end, has_chunk in world.steps[place:] if is_long else ():
            charged += (end - start) * has_chunk
            longest = max(longest, (end - start) * has_chunk)
            assert charged <= share * (end - begin) + longest + 1e-6


@no_deadline
@hypothesis.given(share=strategies.floats(0.02, 0.98), chunk=seconds, other=seconds)
def test_is_let_in_again(share, chunk, other):
    """Invariant 7: held for what it owes and one step."""
    world = World(share)
    assert world.step(chunk)
    held = 0
    while not world.step(other):
        held += 1
    assert held * other <= chunk * (1 - share) / share + other + 1e-6


@no_deadline
@hypothesis.given(
    share=strategies.floats(0.1, 0.75),
    depth=strategies.integers(1, 2),
    ratio=strategies.floats(0.01, 0.1),
)
def test_share_is_used(share, depth, ratio):
    """In the long run it is the share, not less: what was paid too much is made up for."""
    world = World(share)
    queue = []
    for _ in range(1000):
        queue.append(world.schedule())
        if len(queue) == depth:
            output = queue.pop(0)
            world.complete(output, 1.0 if "long" in output.num_scheduled_tokens else ratio)
    whole = world.steps[-1][1] - world.steps[0][0]
    charged = sum(end - begin for begin, end, is_long in world.steps if is_long)
    assert charged >= share * whole - 2

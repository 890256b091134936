"""vllm-long-prefill-share under vllm_gaudi: its own async scheduler, and its engine."""

from __future__ import annotations

import pytest

from tests.support.scheduling import Engine, Setup

HELD = r"AssertionError: the long prompt had a chunk in each of its \d+ steps"


def held_steps(steps):
    """Of the steps from a prompt's first chunk to its last, how many have none, and all."""
    places = [place for place, chunk in enumerate(steps) if chunk]
    steps = steps[places[0] : places[-1] + 1]
    return sum(not chunk for chunk in steps), len(steps)


@pytest.mark.needs("torch", "vllm_gaudi")
@pytest.mark.red(HELD)
def test_gaudi_s_scheduler_class(tmp_path, monkeypatch):
    """`HPUAsyncScheduler` takes the place of vLLM's when the plugin is loaded."""
    from tests.support import standin

    standin.install()
    from vllm_gaudi.v1.core.sched.hpu_async_scheduler import HPUAsyncScheduler

    monkeypatch.setenv("VLLM_LONG_PREFILL_SHARE", "0.5")
    monkeypatch.setenv("VLLM_LONG_PREFILL_SHARE_ASYNC", "1")
    engine = Engine(tmp_path, Setup(asynchronous=True), scheduler_class=HPUAsyncScheduler)
    engine.add("stream", 500, tokens=10_000)
    engine.run(lambda: bool(engine.streams) and bool(engine.streams["stream"].tokens))
    begin = engine.now
    engine.add("long", 100_000, tokens=1)
    engine.run(lambda: "long" in engine.streams and bool(engine.streams["long"].tokens))
    steps = [step.chunk_of("long") for step in engine.steps]
    held, among = held_steps(steps)
    assert held, f"the long prompt had a chunk in each of its {among} steps"
    charged = sum(step.seconds for step in engine.steps if step.chunk_of("long"))
    assert charged / (engine.now - begin) == pytest.approx(0.5, abs=0.05)


@pytest.mark.needs("engine")
@pytest.mark.red(HELD)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_engine(engines, words, asynchronous):
    """A held prompt leaves the worker's batch and comes back: the answers are the same ones."""
    share = (
        ("VLLM_LONG_PREFILL_SHARE", "0.2"),
        ("VLLM_LONG_PREFILL_SHARE_ASYNC", "1"),
        ("VLLM_LONG_PREFILL_MIN_TOKENS", "500"),
    )
    engine = engines(asynchronous=asynchronous, chunk=128, environment=share)
    prompts = [words(1, 40), words(2, 700), words(3, 30)]
    alone = [engine.tokens([prompt], length=60)[0] for prompt in prompts]
    chunks = []
    schedule = engine.scheduler.schedule

    def recorded(*arguments):
        output = schedule(*arguments)
        chunks.append(max(output.num_scheduled_tokens.values(), default=0) > 60)
        return output

    engine.scheduler.schedule = recorded
    try:
        together = engine.tokens(prompts, length=60)
    finally:
        del engine.scheduler.schedule
    assert together == alone
    held, among = held_steps(chunks)
    assert held, f"the long prompt had a chunk in each of its {among} steps"

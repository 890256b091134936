"""sampling-rows-refresh on the engine: a prompt in chunks beside one that is done before it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("engine")

modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def engine(engines, asynchronous):
    """Three requests in flight, prompts in chunks of a block beside each other."""
    return engines(
        model="dense",
        asynchronous=asynchronous,
        prefix_caching=True,
        sequences=3,
        arguments=(("long_prefill_token_threshold", 128),),
    )


def run(engine, *requests):
    """The tokens of requests in flight together, (prompt, sampling parameters) each."""
    from vllm import SamplingParams

    params = [SamplingParams(**({"ignore_eos": True} | options)) for _, options in requests]
    outputs = engine.generate([prompt for prompt, _ in requests], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@modes
@pytest.mark.red(r"not the only token that top_k=1 leaves")
def test_long_prompt_keeps_its_top_k(engine, words):
    """The second request's prompt is done first: the rows change places, and nobody comes or goes.

    When the long prompt is done, it is sampled in a quiet step, or in one with a swap.
    """
    from tests.emulation.reference import regrets

    prompt = words(11, 900)
    certain = {"temperature": 1.0, "top_k": 1, "max_tokens": 6}
    anything = {"temperature": 2.0, "max_tokens": 20}
    answer, _ = run(engine, (prompt, certain), (words(12, 200), anything))
    worst = max(regrets(engine.checkpoint, prompt, answer))
    assert worst < 0.1, f"{answer}: not the only token that top_k=1 leaves ({worst:.2f})"


@modes
@pytest.mark.red(r"outside its list")
def test_each_request_keeps_its_allowed_tokens(engine, words):
    allowed = [list(range(30, 40)), list(range(60, 70))]
    options = [
        {"temperature": 0.0, "allowed_token_ids": ids, "max_tokens": length}
        for ids, length in zip(allowed, (6, 20), strict=True)
    ]
    answers = run(engine, (words(13, 900), options[0]), (words(14, 200), options[1]))
    for ids, answer in zip(allowed, answers, strict=True):
        assert set(answer) <= set(ids), f"{answer} is outside its list {ids}"


@modes
@pytest.mark.red(r"not the one with its penalty")
def test_long_prompt_keeps_its_repetition_penalty(engine, words):
    """With it the answer is none of its prompt's words, which are nearly all that there are."""
    seen = range(8, 240)
    prompt = (list(seen) * 4)[:900]
    penalty = {"temperature": 0.0, "repetition_penalty": 100.0, "max_tokens": 1}
    plain = {"temperature": 0.0, "max_tokens": 20}
    answer, _ = run(engine, (prompt, penalty), (words(15, 200), plain))
    assert answer[0] not in seen, f"{answer} is not the one with its penalty"

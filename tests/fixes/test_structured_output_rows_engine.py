"""structured-output-rows on the engine: a structured request beside a prompt in chunks."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

import pytest

pytestmark = pytest.mark.needs("engine")

modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
LENGTH = 14
GRAMMAR = set(range(20, 30))


@pytest.fixture
def engine(engines, asynchronous, monkeypatch):
    """Three requests in flight, prompts in chunks of a block beside each other."""
    # vLLM imports every backend's module to look at a grammar; the engine here uses xgrammar.
    for name in ("lmformatenforcer", "lmformatenforcer.integrations.vllm"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name, MagicMock()))
    made = engines(
        model="dense",
        asynchronous=asynchronous,
        prefix_caching=True,
        sequences=3,
        arguments=(("long_prefill_token_threshold", 128),),
    )
    # A grammar that is compiled on a thread is ready in this step or the next, as it happens.
    manager = made.scheduler.structured_output_manager
    monkeypatch.setattr(manager, "_use_async_grammar_compilation", False)
    return made


def structured(**options):
    """Greedy, and only words of the grammar."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex=f"(w2[0-9]){{{LENGTH}}}")
    return SamplingParams(temperature=0.0, max_tokens=LENGTH, structured_outputs=grammar, **options)


def plain(**options):
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "max_tokens": 5} | options))


def run(engine, words, params, grammar_params):
    """A prompt of eight chunks and, decoding while it ends, a request with a grammar.

    How stock fails in the synchronous mode depends on whether the step before had a grammar: rows
    are missing (IndexError), or a token is sampled from the middle of a prompt.
    """
    prompts = [words(21, 900), words(22, 20)]
    engine.generate(prompts[1:], grammar_params)  # compiles the grammar, which is then kept
    engine.llm.reset_prefix_cache()
    return engine.generate(prompts, [params, grammar_params])


def tokens(output):
    return list(output.outputs[0].token_ids)


@modes
@pytest.mark.red(r"IndexError: index 1 is out of bounds|assert \{.*\} <= \{(20, 21, |100, 101)")
def test_both_keep_their_own_parameters(engine, words):
    other, grammar = run(engine, words, plain(allowed_token_ids=[100, 101]), structured())
    assert set(tokens(other)) <= {100, 101}
    assert set(tokens(grammar)) <= GRAMMAR
    assert len(tokens(grammar)) == LENGTH


@modes
@pytest.mark.red(r"IndexError: index 1 is out of bounds|not what the model says")
def test_long_prompt_is_answered_as_alone(engine, words):
    """A chunk that does not end its prompt gives no token; the first is that of its last row."""
    from tests.emulation.reference import regrets

    hot = structured()
    hot.temperature = 2.0
    other, grammar = run(engine, words, plain(temperature=1.0, top_k=1), hot)
    worst = max(regrets(engine.checkpoint, words(21, 900), tokens(other)))
    assert worst < 0.1, f"{tokens(other)}: not what the model says, {worst:.2f} below its best"
    assert set(tokens(grammar)) <= GRAMMAR


@pytest.mark.parametrize(
    "asynchronous",
    [
        pytest.param(
            False, marks=pytest.mark.red(r"IndexError: index 1 is out of bounds|assert 4 == 5")
        ),
        True,  # each prompt has a row, and the logprobs were in the order of the rows before
    ],
    ids=["sync", "async"],
)
def test_logprobs_are_those_of_the_row(engine, words):
    params = plain(allowed_token_ids=[100, 101], logprobs=2)
    for output in run(engine, words, params, structured(logprobs=2)):
        sampled = output.outputs[0]
        assert len(sampled.logprobs) == len(sampled.token_ids)
        for token, logprobs in zip(sampled.token_ids, sampled.logprobs, strict=True):
            assert token in logprobs, f"{token} has no logprob of its own: {logprobs}"

"""logitsprocs-rows on the engine: requests with and without such parameters in flight together."""

from __future__ import annotations

import sys
from functools import cache
from unittest.mock import MagicMock

import pytest

pytestmark = pytest.mark.needs("engine")

LENGTH = 12


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def asynchronous(request):
    return request.param


@pytest.fixture
def engine(engines, asynchronous):
    return engines(model="dense", asynchronous=asynchronous)


def generate(engine, *requests):
    """The completions of requests in flight together, (prompt, sampling options) each."""
    from vllm import SamplingParams

    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": LENGTH}
    params = [SamplingParams(**greedy | options) for _, options in requests]
    outputs = engine.generate([prompt for prompt, _ in requests], params)
    return [output.outputs[0] for output in outputs]


def run(engine, *requests):
    """Their token ids."""
    return [list(completion.token_ids) for completion in generate(engine, *requests)]


def assert_greedy(engine, prompt, answer):
    from tests.emulation.reference import is_greedy

    assert is_greedy(engine.checkpoint, prompt, answer), "not the greedy answer"


@pytest.mark.red(r"\[\d+, .*\] == \[77, 77")
def test_logit_bias_forces_a_token(engine, words):
    plain, other = words(1, 20), words(2, 30)
    first, second, third = run(
        engine, (plain, {}), (other, {"logit_bias": {77: 100.0}}), (other, {})
    )
    assert second == [77] * LENGTH
    assert_greedy(engine, plain, first)
    assert_greedy(engine, other, third)


@pytest.mark.red(r"assert not \(\{\d+")
def test_logit_bias_bans_tokens(engine, words):
    plain, other = words(1, 20), words(2, 30)
    (usual,) = run(engine, (other, {}))
    bias = dict.fromkeys(usual, -100.0)
    first, second = run(engine, (plain, {}), (other, {"logit_bias": bias}))
    assert not set(usual) & set(second)
    assert_greedy(engine, plain, first)


@pytest.mark.red(r"not the greedy answer")
def test_min_p(engine, words):
    """With min_p 1 only the likeliest token is left, however hot; neighbours are sampled freely."""
    hot = {"temperature": 2.0}
    prompts = [words(seed, 20) for seed in (1, 2, 3)]
    first, second, third = run(
        engine, (prompts[0], hot), (prompts[1], hot | {"min_p": 1.0}), (prompts[2], {})
    )
    assert_greedy(engine, prompts[1], second)
    assert_greedy(engine, prompts[2], third)
    with pytest.raises(AssertionError, match="not the greedy answer"):
        assert_greedy(engine, prompts[0], first)


@pytest.mark.red(r"assert \d+ not in \[|assert 1 >= 4")
def test_min_tokens_holds_the_stop_token_back(engine, words):
    """The stop token is what the request would say first."""
    plain, other = words(1, 20), words(2, 30)
    (usual,) = run(engine, (other, {}))
    stop = usual[0]
    _, answer = run(engine, (plain, {}), (other, {"stop_token_ids": [stop], "min_tokens": 4}))
    assert len(answer) >= 4
    assert stop not in answer[:4]


@pytest.mark.red(r"\[\d+, \d+, \d+, \d+\] == \[12, 2, 4, 7\]")
def test_min_tokens_is_released_on_time(engine, words):
    """These requests always want to stop: they do so as soon as they may."""
    wants_to_stop = {"logit_bias": {77: 100.0}, "stop_token_ids": [77]}
    requests = [(words(1, 20), {})]
    for least in (1, 3, 6):
        requests.append((words(least, 25), wants_to_stop | {"min_tokens": least}))
    answers = run(engine, *requests)
    assert [len(answer) for answer in answers] == [LENGTH, 2, 4, 7]
    assert [answer.index(77) for answer in answers[1:]] == [1, 3, 6]


@pytest.mark.red(r"forced tokens")
def test_requests_come_and_go(engine, words):
    """Three times as many as fit, of all lengths: rows change hands all the time."""
    requests, expected = [], []
    for n in range(12):
        length = 1 + 5 * n % 7
        bias = {"logit_bias": {70 + n: 100.0}} if n % 3 else {}
        requests.append((words(n, 10 + n), {"max_tokens": length} | bias))
        expected.append([70 + n] * length if bias else None)
    answers = run(engine, *requests)
    for (prompt, _), answer, forced in zip(requests, answers, expected, strict=True):
        if forced is None:
            assert_greedy(engine, prompt, answer)
        else:
            assert answer == forced, "forced tokens"


@pytest.mark.red(r"forced tokens")
def test_a_finished_request_leaves_nothing(engine, words):
    plain = words(1, 20)
    forced = {"logit_bias": {77: 100.0}, "min_tokens": 2, "max_tokens": 3, "min_p": 0.5}
    first, second = run(engine, (words(2, 20), forced), (plain, {}))
    assert first == [77] * 3, "forced tokens"
    assert_greedy(engine, plain, second)
    (again,) = run(engine, (plain, {}))  # the step in which the runner hears of the end
    assert_greedy(engine, plain, again)
    for processor in engine.runner.input_batch.logitsprocs.all:
        for name in ("biases", "min_toks", "min_p_count"):
            assert not getattr(processor, name, None)


@pytest.mark.red(r"\[\[\d+\], \[\d+\]\] == \[\[201\], \[101\]\]")
def test_structured_output(engine, words, monkeypatch):
    """The bias decides between the words that the grammar leaves."""
    # vLLM imports every backend's module to look at a grammar; the engine here uses xgrammar.
    monkeypatch.setitem(sys.modules, "lmformatenforcer", MagicMock())
    monkeypatch.setitem(sys.modules, "lmformatenforcer.integrations.vllm", MagicMock())
    from vllm.sampling_params import StructuredOutputsParams

    def choosing(token):
        structure = StructuredOutputsParams(choice=["w101", "w201"])
        return {"structured_outputs": structure, "max_tokens": 1, "logit_bias": {token: 100.0}}

    answers = run(engine, (words(1, 20), choosing(201)), (words(1, 20), choosing(101)))
    assert answers == [[201], [101]]


@pytest.mark.red(r"assert \d+ != \d+")
def test_bad_words_of_several_tokens_under_async_scheduling(engines, words):
    engine = engines(model="dense", asynchronous=True)
    prompt = words(2, 30)
    (usual,) = run(engine, (prompt, {}))
    banned = f"w{usual[3]} w{usual[4]}"
    (answer,) = run(engine, (prompt, {"bad_words": [banned]}))
    assert answer[:4] == usual[:4]
    assert answer[4] != usual[4]


@pytest.mark.red(r"says a token twice", release="v0.26.0")
def test_penalties_under_async_scheduling(engines, words):
    engine = engines(model="dense", asynchronous=True)
    requests = [(words(seed, 20), {"repetition_penalty": 100.0}) for seed in (1, 2, 3)]
    for answer in run(engine, (words(4, 20), {}), *requests)[1:]:
        assert len(set(answer)) == len(answer), "says a token twice"


@cache
def make_counting():
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Counting(AdapterLogitsProcessor):
        """Makes a request with `count_from` say that token, then the one after its last, ..."""

        def is_argmax_invariant(self):
            return False

        def new_req_logits_processor(self, params):
            first = (params.extra_args or {}).get("count_from")
            if first is None:
                return None

            def process(output_ids, logits):
                logits[output_ids[-1] + 1 if output_ids else first] = 1000.0
                return logits

            return process

    return Counting


@pytest.mark.red(r"\[\d+, .*\] == \[80, 81, 82")
def test_custom_processor(engines, asynchronous, words):
    """Handed to the engine; reads the tokens that its request has said."""
    engine = engines(
        model="dense",
        asynchronous=asynchronous,
        arguments=(("logits_processors", [make_counting()]),),
    )
    plain, other = words(1, 20), words(2, 30)
    counting = {"extra_args": {"count_from": 80}}
    first, second, third = run(
        engine,
        (plain, {}),
        (other, counting),
        (other, {"extra_args": {"count_from": 60}, "max_tokens": 5}),
    )
    assert second == list(range(80, 80 + LENGTH))
    assert third == list(range(60, 65))
    assert_greedy(engine, plain, first)

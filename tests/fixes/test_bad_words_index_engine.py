"""bad-words-index on the engine: two requests in flight, one of them with bad words."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("engine")

LENGTH = 12
modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def engine(engines, asynchronous):
    return engines(model="dense", asynchronous=asynchronous)


def run(engine, *requests):
    """The answers to requests in flight together, (prompt, ids of the words it bans) each."""
    from vllm import SamplingParams

    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": LENGTH}
    params = [
        SamplingParams(**greedy, bad_words=[f"w{token}" for token in banned] or None)
        for _, banned in requests
    ]
    outputs = engine.generate([prompt for prompt, _ in requests], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def two_requests(engine, words):
    """A plain request and one with words; the words would change the answers of both."""
    plain, other = (words(64, 20), []), words(61, 30)  # the first token of 64 is far from a tie
    answers = run(engine, plain) + run(engine, (other, []))
    return plain, (other, sorted({token for answer in answers for token in answer}))


def assert_as_alone(engine, requests):
    """Each request's answer is the one it gets alone, its own words banned and no others."""
    from tests.emulation.reference import same_up_to_ties

    alone = [run(engine, request)[0] for request in requests]
    together = run(engine, *requests)
    for (prompt, banned), expected, answer in zip(requests, alone, together, strict=True):
        assert not set(banned) & set(answer)
        assert same_up_to_ties(engine.checkpoint, prompt, expected, answer), (expected, answer)


@modes
@pytest.mark.red(r"IndexError: index 1 is out of bounds for dimension 0 with size 1")
def test_words_of_the_second_request(engine, words):
    plain, banning = two_requests(engine, words)
    assert_as_alone(engine, [plain, banning])


@modes
@pytest.mark.red(r"AssertionError: \(\[.*\], \[.*\]\)")
def test_words_of_the_first_request(engine, words):
    """On stock they are banned for the second request too, which is sampled as row 0."""
    plain, banning = two_requests(engine, words)
    assert_as_alone(engine, [banning, plain])


@modes
def test_a_request_with_words_alone(engine, words):
    _, banning = two_requests(engine, words)
    (answer,) = run(engine, banning)
    assert not set(banning[1]) & set(answer)

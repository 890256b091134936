"""seeded-sampling on the engine: the tokens are those that the seed's numbers pick.

A token is checked against the same weights in transformers and the numbers that a generator with
the request's seed gives, one row of the vocabulary a token: whatever else the engine does, it must
have picked that token, up to ties.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("engine")

LENGTH = 10
NOT_THE_SEEDS = r"seed \d+ did not pick"
modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def run(engine, *requests):
    """The answers to requests in flight together, (prompt, seed) each; None is no seed."""
    from vllm import SamplingParams

    common = {"temperature": 1.0, "ignore_eos": True, "max_tokens": LENGTH}
    params = [SamplingParams(**common, seed=seed) for _, seed in requests]
    outputs = engine.generate([prompt for prompt, _ in requests], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_picked(engine, requests, answers):
    import torch

    from tests.emulation import reference

    for (prompt, seed), answer in zip(requests, answers, strict=True):
        assert len(answer) == LENGTH
        if seed is None:
            continue
        generator = torch.Generator().manual_seed(seed)
        scores = reference.logits(engine.checkpoint, prompt, answer)
        for place, (row, token) in enumerate(zip(scores, answer, strict=True)):
            race = row - torch.empty_like(row).exponential_(generator=generator).log()
            short = float(race.max() - race[token])
            assert short <= 2 * reference.TIE, f"seed {seed} did not pick token {place}: {short}"


def check(engine, *requests):
    assert_picked(engine, requests, run(engine, *requests))


@modes
def test_alone(engines, words, asynchronous):
    """A neighbour: one row in a bucket of one, nobody draws for anybody."""
    check(engines(model="dense", asynchronous=asynchronous), (words(1, 20), 42))


@modes
@pytest.mark.red(NOT_THE_SEEDS)
def test_beside_others(engines, words, asynchronous):
    """As the first of two and of three; with seeds and without; in another order."""
    engine = engines(model="dense", asynchronous=asynchronous)
    one, two, plain = (words(1, 20), 42), (words(2, 30), 43), (words(3, 25), None)
    check(engine, one, plain)
    check(engine, two, one, plain)
    check(engine, plain, two, one)


@pytest.mark.red(NOT_THE_SEEDS)
@pytest.mark.parametrize("length", [300, 520])
def test_prompt_in_chunks(engines, words, length):
    """Under async scheduling each chunk is sampled. Four requests: no padding in the decodes."""
    engine = engines(model="dense", asynchronous=True, chunk=128)
    others = [(words(5 + n, 20), None) for n in range(3)]
    check(engine, (words(4, length), 44), *others)
    check(engine, *others, (words(4, length), 44))


@pytest.mark.red(r"\['hpu'\] == \['cpu'\]")
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_no_generator_is_made_on_the_device(engines, words, monkeypatch, lazy):
    import torch

    engine = engines(model="dense", lazy=True) if lazy else engines(model="dense")
    made = []
    whole = torch.Generator

    def record(device="cpu"):
        made.append(torch.device(device).type)
        return whole(device)

    monkeypatch.setattr(torch, "Generator", record)
    run(engine, (words(1, 20), 42))
    monkeypatch.undo()
    assert made == ["cpu"]


def test_a_full_batch(engines, words):
    """No padding and one chunk each: right before, too."""
    engine = engines(model="dense")
    check(engine, *((words(10 + n, 20), 50 + n) for n in range(4)))


@modes
def test_greedy_requests_do_not_draw(engines, words, asynchronous):
    engine = engines(model="dense", asynchronous=asynchronous)
    prompt = words(1, 20)
    assert engine.tokens([prompt], seed=42) == engine.tokens([prompt])


def test_without_seeds_nothing_is_added(engines, words, monkeypatch):
    """No row of any call has a generator, so that no line of the fix is reached."""
    engine = engines(model="dense", asynchronous=True)
    runner = engine.runner
    seen = []
    whole = runner._prepare_sampling

    def record(*args, **kwargs):
        metadata = whole(*args, **kwargs)
        seen.append(metadata.generators)
        return metadata

    monkeypatch.setattr(runner, "_prepare_sampling", record)
    run(engine, (words(1, 20), None), (words(2, 20), None))
    assert seen
    assert not any(seen)

"""prompt-order on the engine: same-step prefix hits, on a cache that is not zero to begin with."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("engine")

BLOCK = 128
modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def rows_engine(engines, asynchronous):
    """Three requests in flight, prompts in chunks of a block beside each other."""
    return engines(
        model="dense",
        asynchronous=asynchronous,
        prefix_caching=True,
        sequences=3,
        arguments=(("long_prefill_token_threshold", BLOCK),),
    )


def overwrite_cache(engine):
    """As if earlier requests had left something in every block: large, so that it is noticed."""
    for layer in engine.runner.kv_caches:
        for tensor in layer:
            if tensor is not None:
                tensor.fill_(16.0)


def run(engine, *requests):
    """Requests in flight together, (prompt, number of new tokens, a token that ends it) each."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length, stop_token_ids=stop)
        for _, length, *stop in requests
    ]
    return engine.generate([request[0] for request in requests], params)


def assert_greedy(engine, prompt, output):
    from tests.emulation.reference import regrets

    worst = max(regrets(engine.checkpoint, prompt, list(output.outputs[0].token_ids)))
    assert worst < 0.1, f"not what the model says: {worst:.2f} below its best token"


@modes
@pytest.mark.red(r"not what the model says")
def test_prompt_hits_blocks_of_a_prompt_in_a_row_behind_it(engines, words, asynchronous):
    """A short request ends while a long prompt is at work; the hit takes the row before it.

    The short one ends by a token that says so: one that ends by its length is known beforehand
    under asynchronous scheduling, and its row is gone before the next request comes.
    """
    engine = rows_engine(engines, asynchronous)
    short = words(4, 20)
    (known,) = run(engine, (short, 2))
    engine = rows_engine(engines, asynchronous)  # nothing cached
    overwrite_cache(engine)
    long = words(1, 900)
    hit = long[: 6 * BLOCK] + words(2, 30)
    ending = (short, 16, known.outputs[0].token_ids[1])
    *_, first, second = run(engine, (words(3, 20), 16), ending, (long, 4), (hit, 8))
    # It came while `long` was at work, and hit all that was planned by then.
    assert 2 * BLOCK <= second.num_cached_tokens < 6 * BLOCK
    assert_greedy(engine, long, first)
    assert_greedy(engine, hit, second)


@pytest.mark.red(r"not what the model says")
def test_prompt_hits_the_block_that_a_decode_fills(engines, words):
    """Synchronous scheduling: the prompt comes in the step that computes the block's last token."""
    engine = rows_engine(engines, False)
    prompt, known = words(5, BLOCK - 8), 8
    (answered,) = run(engine, (prompt, 16))
    answer = list(answered.outputs[0].token_ids)
    engine = rows_engine(engines, False)  # nothing cached
    overwrite_cache(engine)
    hit = prompt + answer[:known] + words(6, 10)
    # The first one ends after `known` steps; the next step is the one that fills the block.
    requests = (words(7, 20), known), (prompt, 16), (words(8, 20), 16), (hit, 4)
    _, filling, _, hitting = run(engine, *requests)
    assert hitting.num_cached_tokens == BLOCK
    assert_greedy(engine, prompt, filling)
    assert_greedy(engine, hit, hitting)

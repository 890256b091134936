"""gdn-prefix-cache on the engine: answers from the cache are the answers without it.

The model's states decay slowly, and are so large that a KV block has 256 tokens, two kernel blocks:
a wrong state shows, and a state lies in both halves of its page.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("engine")

BLOCK = 256
GROUPS = 3  # of GDN layers: a hit restores as many states
WRONG = r"AssertionError: \(\[.*\], \[.*\]\)"

# By module: tests with the same engine come one after the other.
modes = pytest.mark.parametrize(
    "asynchronous", [False, True], ids=["sync", "async"], scope="module"
)
MODEL = {
    "model": "hybrid_wide",
    "prefix_caching": True,
    "length": 1280,
    "chunk": 2 * BLOCK,
    "blocks": 300,  # nothing is evicted
}


@pytest.fixture
def engine(engines, asynchronous):
    return engines(**MODEL, asynchronous=asynchronous)


def test_a_block_has_two_kernel_blocks(engines):
    engine = engines(**MODEL, asynchronous=False)
    assert {
        g.kv_cache_spec.block_size for g in engine.scheduler.kv_cache_config.kv_cache_groups
    } == {BLOCK}
    assert engine.runner.attn_block_size == BLOCK // 2


def counts(engine):
    """States stored and restored so far; on stock nobody counts."""
    cache = getattr(engine.runner, "gdn_prefix_cache", None)
    return (cache.counts.stored, cache.counts.restored) if cache else (0, 0)


def restored(engine, before):
    """Hits since `before`, in requests."""
    return (counts(engine)[1] - before[1]) // GROUPS


def salted(prompt, salt):
    """The same prompt in a cache of its own: a salt that is new never hits."""
    return {"prompt_token_ids": prompt, "cache_salt": salt}


def assert_same(engine, prompt, expected, answer):
    from tests.emulation.reference import same_up_to_ties

    assert same_up_to_ties(engine.checkpoint, prompt, expected, answer), (expected, answer)


LENGTHS = [257, 300, 383, 384, 511, 512, 513, 600, 640, 767, 768, 769, 800, 1000, 1024, 1100]


@modes
@pytest.mark.red(WRONG)
def test_answers_from_the_cache_are_those_without_it(engine, words):
    """Hits of every length, several in a step, beside decodes; a prompt of n blocks hits n - 1."""
    prompts = [words(n, length) for n, length in enumerate(LENGTHS)]
    cold = engine.tokens(prompts, length=8)
    before = counts(engine)
    cached = engine.tokens(prompts, length=8)
    for prompt, expected, answer in zip(prompts, cold, cached, strict=True):
        assert_same(engine, prompt, expected, answer)
    assert restored(engine, before) == len(prompts)


def logprobs(engine, prompt):
    """Token ids and log probabilities of an answer, as they are."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6, logprobs=3)
    (output,) = engine.generate([prompt], params)
    answer = output.outputs[0]
    return list(answer.token_ids), [
        {token: each.logprob for token, each in place.items()} for place in answer.logprobs
    ]


@modes
@pytest.mark.parametrize("length", [600, 769, 1100])
@pytest.mark.red(r"AssertionError: \(\(\[.*\], \[.*\]\)")
def test_where_the_chunks_are_the_same_not_a_bit_differs(engine, words, length):
    """The last chunk begins where the hit ends."""
    prompt = words(70 + length, length)
    cold = logprobs(engine, prompt)
    before = counts(engine)
    cached = logprobs(engine, prompt)
    assert cold == cached, (cold, cached)
    assert restored(engine, before) == 1


@modes
@pytest.mark.red(WRONG)
def test_a_stranger_between_leaves_nothing_behind(engine, words):
    for turn in range(12):
        prompt, stranger = words(100 + turn, 300), words(200 + turn, 330)
        (cold,) = engine.tokens([prompt], length=4)
        engine.tokens([stranger], length=4)
        before = counts(engine)
        (cached,) = engine.tokens([prompt], length=4)
        assert_same(engine, prompt, cold, cached)
        assert restored(engine, before) == 1


@modes
@pytest.mark.red(r"AssertionError: \(\(\[.*\], \[.*\]\)")
def test_a_needle_early_in_the_prompt_is_found_from_the_cache(engine, words):
    """Two prompts that differ in three words near the beginning, long before the hit ends."""
    hay = words(300, 620)
    prompts = [hay[:10] + words(seed, 3) + hay[13:] for seed in (301, 302)]
    cold = [logprobs(engine, prompt) for prompt in prompts]
    assert cold[0] != cold[1], "the needle does not matter"
    for prompt, expected in zip(prompts, cold, strict=True):
        cached = logprobs(engine, prompt)
        assert expected == cached, (expected, cached)


@modes
@pytest.mark.red(WRONG, release="v0.26.0")
def test_a_block_filled_by_decoding_is_the_next_turns(engine, words, release):
    """vLLM 0.30.0 keeps no such blocks (prefix_cache_retention_interval is 0): no hit, no fault."""
    hits = 0
    for turn in range(3):
        prompt = words(400 + turn, BLOCK - 20)
        (said,) = engine.tokens([prompt], length=40)
        engine.tokens([words(410 + turn, 330)], length=4)  # somebody else's turn
        following = prompt + said + words(420 + turn, 30)
        before = counts(engine)
        (cached,) = engine.tokens([following], length=8)
        hits += restored(engine, before)
        (cold,) = engine.tokens([salted(following, f"multi-turn {turn}")], length=8)
        assert_same(engine, following, cold, cached)
    assert hits == (3 if release == "v0.26.0" else 0)


@modes
# On v0.26.0 stock already ends in one of the asserts for Mamba2, which a full house reaches.
@pytest.mark.red(r"^AssertionError", release="v0.26.0")
@pytest.mark.red(WRONG, release="v0.30.0")
def test_long_contexts_with_a_salt_each(engine, words):
    """The same text four times at once: each salt hits its own blocks and nobody else's."""
    prompt = words(500, 900)
    requests = [salted(prompt, f"salt {n}") for n in range(4)]
    before = counts(engine)
    cold = engine.tokens(requests, length=6)
    strangers = restored(engine, before)
    cached = engine.tokens(requests, length=6)
    for expected, answer in zip(cold, cached, strict=True):
        assert_same(engine, prompt, expected, answer)
    assert strangers == 0
    assert restored(engine, before) == 4


@modes
@pytest.mark.red(WRONG)
def test_a_block_that_another_request_fills_in_the_same_step(engine, words):
    """The same prompt twice at once; the second one hits what the first one leaves."""
    before = counts(engine)
    for turn in range(6):
        prompt = words(600 + turn, 700)
        (cold,) = engine.tokens([salted(prompt, f"alone {turn}")], length=8)
        for answer in engine.tokens([prompt, prompt], length=8):
            assert_same(engine, prompt, cold, answer)
    assert restored(engine, before) == 6


@modes
def test_a_prompt_shorter_than_a_block_never_hits(engine, words):
    prompt = words(700, BLOCK - 20)
    cold = engine.tokens([prompt], length=4)
    before = counts(engine)
    assert engine.tokens([prompt], length=4) == cold
    assert restored(engine, before) == 0


@modes
@pytest.mark.red(r"AssertionError")
def test_a_tail_that_is_cut_by_the_budget(engine, words):
    """Three hits at once whose tails do not fit into a step: on stock v0.26.0 the engine ends."""
    start = words(800, BLOCK)
    engine.tokens([start + words(801, 4)], length=1)
    prompts = [start + words(810 + n, 200) for n in range(3)]
    cached = engine.tokens(prompts, length=4)
    for n, (prompt, answer) in enumerate(zip(prompts, cached, strict=True)):
        (cold,) = engine.tokens([salted(prompt, f"tail {n}")], length=4)
        assert_same(engine, prompt, cold, answer)


@pytest.mark.red(r"AssertionError", release="v0.26.0")
def test_short_prompts_in_one_batch(engines, words):
    """v0.26.0 merges them; on stock the engine ends."""
    merged = (("VLLM_PROMPT_BS_BUCKET_MAX", "4"),)
    engine = engines(**MODEL, environment=merged)
    prompts = [words(900 + n, 60) for n in range(3)]
    together = engine.tokens(prompts, length=4)
    for prompt, answer in zip(prompts, together, strict=True):
        assert_same(engine, prompt, engine.tokens([prompt], length=4)[0], answer)


# A pool in which requests are preempted and blocks are taken back.
SMALL = MODEL | {"blocks": 18, "sequences": 3, "length": 768}


@modes
@pytest.mark.red(r"AssertionError")
def test_preemption_and_eviction_in_a_tiny_pool(engines, words, asynchronous, monkeypatch):
    engine = engines(**SMALL, asynchronous=asynchronous)
    happened = {"preempted": 0, "evicted": 0}
    scheduler, pool = engine.scheduler, engine.scheduler.kv_cache_manager.block_pool
    preempt, evict = scheduler._preempt_request, pool._maybe_evict_cached_block

    def preempting(*args, **kwargs):
        happened["preempted"] += 1
        return preempt(*args, **kwargs)

    def evicting(block):
        gone = evict(block)
        happened["evicted"] += bool(gone)
        return gone

    monkeypatch.setattr(scheduler, "_preempt_request", preempting)
    monkeypatch.setattr(pool, "_maybe_evict_cached_block", evicting)
    before = counts(engine)
    starts = [words(1000 + n, 400) for n in range(3)]
    for turn in range(3):
        prompts = [start + words(1010 + 10 * turn + n, 30) for n, start in enumerate(starts)]
        together = engine.tokens(prompts, length=100)
        for n, (prompt, answer) in enumerate(zip(prompts, together, strict=True)):
            (alone,) = engine.tokens([salted(prompt, f"{turn} {n}")], length=100)
            assert_same(engine, prompt, alone, answer)
    assert happened["preempted"] > 0
    assert happened["evicted"] > 0
    assert restored(engine, before) > 0


@pytest.mark.only("v0.30.0")
@pytest.mark.red(WRONG)
def test_every_rank_keeps_its_own_part(engines, words):
    """On two ranks vLLM 0.26.0 takes the plugin's 3-D hidden states for split ones, and fails."""
    engine = engines(
        **MODEL,
        ranks=2,
        own_process=True,
        environment=(("VLLM_WORKER_MULTIPROC_METHOD", "fork"),),
    )
    prompts = [words(1300 + n, 2 * BLOCK + 40) for n in range(2)]
    cold = [engine.tokens([prompt], length=6) for prompt in prompts]
    for prompt, (expected,) in zip(prompts, cold, strict=True):
        engine.tokens([words(1310, BLOCK)], length=4)
        (cached,) = engine.tokens([prompt], length=6)
        assert_same(engine, prompt, expected, cached)


@pytest.mark.red(r"DID NOT RAISE")
def test_refuses_to_start_without_compact_slots(engines):
    with pytest.raises(Exception, match="set VLLM_COMPACT_GDN=1 or leave out"):
        engines(**MODEL, compact_gdn=False)


def test_without_prefix_caching_nothing_is_called(engines, words):
    """And answers and pool are the same."""
    engine = engines(**MODEL | {"prefix_caching": False})
    assert getattr(engine.runner, "gdn_prefix_cache", None) is None
    assert engine.scheduler.kv_cache_config.num_blocks == engine.knobs.blocks
    prompts = [words(1200, 300), words(1201, 20)]
    assert engine.tokens(prompts, length=4) == engine.tokens(prompts, length=4)

"""Preemption on the engine: answers do not depend on how often a request had to start again.

The pool is so small that requests are preempted and resumed all the time. Some share a prefix and
come together, so that one hits blocks which another fills in the same step.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("engine")

LENGTH = 160
BLOCK = 128


@pytest.fixture(scope="module")
def prompts(words):
    """Three that share two blocks and seven that grow over the ends of others."""
    shared = words(7, 2 * BLOCK + 4)
    together = [shared + words(20 + n, 20 + 3 * n) for n in range(3)]
    return together + [words(40 + n, 100 + 24 * n) for n in range(7)]


class Counts:
    """What a scheduler did, seen from its outputs."""

    def __init__(self, scheduler, patch):
        self.preempted = self.resumed = self.resumed_with_hit = self.same_step_hits = 0
        self._blocks_of = scheduler.kv_cache_manager.get_block_ids
        kind = type(scheduler)
        whole, preempt = kind.schedule, kind._preempt_request

        def schedule(itself, *args, **options):
            output = whole(itself, *args, **options)
            self._read(output)
            return output

        def count(itself, *args, **options):
            self.preempted += 1
            return preempt(itself, *args, **options)

        patch.setattr(kind, "schedule", schedule)
        patch.setattr(kind, "_preempt_request", count)

    def _read(self, output):
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        admitted = [*computed, *cached.resumed_req_ids]
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.resumed += len(cached.resumed_req_ids)
        self.resumed_with_hit += sum(computed[name] > 0 for name in cached.resumed_req_ids)
        filled = {}
        for name, tokens in output.num_scheduled_tokens.items():
            last = (computed[name] + tokens - 1) // BLOCK
            filled[name] = {*self._attention_blocks(name)[computed[name] // BLOCK : last + 1]}
        for name in admitted:
            hit = {*self._attention_blocks(name)[: computed[name] // BLOCK]}
            self.same_step_hits += any(hit & filled[other] for other in filled if other != name)

    def _attention_blocks(self, name):
        return self._blocks_of(name)[-1]


def run(engine, prompts):
    """The answers, and what it took to get them."""
    with pytest.MonkeyPatch.context() as patch:
        counts = Counts(engine.scheduler, patch)
        answers = engine.tokens(prompts, length=LENGTH)
    return answers, counts


_FROM_BIG_POOL: dict[tuple[str, str], list[list[int]]] = {}


@pytest.fixture
def small_pool(engines, prompts, release):
    """Answers of a big and of a small pool; which differ, and what the small one did."""

    def both(first=None, **knobs):
        from tests.emulation.reference import same_up_to_ties

        key = release, knobs["model"]
        if key not in _FROM_BIG_POOL:
            answers, counts = run(engines(model=knobs["model"]), prompts)
            assert counts.preempted == 0
            _FROM_BIG_POOL[key] = answers
        engine = engines(length=512, **knobs)
        answers, counts = run(engine, prompts[:first])
        differ = [
            n
            for n, (prompt, wanted, answer) in enumerate(
                zip(prompts, _FROM_BIG_POOL[key], answers, strict=False)
            )
            if not same_up_to_ties(engine.checkpoint, prompt, wanted, answer)
        ]
        shown = {name: value for name, value in vars(counts).items() if name[0] != "_"}
        print(f"{knobs}: {len(differ)} of {len(answers)} answers differ, {shown}")
        assert counts.resumed == counts.preempted
        return differ, counts

    return both


modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
WRONG = r"AssertionError: assert \[\d.*\] == \[\]"


# --- the fault -----------------------------------------------------------------------------------


@modes
@pytest.mark.red(WRONG)
def test_resumed_after_prefix_hits(small_pool, asynchronous):
    differ, counts = small_pool(
        model="dense", asynchronous=asynchronous, prefix_caching=True, blocks=6
    )
    assert differ == []
    assert counts.resumed_with_hit > 0
    assert counts.same_step_hits > 0
    assert counts.preempted >= 5


@modes
@pytest.mark.red(WRONG, release="v0.30.0")
@pytest.mark.red(r"discard_latest_async_tokens|" + WRONG, release="v0.26.0")
def test_resumed_after_prefix_hits_in_chunks(small_pool, asynchronous):
    """A chunk may end in what the request has generated itself."""
    differ, counts = small_pool(
        model="dense", asynchronous=asynchronous, prefix_caching=True, blocks=6, chunk=96
    )
    assert differ == []
    assert counts.resumed_with_hit > 0
    assert counts.preempted >= 5


# --- neighbours ----------------------------------------------------------------------------------
# Without prefix caching a resumed request starts from nothing, and stock is right. A hybrid model
# with prefix caching needs gdn-prefix-cache: that case belongs to the tests of that fix.


@modes
@pytest.mark.parametrize(("model", "blocks"), [("dense", 7), ("hybrid", 12)])
def test_resumed_from_nothing(small_pool, asynchronous, model, blocks):
    differ, counts = small_pool(first=8, model=model, asynchronous=asynchronous, blocks=blocks)
    assert differ == []
    assert counts.preempted > 0
    assert counts.resumed_with_hit == 0

"""gdn-prefix-cache: the support module alone. What it moves, what it refuses, what it raises."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.needs("torch")

BLOCK, BLOCKS, ROWS, GROUPS = 4, 12, 8, 3


@pytest.fixture(scope="module")
def module():
    from tests.support.standin import plain_vllm

    plain_vllm()
    from fixes.gdn_prefix_cache import prefix_cache

    return prefix_cache


def layer(module, *, conv=(1, 2), ssm=(2, 2), heads=1, dim=2, dtype=None, blocks=BLOCKS):
    """A layer with small caches: random bits everywhere, NaNs of all kinds among them."""
    import torch

    def bits(shape, kind):
        empty = torch.empty(shape, dtype=kind)
        raw = torch.randint(0, 256, (empty.nbytes,), dtype=torch.uint8)
        return raw.view(kind).view(shape)

    tokens = (blocks + 1) * BLOCK
    halves = [bits((tokens, heads, dim), dtype or torch.bfloat16) for _ in range(2)]
    slots = (bits((ROWS, *conv), torch.bfloat16 if conv[0] == 3 else torch.float32),)
    slots += (bits((ROWS, *ssm), torch.float32),)
    return module.Layer(*halves, slots)


def raw(tensor):
    """A copy of a tensor's bytes, [first dimension, bytes]: NaNs are equal to themselves there."""
    import torch

    return tensor.reshape(len(tensor), -1).view(torch.uint8).clone()


def page(each, block):
    """The bytes of a block's page: keys, then values."""
    import torch

    rows = slice(block * BLOCK, (block + 1) * BLOCK)
    return torch.cat([raw(half)[rows].flatten() for half in (each.keys, each.values)])


def state(each, row):
    """The bytes of a state, tensor by tensor."""
    import torch

    return torch.cat([raw(slot)[row] for slot in each.slots])


SHAPES = {
    "in the keys alone": {"conv": (1, 1), "ssm": (1, 2)},
    "over both halves": {"conv": (1, 2), "ssm": (2, 2)},
    "fills the page": {"conv": (1, 2), "ssm": (3, 2)},
    "two types, odd sizes": {"conv": (3, 6), "ssm": (3, 5), "dim": 6, "heads": 3},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_states_survive_a_page_bit_by_bit(module, shape):
    """Two states into two pages and back into other rows; nothing else changes."""
    import torch

    layers = [layer(module, **shape) for _ in range(2)]
    pages = module.StatePages(layers, BLOCK, BLOCKS)
    states = [[state(each, row) for row in range(ROWS)] for each in layers]
    before = [[page(each, block) for block in range(BLOCKS + 1)] for each in layers]
    size = len(states[0][0])

    pages.store([2, 5], [4, 1])
    for each, was, rows in zip(layers, before, states, strict=True):
        for block in range(BLOCKS + 1):
            stored = {4: 2, 1: 5}.get(block)
            head = was[block][:size] if stored is None else rows[stored]
            assert torch.equal(page(each, block)[:size], head), block
            assert torch.equal(page(each, block)[size:], was[block][size:]), block
        assert all(torch.equal(state(each, row), rows[row]) for row in range(ROWS))

    pages.load([6, 0], [4, 1])
    for each, rows in zip(layers, states, strict=True):
        for row in range(ROWS):
            source = {6: 2, 0: 5}.get(row, row)
            assert torch.equal(state(each, row), rows[source]), row


def test_clearing_clears_what_it_names(module):
    import torch

    each = layer(module)
    pages = module.StatePages([each], BLOCK, BLOCKS)
    before = [page(each, n) for n in range(BLOCKS + 1)], [state(each, n) for n in range(ROWS)]
    pages.clear_pages([3])
    pages.clear_rows([2, 7])
    for block, was in enumerate(before[0]):
        assert torch.equal(page(each, block), was * (block != 3))
    for row, was in enumerate(before[1]):
        assert torch.equal(state(each, row), was * (row not in (2, 7)))


def test_self_test_passes_and_leaves_zeros(module):
    import torch

    each = layer(module)
    others = [page(each, block) for block in range(1, BLOCKS + 1)], [state(each, 0), state(each, 2)]
    module.StatePages([each], BLOCK, BLOCKS).self_test()
    assert not page(each, 0).any()
    assert not state(each, 1).any()
    assert all(torch.equal(page(each, n + 1), was) for n, was in enumerate(others[0]))
    assert torch.equal(state(each, 0), others[1][0])
    assert torch.equal(state(each, 2), others[1][1])


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_self_test_finds_a_device_that_changes_one_bit(module, bit, monkeypatch):
    """A copy that quiets NaNs, rounds, or drops a sign would look like this."""
    pages = module.StatePages([layer(module)], BLOCK, BLOCKS)
    honest = pages.load

    def load(rows, blocks):
        honest(rows, blocks)
        pages._slots[0][1][rows[0] * pages.rows[1]] ^= -(2**31) if bit == 31 else 1 << bit

    monkeypatch.setattr(pages, "load", load)
    with pytest.raises(module.Refused, match="bit for bit"):
        pages.self_test()


# What it refuses ---------------------------------------------------------------------------------


def a_runner(**changes):
    """A runner as the recipes set it up. Changes go to whatever has an attribute of that name."""
    parts = {
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        "scheduler_config": SimpleNamespace(policy="fcfs"),
        "cache_config": SimpleNamespace(mamba_cache_mode="align", prefix_match_unit=None),
    }
    config = SimpleNamespace(**parts, kv_transfer_config=None, speculative_config=None)
    runner = SimpleNamespace(
        vllm_config=config,
        _compact_gdn_enabled=True,
        use_hybrid_cache=True,
        use_contiguous_pa=False,
        is_pooling_model=False,
        attn_block_size=2,
        _PAD_BLOCK_ID=BLOCKS * BLOCK // 2,
        _compact_gdn_group_ids=set(range(GROUPS)),
    )
    for name, value in changes.items():
        (owner,) = (each for each in (runner, config, *parts.values()) if hasattr(each, name))
        setattr(owner, name, value)
    return runner


def test_accepts_the_settings_of_the_recipes(module):
    module.check_configuration(a_runner())


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"_compact_gdn_enabled": False}, "set VLLM_COMPACT_GDN=1"),
        # The plugin switches compact slots off itself then: the message names the reason.
        (
            {"kv_transfer_config": object(), "_compact_gdn_enabled": False},
            "leave out --kv-transfer-config",
        ),
        ({"speculative_config": object()}, "leave out --speculative-config"),
        ({"use_hybrid_cache": False}, "set VLLM_USE_HYBRID_CACHE=1"),
        ({"use_contiguous_pa": True}, "set VLLM_CONTIGUOUS_PA=0"),
        ({"is_pooling_model": True}, "pooling"),
        ({"pipeline_parallel_size": 2}, "use --tensor-parallel-size alone"),
        ({"decode_context_parallel_size": 2}, "use --tensor-parallel-size alone"),
        ({"prefill_context_parallel_size": 2}, "use --tensor-parallel-size alone"),
        ({"policy": "priority"}, "use --scheduling-policy fcfs"),
        ({"mamba_cache_mode": "all"}, "use --mamba-cache-mode align"),
    ],
)
def test_refuses_settings_and_says_what_to_set(module, changes, remedy):
    with pytest.raises(module.Refused, match=remedy) as caught:
        module.check_configuration(a_runner(**changes))
    assert "or leave out --enable-prefix-caching" in str(caught.value)


def specs(**changes):
    """Specifications of a GDN group and of the attention group, real ones."""
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    recurrent = {
        "block_size": BLOCK,
        "shapes": ((1, 2), (2, 2)),
        "dtypes": (torch.float32, torch.float32),
        "mamba_type": MambaAttentionBackendEnum.GDN_ATTN,
        "mamba_cache_mode": "align",
    }
    attention = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 2, "dtype": torch.bfloat16}
    return (
        MambaSpec(**recurrent | changes.get("recurrent", {})),
        changes.get("kind", FullAttentionSpec)(**attention | changes.get("attention", {})),
    )


def a_config(module, *, layers=2, attention_groups=1, **changes):
    """A KVCacheConfig of three GDN groups and one of attention, and caches for it."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    recurrent, attention = specs(**changes)
    groups = [
        KVCacheGroupSpec([f"gdn{group}.{n}" for n in range(layers)], recurrent)
        for group in range(GROUPS)
    ]
    groups += [
        KVCacheGroupSpec([f"attention{group}.{n}" for n in range(layers)], attention)
        for group in range(attention_groups)
    ]
    caches = {}
    for n in range(layers):
        each = layer(module, dtype=changes.get("attention", {}).get("dtype"))
        caches |= {f"gdn{group}.{n}": each.slots for group in range(GROUPS)}
        caches |= {
            f"attention{group}.{n}": (each.keys, each.values, None, None)
            for group in range(attention_groups)
        }
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    return config, caches


def test_accepts_the_layout_of_the_plugin(module):
    cache = module.attach(a_runner(), *a_config(module))
    assert (cache.attention_group, cache.gdn_groups, cache.block_size) == (3, [0, 1, 2], BLOCK)
    assert len(cache.pages.layers) == 2


def sliding_window():
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec


def test_refuses_more_than_one_attention_group(module):
    with pytest.raises(module.Refused, match="one group of full attention"):
        module.attach(a_runner(), *a_config(module, attention_groups=2))


def test_refuses_another_kind_of_attention(module):
    config = a_config(module, kind=sliding_window(), attention={"sliding_window": 8})
    with pytest.raises(module.Refused, match="one group of full attention"):
        module.attach(a_runner(), *config)


def test_refuses_a_group_that_is_not_compact(module):
    runner = a_runner(_compact_gdn_group_ids={0, 1})
    with pytest.raises(module.Refused, match="MambaSpec"):
        module.attach(runner, *a_config(module))


def test_refuses_groups_of_different_sizes(module):
    config, caches = a_config(module)
    config.kv_cache_groups[1].layer_names.pop()
    with pytest.raises(module.Refused, match=r"as many layers each, found \[1, 2\]"):
        module.attach(a_runner(), config, caches)


def test_refuses_different_block_sizes(module):
    with pytest.raises(module.Refused, match=r"one block size for all groups, found \[4, 8\]"):
        module.attach(a_runner(), *a_config(module, recurrent={"block_size": 8}))


def test_refuses_hits_within_a_block(module):
    with pytest.raises(module.Refused, match="prefix_match_unit is 2"):
        module.attach(a_runner(prefix_match_unit=2), *a_config(module))


@pytest.mark.parametrize(
    "recurrent", [{"num_speculative_blocks": 1}, {"mamba_cache_mode": "all"}], ids=str
)
def test_refuses_another_use_of_blocks(module, recurrent):
    with pytest.raises(module.Refused, match="one block a state"):
        module.attach(a_runner(), *a_config(module, recurrent=recurrent))


@pytest.mark.only("v0.30.0")
def test_refuses_checkpoints_within_a_prefill(module):
    config = a_config(module, recurrent={"num_prefill_checkpoint_blocks": 1})
    with pytest.raises(module.Refused, match="one block a state"):
        module.attach(a_runner(), *config)


def test_refuses_slots_that_are_not_shared(module):
    config, caches = a_config(module)
    caches["gdn1.0"] = layer(module).slots
    with pytest.raises(module.Refused, match=r"slots shared by gdn0.0, gdn1.0, gdn2.0"):
        module.attach(a_runner(), config, caches)


def test_refuses_padding_inside_the_pool(module):
    with pytest.raises(module.Refused, match="apply the fix hybrid-decode-pad as well"):
        module.attach(a_runner(_PAD_BLOCK_ID=BLOCKS), *a_config(module))


def test_refuses_a_cache_of_another_width(module):
    import torch

    config = a_config(module, attention={"dtype": torch.float8_e4m3fn})
    with pytest.raises(module.Refused, match="2 bytes an element, found torch"):
        module.attach(a_runner(), *config)


def test_refuses_a_cache_with_scales(module):
    import torch

    config, caches = a_config(module)
    caches["attention0.1"] = (*caches["attention0.1"][:2], torch.ones(1), torch.ones(1))
    with pytest.raises(module.Refused, match="scales"):
        module.attach(a_runner(), config, caches)


def test_refuses_a_page_that_is_too_small(module):
    with pytest.raises(module.Refused, match="10 words of 4 bytes does not fit into a page of 8"):
        module.StatePages([layer(module, ssm=(4, 2))], BLOCK, BLOCKS)


def test_refuses_a_cache_smaller_than_the_pool(module):
    with pytest.raises(module.Refused, match="of 12 blocks"):
        module.StatePages([layer(module, blocks=BLOCKS - 2)], BLOCK, BLOCKS)


# Steps -------------------------------------------------------------------------------------------


class Steps:
    """A prefix cache over one layer, with steps made by hand."""

    def __init__(self, module):
        self.layer = layer(module)
        self.runner = SimpleNamespace(
            requests={},
            _gdn_req_to_base_slot={"a": 0, "b": 1},
            _gdn_slot_free_list=[],
            _num_gdn_groups=GROUPS,
            _compact_gdn_group_offset={0: 0, 1: 1, 2: 2},
        )
        pages = module.StatePages([self.layer], BLOCK, BLOCKS)
        self.cache = module.PrefixCache(self.runner, pages, 3, [0, 1, 2])

    def step(self, *, new=(), cached=(), resumed=(), preempted=None, **scheduled):
        step = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=blocks, num_computed_tokens=computed)
                for name, blocks, computed in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _, _ in cached],
                new_block_ids=[blocks for _, blocks, _ in cached],
                num_computed_tokens=[computed for _, _, computed in cached],
                resumed_req_ids=set(resumed),
            ),
            num_scheduled_tokens=scheduled,
            preempted_req_ids=preempted,
        )
        for name, blocks, computed in new:
            self.runner.requests[name] = SimpleNamespace(
                block_ids=tuple(map(list, blocks)), num_computed_tokens=computed
            )
        for name, _, computed in cached:
            self.runner.requests[name].num_computed_tokens = computed
        return step


@pytest.fixture
def steps(module):
    return Steps(module)


A = ([1], [2], [3], [4])  # blocks by group; the last group is attention's
ROWS_OF_B = [4, 5, 6]


def states(steps, rows):
    return [state(steps.layer, row).tolist() for row in rows]


def pages(steps, blocks):
    """The states that the pages of these blocks hold."""
    size = len(state(steps.layer, 0))
    return [page(steps.layer, block)[:size].tolist() for block in blocks]


def fill(steps):
    """Request a fills its first block; returns its states."""
    step = steps.step(new=[("a", A, 0)], a=BLOCK)
    steps.cache.begin_step(step)
    for slot in steps.layer.slots:  # the forward
        slot[1:4] = slot[4:7]
    steps.cache.end_step(step)
    return states(steps, [1, 2, 3])


def test_a_new_request_begins_with_zeros_and_empty_pages(steps):
    others = states(steps, ROWS_OF_B), pages(steps, [1, 2, 3, 5])
    steps.cache.begin_step(steps.step(new=[("a", A, 0)], a=2))
    assert not any(map(any, states(steps, [1, 2, 3])))
    assert not page(steps.layer, 4).any()
    assert (states(steps, ROWS_OF_B), pages(steps, [1, 2, 3, 5])) == others


def test_a_full_block_is_stored_and_a_hit_restored(steps):
    stored = fill(steps)
    assert pages(steps, [1, 2, 3]) == stored
    hit = tuple([*mine, more] for mine, more in zip(A, (5, 6, 7, 8), strict=True))
    steps.cache.begin_step(steps.step(new=[("b", hit, BLOCK)], b=1))
    assert states(steps, ROWS_OF_B) == stored
    assert steps.cache.counts == type(steps.cache.counts)(3, 3, 3, 2)


def test_several_hits_in_one_step(steps):
    """On the same blocks, and beside a request that begins with nothing."""
    stored = fill(steps)
    steps.runner._gdn_req_to_base_slot = {"b": 1, "c": 0}
    steps.cache.begin_step(steps.step(new=[("b", A, BLOCK), ("c", A, BLOCK)], b=1, c=1))
    assert states(steps, ROWS_OF_B) == states(steps, [1, 2, 3]) == stored


def test_a_block_that_is_not_full_is_not_stored(steps):
    step = steps.step(new=[("a", A, 0)], a=BLOCK - 1)
    steps.cache.begin_step(step)
    was = pages(steps, range(1, BLOCKS))
    steps.cache.end_step(step)
    assert pages(steps, range(1, BLOCKS)) == was
    assert steps.cache.counts.stored == 0


def test_a_block_filled_by_decoding_is_stored(steps):
    steps.cache.begin_step(steps.step(new=[("a", A, 0)], a=BLOCK - 1))
    step = steps.step(cached=[("a", None, BLOCK - 1)], a=1)
    steps.cache.begin_step(step)
    steps.cache.end_step(step)
    assert pages(steps, [1, 2, 3]) == states(steps, [1, 2, 3])


def test_nothing_is_stored_in_the_null_block(steps):
    """A chunk of two blocks: the manager leaves the first one out."""
    blocks = ([0, 1], [0, 2], [0, 3], [4, 5])
    null = pages(steps, [0])
    step = steps.step(new=[("a", blocks, 0)], a=2 * BLOCK)
    steps.cache.begin_step(step)
    steps.cache.end_step(step)
    assert pages(steps, [0]) == null
    assert steps.cache.tokens_stored == dict.fromkeys([1, 2, 3], 2 * BLOCK)


def test_a_resumed_request_is_restored_too(steps):
    stored = fill(steps)
    steps.runner.requests["b"] = SimpleNamespace()
    resumed = steps.step(cached=[("b", A, BLOCK)], resumed=["b"], b=1)
    steps.cache.begin_step(resumed)
    assert states(steps, ROWS_OF_B) == stored


def test_a_request_left_out_for_a_step_keeps_its_slot(steps):
    fill(steps)
    was = states(steps, range(ROWS))
    steps.cache.begin_step(steps.step(cached=[("a", None, BLOCK)], a=1))
    assert states(steps, range(ROWS)) == was


def unknown(steps):
    """A hit on blocks in whose pages nothing was ever stored."""
    return ([7], [8], [9], [4])


def given_away(steps):
    """The blocks were taken by another request in between, as attention's or as its own."""
    steps.runner.requests["a"] = SimpleNamespace()
    taken = ([], [], [10], [2])
    steps.cache.begin_step(steps.step(cached=[("a", taken, BLOCK)], a=1))
    return A


@pytest.mark.parametrize("blocks", [unknown, given_away])
def test_a_hit_without_a_stored_state_raises(module, steps, blocks):
    fill(steps)
    hit = steps.step(new=[("b", blocks(steps), BLOCK)], b=1)
    slots = states(steps, ROWS_OF_B)
    with pytest.raises(module.StateNotStored, match="request b has a prefix-cache hit of 4 tokens"):
        steps.cache.begin_step(hit)
    assert states(steps, ROWS_OF_B) == slots, "went on with something else"


def test_a_hit_of_another_length_raises(module, steps):
    """The block holds the state after 4 tokens; 8 would be somebody else's."""
    fill(steps)
    blocks = ([0, 1], [0, 2], [0, 3], [4, 5])
    with pytest.raises(module.StateNotStored, match="of 8 tokens"):
        steps.cache.begin_step(steps.step(new=[("b", blocks, 2 * BLOCK)], b=1))


def test_a_hit_within_a_block_raises(module, steps):
    fill(steps)
    with pytest.raises(module.StateNotStored, match="of 3 tokens"):
        steps.cache.begin_step(steps.step(new=[("b", A, BLOCK - 1)], b=1))


def test_preempted_requests_give_their_slot_back(steps):
    """In an order that is the same on all ranks; not those that resume in the same step."""
    steps.runner._gdn_req_to_base_slot = {"c": 7, "a": 5, "b": 6, "d": 4}
    steps.cache.release_preempted(steps.step(preempted={"c", "b", "a", "not here"}, b=1))
    assert steps.runner._gdn_slot_free_list == [5, 7]
    assert steps.runner._gdn_req_to_base_slot == {"b": 6, "d": 4}
    steps.cache.release_preempted(steps.step(preempted=None))
    assert steps.runner._gdn_slot_free_list == [5, 7]


def test_a_decode_step_that_fills_no_block_touches_nothing(steps, monkeypatch):
    fill(steps)
    for name in ("store", "load", "clear_rows", "clear_pages"):

        def none(*lists, name=name):
            assert not any(map(list, lists)), name

        monkeypatch.setattr(steps.cache.pages, name, none)
    step = steps.step(cached=[("a", None, BLOCK)], a=1)
    steps.cache.release_preempted(step)
    steps.cache.begin_step(step)
    steps.cache.end_step(step)


# Chunks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caching", "kind", "expected"),
    [
        (True, "GDN_ATTN", True),
        (True, "LINEAR", True),
        (True, "MAMBA2", False),
        (False, "GDN_ATTN", False),
    ],
)
def test_chunks_of_gdn_prompts_end_at_blocks(module, caching, kind, expected):
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    config, _ = a_config(module, recurrent={"mamba_type": MambaAttentionBackendEnum[kind]})
    cache_config = SimpleNamespace(enable_prefix_caching=caching)
    scheduler = SimpleNamespace(
        kv_cache_config=config, vllm_config=SimpleNamespace(cache_config=cache_config)
    )
    assert module.chunks_end_at_blocks(scheduler) is expected


# Schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(4))
def test_random_schedules_give_the_answers_of_no_cache(module, part):
    """A thousand in all; see docs/gdn-prefix-cache.md for what happens in them."""
    from tests.fixes.gdn_schedules import run

    seen = run(range(250 * part, 250 * part + 250), module)
    assert seen["wrong"] == 0
    kinds = ("answers", "hits", "resumed", "aborted", "reset", "chunks over several blocks")
    for kind in (*kinds, "stored", "restored"):
        assert seen[kind] > 0, kind


def test_the_same_schedules_are_wrong_without_it(module):
    """What stock does: a hit goes on with what is in the slot."""
    from tests.fixes.gdn_schedules import run

    seen = run(range(250), None)
    assert seen["hits"] > 0
    assert seen["wrong"] > seen["answers"] / 50

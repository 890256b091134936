"""hybrid-decode-pad on the real runner: its own cache tensors, and what a padded decode writes.

The runner is that of a living engine. It allocates its cache anew for a pool whose KV blocks are as
large as those of the published models; that engine generates nothing.
"""

from __future__ import annotations

import dataclasses

import pytest

pytestmark = [pytest.mark.needs("engine"), pytest.mark.level("class")]

NUM_BLOCKS = 14  # the pool hands out 1 to 13
KERNEL_BLOCK = 128

# The branches of initialize_kv_cache, by the attributes of the runner that choose them.
HYBRID = {"use_hybrid_cache": True, "_compact_gdn_enabled": True}
BRANCHES = {
    "hybrid": HYBRID,
    "hybrid_contiguous_states": {**HYBRID, "_compact_gdn_enabled": False},
    "naive_sharing": {"use_hybrid_cache": False, "use_naive_mamba_cache_sharing": True},
    "not_shared": {"use_hybrid_cache": False, "use_naive_mamba_cache_sharing": False},
}
branches = pytest.mark.parametrize("branch", BRANCHES.values(), ids=BRANCHES)


@pytest.fixture(scope="module")
def runner(engines):
    engine = engines(model="hybrid")
    engine.broken = True
    return engine.runner


def allocate(runner, monkeypatch, split, branch):
    """Allocate the cache for KV blocks of that many kernel blocks; returns attention's tensors."""
    for name, value in branch.items():
        monkeypatch.setattr(runner, name, value)
    config = runner.kv_cache_config
    (attention,) = (group for group in config.kv_cache_groups if is_attention(group))
    spec = dataclasses.replace(attention.kv_cache_spec, block_size=split * KERNEL_BLOCK)
    page = {"page_size_padded": spec.page_size_bytes}
    for group in config.kv_cache_groups:
        group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, **page)
    attention.kv_cache_spec = spec
    for tensor in config.kv_cache_tensors:
        tensor.size = NUM_BLOCKS * spec.page_size_bytes
    config.num_blocks = NUM_BLOCKS
    runner.kv_caches.clear()
    runner.initialize_kv_cache(config)
    layers = runner.vllm_config.compilation_config.static_forward_context
    (name,) = attention.layer_names
    return flat(layers[name].kv_cache)[:2]


def is_attention(group):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return isinstance(group.kv_cache_spec, FullAttentionSpec)


def flat(cache):
    """A layer's tensors; they may stand in a list with one entry a virtual engine."""
    return list(cache[0] if isinstance(cache[0], tuple) else cache)


class Request:
    """What the runner asks of a request that decodes: where its M-RoPE positions go on."""

    mrope_position_delta = 0


def padded_decode(runner, split):
    """The inputs of a decode step of three requests in a batch of four, and their own slots.

    Together they own all blocks of the pool but one.
    """
    import numpy as np
    import torch

    names = ["r0", "r1", "r2"]
    runner.input_batch._req_ids[:] = names
    for row, name in enumerate(names):
        runner.requests[name] = Request()
        runner._gdn_req_to_base_slot[name] = row
    owned = np.arange(1, NUM_BLOCKS - 1).reshape(3, 4, 1)
    tables = (owned * split + np.arange(split)).reshape(3, -1)
    contexts = np.array([5, 130, 4 * split * KERNEL_BLOCK - 1])
    runner.positions_cpu[:3] = torch.from_numpy(contexts)
    data = runner._create_decode_input_data(
        3, [1, 1, 1], contexts, torch.from_numpy(tables.astype(np.int32))
    )
    assert data.token_ids.shape[0] == 4
    blocks = tables[range(3), contexts // KERNEL_BLOCK]
    return data, set((blocks * KERNEL_BLOCK + contexts % KERNEL_BLOCK).tolist())


def changed_rows(tensors, data):
    """Write a decode step's keys and values as attention does; the rows that have changed."""
    import torch
    from vllm_gaudi.extension.utils import VLLMKVCache

    slots = data.attn_metadata.slot_mapping.flatten()
    changed = set()
    for tensor in tensors:
        before = tensor.clone()
        VLLMKVCache()(torch.ones_like(tensor[: len(slots)]), tensor, slots)
        changed |= set((tensor != before).flatten(1).any(1).nonzero().flatten().tolist())
    return changed


# --- the fault -----------------------------------------------------------------------------------


@branches
@pytest.mark.parametrize(
    "split",
    [
        pytest.param(7, marks=pytest.mark.red(r"1792")),
        pytest.param(5, marks=pytest.mark.red(r"1792")),
        1,  # not split: a neighbour, right on stock too
    ],
)
def test_padded_decode_changes_its_own_slots_only(runner, monkeypatch, split, branch):
    tensors = allocate(runner, monkeypatch, split, branch)
    data, own = padded_decode(runner, split)
    pool = range(NUM_BLOCKS * split * KERNEL_BLOCK)
    assert {row for row in changed_rows(tensors, data) if row in pool} == own


# v0.30.0 has a check of its own for blocks beyond the padding block, which stock trips over.
@pytest.mark.parametrize(
    "split",
    [
        pytest.param(7, marks=pytest.mark.red(r"1792|exceeds total KV blocks \(15\)")),
        pytest.param(5, marks=pytest.mark.red(r"1792|exceeds total KV blocks \(15\)")),
        1,  # not split: a neighbour, right on stock too
    ],
)
def test_with_contiguous_attention(runner, monkeypatch, split):
    monkeypatch.setattr(runner, "use_contiguous_pa", True)
    tensors = allocate(runner, monkeypatch, split, HYBRID)
    data, own = padded_decode(runner, split)
    pool = range(NUM_BLOCKS * split * KERNEL_BLOCK)
    assert {row for row in changed_rows(tensors, data) if row in pool} == own


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(7, marks=pytest.mark.red(r"assert 14 == ")),
        pytest.param(5, marks=pytest.mark.red(r"assert 14 == ")),
        1,  # not split: a neighbour, right on stock too
    ],
)
def test_padding_block_is_the_last_kernel_block(runner, monkeypatch, split):
    tensors = allocate(runner, monkeypatch, split, HYBRID)
    pad, slot = runner._PAD_BLOCK_ID, runner._PAD_SLOT_ID
    assert pad == NUM_BLOCKS * split
    assert slot == pad * KERNEL_BLOCK
    assert [len(tensor) for tensor in tensors] == [slot + KERNEL_BLOCK] * 2


@branches
@pytest.mark.parametrize(
    "split",
    [
        pytest.param(7, marks=pytest.mark.red(r"assert 1792 >= ")),
        pytest.param(5, marks=pytest.mark.red(r"assert 1792 >= ")),
        1,  # not split: a neighbour, right on stock too
    ],
)
def test_padding_block_is_behind_the_pool_and_in_the_tensor(runner, monkeypatch, split, branch):
    tensors = allocate(runner, monkeypatch, split, branch)
    slot = runner._PAD_SLOT_ID
    assert slot >= NUM_BLOCKS * split * KERNEL_BLOCK
    assert all(slot + KERNEL_BLOCK <= len(tensor) for tensor in tensors)


@pytest.mark.parametrize(
    ("split", "told"),
    [
        (7, r"moved from 14\b.* to 98:.* 7 "),
        (5, r"moved from 14\b.* to 70:.* 5 "),
        (1, "14 not moved"),
    ],
)
@pytest.mark.red(r"assert 0 == 1")
def test_the_log_says_whether_it_was_moved(runner, monkeypatch, split, told):
    import re

    from vllm_gaudi.v1.worker import hpu_model_runner as module

    lines = []
    monkeypatch.setattr(module.logger, "info", lambda text, *values: lines.append(text % values))
    allocate(runner, monkeypatch, split, HYBRID)
    assert sum(bool(re.search(told, line)) for line in lines) == 1


# --- neighbours ----------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [7, 1])
@branches
def test_recurrent_states_keep_their_padding_row(runner, monkeypatch, split, branch):
    """They have one row a KV block and one more, or slots with -1 for padding."""
    allocate(runner, monkeypatch, split, branch)
    assert runner._MAMBA_PAD_BLOCK_ID == NUM_BLOCKS
    data, _ = padded_decode(runner, split)
    rows = data.attn_metadata.store_indices_tensor.tolist()
    recurrent = [
        row
        for row, group in zip(rows, runner.kv_cache_config.kv_cache_groups, strict=True)
        if not is_attention(group)
    ]
    pad = -1 if runner._compact_gdn_group_ids else NUM_BLOCKS
    assert [row[-1] for row in recurrent] == [pad] * 3


@pytest.mark.parametrize("split", [7, 1])
def test_what_counts_kv_blocks_still_does(runner, monkeypatch, split):
    allocate(runner, monkeypatch, split, HYBRID)
    assert runner._dummy_num_blocks == NUM_BLOCKS
    assert runner.bucketing_manager.num_hpu_blocks == NUM_BLOCKS

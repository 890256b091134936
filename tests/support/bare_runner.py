"""The plugin's real `HPUModelRunner` without an engine: its own methods on a real `InputBatch`.

For tests that need the emulated stack (`needs("engine")`), but neither a model nor a scheduler.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.emulation import gaudi


def module() -> Any:
    """The module `hpu_model_runner`, on the emulated device."""
    gaudi.install()
    from vllm_gaudi.v1.worker import hpu_model_runner

    return hpu_model_runner


def runner(*, rows: int = 8, length: int = 64, vocabulary: int = 32, block_size: int = 4) -> Any:
    """A runner that has what the methods around its batch read, and an empty batch."""
    import torch

    made = object.__new__(module().HPUModelRunner)
    vars(made).update(
        device=torch.device("cpu"),
        requests={},
        encoder_cache={},
        uses_mrope=False,
        use_async_scheduling=False,
        is_pooling_model=False,
        num_mamba_like_layers=0,
        vllm_config=SimpleNamespace(speculative_config=None),
        speculative_config=None,
        profiler=SimpleNamespace(enabled=False),
        _compact_gdn_group_ids=(),
        gdn_prefix_cache=None,  # of the fix of that name
    )
    made.input_batch = module().InputBatch(
        max_num_reqs=rows,
        max_model_len=length,
        max_num_batched_tokens=rows * length,
        device=torch.device("cpu"),
        pin_memory=False,
        vocab_size=vocabulary,
        block_sizes=[block_size],
        kernel_block_sizes=[block_size],
    )
    return made


def step(scheduled: dict[str, int], **fields: Any) -> Any:
    """What the scheduler sends for a step: tokens by request, in the order it granted them."""
    empty = SimpleNamespace(
        req_ids=[],
        num_computed_tokens=[],
        new_block_ids=[],
        num_output_tokens=[],
        resumed_req_ids=set(),
        all_token_ids={},
    )
    return SimpleNamespace(
        **{
            "num_scheduled_tokens": scheduled,
            "total_num_scheduled_tokens": sum(scheduled.values()),
            "scheduled_spec_decode_tokens": {},
            "finished_req_ids": set(),
            "free_encoder_mm_hashes": [],
            "scheduled_new_reqs": [],
            "scheduled_cached_reqs": empty,
            "kv_connector_metadata": None,
            **fields,
        }
    )


def arrange(made: Any, scheduler_output: Any) -> Any:
    """The part of `sample_tokens` that decides about rows: what is a prompt, what a decode."""
    made._ensure_decodes_first(scheduler_output)
    if not made.vllm_config.speculative_config:
        module().ensure_multi_token_decodes_last(
            made.input_batch, scheduler_output.num_scheduled_tokens
        )
    return made._get_prompts_and_decodes(scheduler_output)

"""Puts a step's prompts where each reads only what is written by then (fix: prompt-order)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def put_prompts_in_order(runner: Any, scheduled: Mapping[str, int], num_decodes: int) -> None:
    """Move the prompt rows into the order in which the scheduler granted them.

    ``runner`` is the HPUModelRunner; ``scheduled`` the tokens of each request in this step, in the
    order in which the scheduler granted them; ``num_decodes`` the number of decode rows, which
    come first in the batch. Rows that are in place are not swapped.

    A decode row that fills a block which a prompt reads joins the prompts, as the last chunk (one
    token) of a request that was preempted: its place is then before that prompt.
    """
    batch = runner.input_batch
    for row in _decodes_read_by_prompts(batch, num_decodes):
        req_id = batch.req_ids[row]
        # Drafted tokens need the decode path; a chunk of recurrent layers starts at a block's end.
        if scheduled[req_id] > 1 or runner.is_decoder_only(req_id) or runner.num_mamba_like_layers:
            continue
        batch.num_prompt_tokens[row] = batch.num_computed_tokens_cpu[row] + 1
        num_decodes -= 1
        if row != num_decodes:
            batch.swap_states(row, num_decodes)

    prompts = set(batch.req_ids[num_decodes:])
    in_order = [req_id for req_id in scheduled if req_id in prompts]
    for row, req_id in enumerate(in_order, num_decodes):
        if batch.req_ids[row] != req_id:
            batch.swap_states(row, batch.req_id_to_index[req_id])


def _decodes_read_by_prompts(batch: Any, num_decodes: int) -> list[int]:
    """The decode rows that write to a block which a prompt has computed already, last row first.

    A prompt's computed blocks are its own or hits, and a block that is hit is full when the step
    ends: a decode that still writes to it fills its last slot in this very step.
    """
    computed = batch.num_computed_tokens_cpu
    found: set[int] = set()
    for table in batch.block_table.block_tables:  # one for each group of layers
        blocks, size = table.get_numpy_array(), table.block_size
        read: set[int] = set()
        for row in range(num_decodes, batch.num_reqs):
            read.update(blocks[row, : computed[row] // size].tolist())
        if read:
            written = (int(blocks[row, computed[row] // size]) for row in range(num_decodes))
            found.update(row for row, block in enumerate(written) if block in read)
    return sorted(found, reverse=True)

"""sampling-rows-refresh: a request whose row moved keeps its own sampling parameters.

What a user sees: with several requests in flight, a request is now and then sampled with another
one's temperature, top-p, top-k or penalties, for a step or for the rest of its answer. A request
with `allowed_token_ids` may lose its list for good and answer with what another one is allowed.

Why: `_update_states` copies the sampling parameters of all rows to the device, but only when a
request came or went. `sample_tokens` reorders the batch after that (`_ensure_decodes_first`,
`ensure_multi_token_decodes_last`), and `InputBatch.swap_states` exchanges the rows on the host
only. The sampling calls then read the device by the new row numbers: in a step without other
changes every swapped request gets its neighbour's values. In a step with changes the rows that are
sampled are copied once more, but a prompt that moved and is not sampled yet (a chunk of it) is
not, and is sampled with the wrong values some steps later. The prompt tokens that penalties look
at are kept in a table by row, which a swap leaves as it was. The rows of the allowed-token mask
are exchanged by a tuple assignment of two tensor views, which copies one row over both; and
`condense` leaves a copy in the row it empties, for the next request that comes there without a
list.

What is changed: `swap_states` exchanges the mask's rows and marks the rows as moved;
`make_selective_sampling_metadata` makes `refresh_sampling_metadata` copy all rows before it reads
any that moved: in the next sampling call, once for all swaps. `condense` clears the mask's row
that it empties. Since the device's rows are right from then on, a step in which nothing came, went
or moved copies nothing: the mask of allowed tokens, which stock copies for each sampling call, is
left where it is, and the prompt tokens for penalties are rows of the table that the last refresh
put on the device, taken by an index as the temperatures are.

Reference: none for vllm-gaudi. vLLM reorders its batch before it refreshes the metadata; #16673
made it refresh after a reorder. Releases: v0.26.0 and v0.30.0, same code.

Other places with the pattern:
* `add_request`, `remove_request` and `condense` move rows too: `_update_states` refreshes after
  them. Left, but for the mask's row.
* `generators` and `bad_words_token_ids` live on the host and are swapped: left. `logitsprocs`:
  `logitsprocs-rows`.
* vLLM's own `gpu_input_batch` exchanges the mask's rows in the same way. No Gaudi runs it: left.
* `swap_states` of a pooling model returns before it swaps the block table. Pooling models do not
  come to `sample_tokens`, where all swaps are made: left.
* Speculative decoding samples through the same metadata and needs nothing of its own. Draft
  tokens are kept by request, in the row of token ids, which is swapped.

Known limit: frequency and presence penalties need the ids generated so far, which the Gaudi runner
of v0.26.0 does not have on the host under async scheduling (the default), whatever the row.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FILE = "vllm_gaudi/v1/worker/hpu_input_batch.py"

FIX = Fix(
    summary="a request whose row moved keeps its own sampling parameters",
    symptom="with several requests in flight a request is sampled with another one's temperature,"
    " top-p, top-k, penalties or allowed tokens",
    references=("https://github.com/vllm-project/vllm/pull/16673",),
    drop_when="vllm-gaudi reorders the batch before it refreshes the sampling metadata, and"
    " swap_states exchanges the rows of the allowed-token mask",
)


@site(FILE, "InputBatch.__init__")
def nothing_moved_yet(code: Definition) -> None:
    """Has any row moved since the device's copies were made?"""
    code.insert_after("self.req_type: dict[str, str] = {}", "self.sampling_rows_moved = False")


@site(FILE, "InputBatch.swap_states")
def swapped_rows_have_moved(code: Definition) -> None:
    """Mark them, and exchange the rows of the mask: indexing with a list copies."""
    code.insert_before("if self.is_pooling_model: ...", "self.sampling_rows_moved = True")
    code.replace_statement(
        """
        self.allowed_token_ids_mask_cpu_tensor[i1], self.allowed_token_ids_mask_cpu_tensor[i2] = ...
        """,
        """
        mask = self.allowed_token_ids_mask_cpu_tensor
        mask[[i1, i2]] = mask[[i2, i1]]
        """,
    )


@site(FILE, "InputBatch.condense")
def nothing_left_behind(code: Definition) -> None:
    """The row that was moved allows everything: the next request there may have no list."""
    code.insert_after(
        "self.allowed_token_ids_mask_cpu_tensor[empty_index] = ...",
        "self.allowed_token_ids_mask_cpu_tensor[last_req_index] = False",
    )


@site(FILE, "InputBatch.refresh_sampling_metadata")
def all_rows_are_fresh(code: Definition) -> None:
    """Every row of every parameter that somebody uses has been copied."""
    code.insert_last("self.sampling_rows_moved = False")


@site(FILE, "InputBatch.make_selective_sampling_metadata")
def fresh_rows_before_they_are_read(code: Definition) -> None:
    """Refresh if rows have moved; a step in which nothing did copies nothing."""
    code.insert_first(
        """
        if self.sampling_rows_moved:
            self.refresh_sampling_metadata()
        """
    )
    code.replace_statement(
        """
        cached_tensor = self._get_cached_prompt_token_ids()
        prompt_token_ids = ...
        """,
        "prompt_token_ids = self.sampling_metadata.prompt_token_ids[req_indices]",
    )
    code.wrap(
        "async_h2d_update(self.allowed_token_ids_mask_cpu_tensor, ...)",
        "if not skip_copy:",
    )

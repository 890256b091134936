"""async-inputs: a decode row without a token of the step before is given the token it has.

What a user sees: with asynchronous scheduling (the default), and more requests than the cache
holds or a step serves, a request that was preempted or left out of a step goes on with a word
that fits nothing, and from there with another text. Nothing is logged.

Why: `_create_decode_input_data` makes the right ids on the host and copies them to the device.
Under asynchronous scheduling the host does not know the token that the previous step is still
sampling, so the rows are then overwritten from `input_ids_hpu`. Only `_prepare_input_ids` writes
that buffer, and only in the rows whose request was in the previous step: the ids on the host never
reach it, though its three early returns and its comments say that they hold. A row that resumes
with one token left to compute, or whose request was left out of a step, or whose last row was
discarded, reads what an older step left there, the token of some other request.

What is changed: before `_prepare_input_ids` runs, the ids of the decode rows are copied into the
buffer if there is a row whose request has no token of the previous step. The tokens of that step
are written over them, as before. If every row has one, nothing is copied: all that a steady step
pays is a dictionary look-up a row. The copy reads a clone, because the host's buffer is filled
again for the next step, maybe before a copy to the device is done.

Reference: vLLM's own runner copies the host's ids first when not every token comes from the
previous step (`GPUModelRunner._prepare_input_ids`); vllm-gaudi #184 and #589 (vLLM #26385) brought
its form to the Gaudi runner without that copy. No issue names it. Releases: v0.26.0 and v0.30.0,
same code.

Other places with the pattern:
* `_create_dummy_decode_input_data` has no scheduler output, so its ids are those of the host.
* Prompt rows take their ids from the host and never from the buffer.
* `_prepare_input_ids` looks up a request's name in `prev_sampled_token_ids_invalid_indices`, a set
  of row numbers, and never finds it. Left: rows that were discarded are not in
  `prev_req_id_to_index` in the first place.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="a decode row without a token of the step before is given the token it has",
    symptom="under asynchronous scheduling a request that was preempted or left out of a step goes"
    " on with a token of some other request",
    references=(
        "https://github.com/vllm-project/vllm-gaudi/pull/589",
        "https://github.com/vllm-project/vllm/pull/26385",
    ),
    drop_when="vllm-gaudi copies the host's ids into input_ids_hpu for rows that were not in the"
    " previous step",
)


@site("vllm_gaudi/v1/worker/hpu_model_runner.py", "HPUModelRunner._create_decode_input_data")
def known_tokens_first(code: Definition) -> None:
    """The host's ids go into the buffer before the previous step's tokens do."""
    code.insert_before(
        "self._prepare_input_ids(scheduler_output)",
        """
        in_previous_step = self.input_batch.prev_req_id_to_index or {}
        if any(req_id not in in_previous_step for req_id in self.input_batch.req_ids[:num_decodes]):
            known_ids = self.input_ids_cpu[:total_num_scheduled_tokens].clone()
            async_h2d_copy(known_ids, self.input_ids_hpu[:total_num_scheduled_tokens])
        """,
    )

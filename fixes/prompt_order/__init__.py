"""prompt-order: a prompt that hits a block of the same step reads it after it is written.

What a user sees: with prefix caching, requests that share a prefix and arrive while it is being
computed now and then get wrong text. The wrong keys and values they leave are cached, so that
later requests with the prefix get wrong text too, until the blocks are evicted.

Why: the scheduler publishes a block in the prefix cache as soon as it has planned to fill it, so
that a request that it grants later in the same step can hit it. vLLM runs all rows in one forward,
in which each layer writes before it reads. The Gaudi runner runs a forward for each batch of
prompts, in the order of rows, and then one for the decodes. The order of rows is not the one in
which the scheduler granted them: a new request takes the row of one that has ended, `condense`
moves the last row into a hole, and `_ensure_decodes_first` exchanges rows. A prompt then attends
to blocks that another prompt writes after it: zeros, or what an earlier request left there.

The same happens with the right order of prompts when the block is one that a decode fills in this
step, because decodes run last: under synchronous scheduling, when a prompt is the prompt and the
answer so far of a running request and comes in the step that computes the last token of a block.
Under asynchronous scheduling the scheduler does not know that token yet and publishes the block a
step later; there it can only happen to a resumed request of which one token was left over.

What is changed: at the end of `_ensure_decodes_first` the prompt rows are put into the order of
`num_scheduled_tokens`, the order of granting. What a row depends on was granted before it. A
decode that writes to a block which a prompt reads in this step runs as a prompt of one token in
that step, in its place in that order, as a preempted request does in its last chunk. Decode rows
stay first; rows that are in place are not swapped, and a step without prompts does nothing. Rows
are swapped, not just visited in another order: row i of the sampled tokens is request i of the
batch. `sampling-rows-refresh` takes care of the sampling parameters of swapped rows.

Reference: none found upstream. vllm-gaudi #830, #1264 and #1401 made the order of rows what it is.
Releases: v0.26.0 and v0.30.0, same code.

Other places with the pattern:
* `ensure_multi_token_decodes_last`, which runs next, moves decode rows among themselves: prompt
  rows keep their places. Left.
* A decode row that hits (a resumed request with one token left) runs after all prompts, and in one
  forward with the decodes: nothing to do.
* Merging of prompts into one batch takes no request that has history, and so none that hits: left.

Known limit: a decode that fills the block is left where it is when it also has drafted tokens
(speculative decoding), when it is a request of the decoding side of disaggregated prefill, and in
models with recurrent layers. There vLLM itself defers a request that hits a block of the same step
(`MambaManager.get_num_blocks_to_allocate`).
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FILE = "vllm_gaudi/v1/worker/hpu_model_runner.py"

FIX = Fix(
    summary="a prompt that hits a block of the same step reads it after it is written",
    symptom="with prefix caching, requests that share a prefix with one that is being computed get"
    " wrong text, and leave wrong blocks in the cache",
    references=(
        "https://github.com/vllm-project/vllm-gaudi/pull/830",
        "https://github.com/vllm-project/vllm-gaudi/pull/1401",
    ),
    drop_when="vllm-gaudi runs the rows of a step in one forward, or in the scheduler's order",
    support={"vllm_gaudi/v1/worker/gaudi_fix_granted_order.py": "granted_order.py"},
    relies_on=(
        f"{FILE}::HPUModelRunner._is_prompt",
        f"{FILE}::ensure_multi_token_decodes_last",
    ),
)


@site(FILE, "HPUModelRunner._ensure_decodes_first")
def prompts_in_granted_order(code: Definition) -> None:
    """The loop ends with the first prompt's row in `first_prompt_index`, or None without one."""
    code.insert_last(
        """
        if first_prompt_index is not None:
            from vllm_gaudi.v1.worker import gaudi_fix_granted_order

            gaudi_fix_granted_order.put_prompts_in_order(
                self, scheduler_output.num_scheduled_tokens, first_prompt_index
            )
        """
    )

"""resumed-prefill-logits: a resumed request is sampled once, at the end of its last chunk.

What a user sees: under load with prefix caching, a request that was preempted repeats the end of
its answer. With asynchronous scheduling (the default) other requests get its tokens instead of
their own, and on v0.26.0 the engine may die (`async-discard-counter`).

Why: a preempted request computes its prompt and what it has generated again. The runner asks for a
logits row for every position from the end of the prompt on: `computed + scheduled -
num_prompt_tokens + 1`. `InputBatch.add_request` counts the generated tokens into that row's
`num_prompt_tokens` only if nothing of the request is in the cache; with a prefix hit it is the bare
prompt. Thirty generated tokens then make thirty rows, each is sampled, and all are taken for new
tokens; under asynchronous scheduling rows are given to requests by their place, so all the
following ones shift. A chunk that ends after the prompt but before the last known token is sampled
too, though its token is known; so is one of a single token, which passes for a decode.

What is changed: the rows are counted from the tokens that the request has,
`CachedRequestState.num_tokens`, prompt and generated. The last chunk has one row, at its last
position. An earlier one has what a chunk of a new prompt has: none, or under asynchronous
scheduling one that is discarded. `_is_prompt` says yes to a chunk of one token with more to come,
and `ensure_multi_token_decodes_last` no longer puts it before other prompts: they run in the order
of the rows, and it may need what they write (`prompt-order`).
For a request that was never preempted, or resumes without a hit, the numbers are those of before.

Reference: vLLM's own runner samples the last scheduled position of each request and discards where
`computed + scheduled < num_tokens`. vllm-gaudi #830 and #1401 (preempted prompts), #1124 and #1252
(the cap to what is scheduled). No issue names it. Releases: v0.26.0 and v0.30.0, same code.

Other places with the pattern:
* `num_prompt_tokens` itself is left: penalties, `make_prompt_token_ids` and prompt logprobs split
  a request at the end of its prompt. For the same reason a hit makes no difference to them.
* Requests that take more than one token because their cache came from elsewhere (offloading) go
  the same way and are right for the same reason.
* Prompt logprobs come from hidden states, not from these rows.

Known limit: a step with structured output and synchronous scheduling samples every chunk once and
hands the token on, of new prompts as of resumed requests; vllm-gaudi discards such a token under
asynchronous scheduling only. Left as it is.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="a resumed request is sampled once, at the end of its last chunk",
    symptom="a preempted request repeats itself after a prefix hit, or others get its tokens",
    references=(
        "https://github.com/vllm-project/vllm-gaudi/pull/1252",
        "https://github.com/vllm-project/vllm-gaudi/pull/830",
    ),
    drop_when="vllm-gaudi counts the logits rows of a prefill from all known tokens of a request",
)

RUNNER = "vllm_gaudi/v1/worker/hpu_model_runner.py"


@site(RUNNER, "HPUModelRunner._extract_prefill_batch_contents")
def rows_after_the_known_tokens(code: Definition) -> None:
    """Count from the end of what is known: the prompt's end is not the end of a resumed request."""
    code.insert_after(
        "num_prompt_tokens = self.input_batch.num_prompt_tokens[batch_idx]",
        """
        # A resumed request's own output is computed again: nothing in it needs sampling.
        num_known_tokens = self.requests[req_id].num_tokens
        """,
    )
    code.replace_expression(
        "seq_num_computed_tokens + seq_num_scheduled_tokens - num_prompt_tokens",
        "seq_num_computed_tokens + seq_num_scheduled_tokens - num_known_tokens",
        count=3,
    )


@site(RUNNER, "HPUModelRunner._is_prompt")
def one_token_of_several(code: Definition) -> None:
    """A single token that is not the last known one is part of a prefill."""
    code.insert_after(
        "is_prompt = is_prompt or num_scheduled_tokens > num_decode_tokens",
        """
        num_known_tokens = self.requests[req_id].num_tokens
        is_prompt = is_prompt or num_computed_tokens + num_scheduled_tokens < num_known_tokens
        """,
    )


@site(RUNNER, "ensure_multi_token_decodes_last")
def one_token_of_several_stays(code: Definition) -> None:
    """Only a decode goes to the front: its one token is the last that the batch knows."""
    code.replace_expression(
        "scheduled_tokens.get(req_id, 1) == 1",
        """scheduled_tokens.get(req_id, 1) == 1 and (
    b.num_computed_tokens_cpu[read_pos] + 1 >= b.num_tokens_no_spec[read_pos])""",
    )

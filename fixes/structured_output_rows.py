"""structured-output-rows: with structured output each row of logits is sampled as its own request.

What a user sees: while some request uses structured output (JSON, regex, ...), requests in the
same step are sampled with one another's temperature, top-p, penalties, seed or allowed tokens, and
get one another's logprobs. Under synchronous scheduling with chunked prompts it is worse: the
engine dies with an IndexError or `torch.cat` error, or a request gets a token that was sampled in
the middle of its prompt.

Why: in a step with structured output the runner samples all rows in one call. Their logits are put
together decodes first, then prompts, and so are the grammar's bitmask, the tokens and the
logprobs; only the list of requests that the sampling metadata is made from is prompts first. All
these lists also take it that a prompt gives one row of logits. Under synchronous scheduling a
chunk that does not end its prompt gives one only if the step before had structured output, because
`_prepare_inputs` reads `use_structured_output` before `sample_tokens` sets it: if it did not, all
rows behind it are shifted in the metadata, the bitmask and the logprobs; if it did, the row is
sampled and its token, which nobody discards there, becomes the first of the answer.

What is changed: one list, decodes and then the prompts that gave a row (a list that
`sample_tokens` has: `prefill_sampled_requests`), says whose logits each row is, for the sampling
metadata, for the logprobs and for `apply_grammar_bitmask`, which took the place in the batch.
Under synchronous scheduling a chunk that does not end its prompt gives no row, as in steps without
structured output: the flag is cleared before `_prepare_inputs` reads it. Under asynchronous
scheduling each prompt gives a row, as before, and that of an unfinished one is discarded.

Reference: vllm-gaudi #1466 had the order of the list in one of its commits (8478e903) and was
merged without it; #68, #768, #1199 and #1200 made the rest. Releases: v0.26.0 and v0.30.0, same
code.

Other places with the pattern:
* The prefill and decode calls of steps without structured output sample each in its own order:
  left.
* A resumed request can give several rows of logits, which the metadata counts once:
  `resumed-prefill-logits`.
* Structured output with speculative decoding: `sample_tokens` cuts the decodes' logits to one row
  each and leaves the drafts out. Left.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FILE = "vllm_gaudi/v1/worker/hpu_model_runner.py"

FIX = Fix(
    summary="with structured output each row of logits is sampled as its own request",
    symptom="beside a structured-output request others are sampled with wrong parameters, get a"
    " token too many, or the engine ends with an IndexError",
    references=(
        "https://github.com/vllm-project/vllm-gaudi/pull/1466",
        "https://github.com/vllm-project/vllm-gaudi/pull/768",
    ),
    drop_when="vllm-gaudi builds the sampling metadata of a structured-output step in the order of"
    " its logits, without a row for a prompt that gave none",
)


@site(FILE, "HPUModelRunner.sample_tokens")
def one_list_of_rows(code: Definition) -> None:
    """The requests of the rows of logits, where each reader of the rows finds them."""
    # Until `grammar_output` has been looked at, it is the flag of the step before.
    code.insert_before(
        "pd_info = self._get_prompts_and_decodes(scheduler_output)",
        "self.use_structured_output = False",
    )
    code.insert_after(
        "logits = torch.cat(logits_combined, dim=0)",
        "self.logits_req_ids = decode_sampled_requests + prefill_sampled_requests",
    )
    code.replace_expression(
        "pd_info.prompt_req_ids + pd_info.decode_req_ids", "self.logits_req_ids"
    )
    code.replace_statement(
        "struct_logprobs_req_ids = ...", "struct_logprobs_req_ids = self.logits_req_ids"
    )


@site(FILE, "HPUModelRunner.apply_grammar_bitmask")
def bitmask_by_row_of_logits(code: Definition) -> None:
    """Where a request's row is, is no longer taken from its place in the batch."""
    code.replace_statement(
        "seq = ...", "seq = [(req_id, row) for row, req_id in enumerate(self.logits_req_ids)]"
    )

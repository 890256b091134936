"""gather-logprobs-int32: ids of logprobs are narrowed before they are joined, not after.

What a user sees: on Gaudi in lazy mode, some token ids in `logprobs` or `prompt_logprobs` are no
tokens (negative, or torn 64-bit values). Turning them into text ends the API server, without
`logprobs-decode-guard`; with it, the text is empty and the id is still wrong.

Why: the sampled (or prompt) ids and the indices of `torch.topk` are int64. Both are concatenated
as int64 and only the result is cast to int32. The card has no 64-bit integers: in lazy mode int64
is emulated, and the concatenation with the cast behind it gives corrupt ids.

What is changed: each operand is cast to int32, and then they are concatenated, in both places:
`patches._hpu_gather_logprobs`, which vllm_gaudi installs as `Sampler.gather_logprobs`, and
`HPUModelRunner._gather_prompt_logprobs_hpu`. No int64 concatenation is left there. Same values,
shapes and dtype; the index of `torch.gather` stays int64, as it must. The casts are those of
before in another place, so the compiled sampler gets no operation it did not have.

Reference: vllm-gaudi #1405 (the prompt's), #1412 and #1548 (the sampler's); vLLM #38933. No public
issue names the cause. Releases: v0.26.0 and v0.30.0, same code.

Other places with the pattern:
* `Sampler.gather_logprobs` of vLLM itself: left, `_patch_gather_logprobs` replaces it. (That one
  looks for the text `mark_unbacked` in it.)
* `Sampler.gather_specific_token_logprobs` casts int64 ids without a concatenation and is not
  reached: the Gaudi runner never sets `logprob_token_ids`.
* `Sampler.forward` casts the sampled ids alone, and so does the rejection sampler: left, nothing
  is joined.

Known limit: the corruption needs a card in lazy mode. What the tests show is that the operation
which corrupts is gone, and, with a concatenation that corrupts as the card's does, that a user's
ids are right.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="ids of logprobs are narrowed to int32 before they are joined",
    symptom="in lazy mode token ids in logprobs are negative or torn, and the API server ends with"
    " an OverflowError",
    references=(
        "https://github.com/vllm-project/vllm-gaudi/pull/1405",
        "https://github.com/vllm-project/vllm-gaudi/pull/1548",
        "https://github.com/vllm-project/vllm/pull/38933",
    ),
    drop_when="neither function concatenates int64 ids",
)

NARROWED = "torch.cat((token_ids.to(torch.int32), topk_indices.to(torch.int32)), dim=1)"


@site("vllm_gaudi/patches.py", "_hpu_gather_logprobs")
def sampled_ids(code: Definition) -> None:
    """The cast of the result is no longer needed."""
    code.replace_expression("torch.cat((token_ids, topk_indices), dim=1)", NARROWED)
    code.remove("indices = indices.to(torch.int32)")


@site(
    "vllm_gaudi/v1/worker/hpu_model_runner.py",
    "HPUModelRunner._gather_prompt_logprobs_hpu",
)
def prompt_ids(code: Definition) -> None:
    """Concatenation and cast are one expression here."""
    code.replace_expression("torch.cat((token_ids, topk_indices), dim=1).to(torch.int32)", NARROWED)

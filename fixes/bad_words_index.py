"""bad-words-index: each sampled row is given its own request's bad words.

What a user sees: with more than one request in flight, one that has `bad_words` ends the engine
(`IndexError: index 1 is out of bounds for dimension 0 with size 1`, then EngineDeadError for
every client). Or, where the numbers happen to fit, its words are banned for somebody else, and
its own are not banned.

Why: `InputBatch.bad_words_token_ids` is a dict keyed by a request's place in the persistent
batch. vLLM samples that whole batch in one call, so there the place is the row, and its
`apply_bad_words` takes the key for the row of logits and of output histories. The Gaudi runner
samples in several calls (one a prefill batch, one for the decodes), each on the rows of some
requests only, in another order and padded. `make_selective_sampling_metadata` puts everything
else into that call's order and hands this dict over as it is.

What is changed: the keyword `bad_words_token_ids` of the metadata that this method returns. It
holds the rows of this call whose request has bad words, each once: padding repeats row 0, and a
speculative call has more metadata rows than logits. No request with bad words in the call: an
empty dict, for which the sampler skips the op.

Reference: none for vllm-gaudi. The dict keyed by request index came with vLLM #13376, the skip of
the empty one with #14894. Releases: v0.26.0 and v0.30.0, same code.

Other places with the pattern:
* `_make_sampling_metadata` passes the same dict: left. Its rows are the batch.
* `generators`, one keyword above, is put in order already, but padding rows get row 0's generator
  too: `seeded-sampling`. `logitsprocs` are keyed by place in the batch as well:
  `logitsprocs-rows`.
* The rejection sampler of speculative decoding reads the same dict
  (`apply_bad_words_with_drafts`): its keys are right with this fix, since the rows of a call
  start with its requests in order. It also wants one history a drafted token, which the Gaudi
  runner never gives it, so a word of several tokens is looked up in the wrong one there: left.

Known limit: a bad word of several tokens needs the ids generated so far. Under async scheduling
(the default) the Gaudi runner does not have them on the host: the history is empty on v0.26.0,
and on v0.30.0 it holds placeholders unless some request in the batch has penalties. Such a word
is then not banned by this fix alone (a test pins that); `logitsprocs-rows`, which the profiles
have as well, brings the ids, and waits for them only in calls that need them.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="each sampled row is given its own request's bad words",
    symptom="a request with bad_words beside others ends the engine with an IndexError, or its"
    " words are banned for another request",
    references=(
        "https://github.com/vllm-project/vllm/pull/13376",
        "https://github.com/vllm-project/vllm/pull/14894",
    ),
    drop_when="vllm-gaudi re-indexes bad_words_token_ids in make_selective_sampling_metadata, or"
    " samples the whole batch in one call",
)


@site(
    "vllm_gaudi/v1/worker/hpu_input_batch.py",
    "InputBatch.make_selective_sampling_metadata",
)
def words_by_row(code: Definition) -> None:
    """Key the words by row of this call; a padding row (index seen before) has none."""
    # The lines are indented relative to the statement they come into.
    code.replace_keyword(
        "bad_words_token_ids",
        "self.bad_words_token_ids",
        """{
        row: self.bad_words_token_ids[index]
        for row, index in enumerate(req_indices)
        if index in self.bad_words_token_ids and req_indices.index(index) == row
    }""",
    )

"""prompt-logprobs: a prompt's log probabilities, whatever shape the hidden states have.

What a user sees: the first request with `prompt_logprobs` ends the engine (`mat1 and mat2 shapes
cannot be multiplied`, then EngineDeadError for every client) on Qwen3-MoE, Qwen3.5-MoE,
Granite-MoE, GLM-4-MoE, on v0.30.0 also on dense Qwen3.5, and on a multimodal model whenever a
prefill batch has one prompt. On any model, a request that is preempted after its first token gets
its prompt's log probabilities twice, or ends the engine (an AssertionError in the scheduler) when
the prompt is computed anew in chunks; one that leaves the batch within its prompt, without losing
its blocks, gets uninitialised memory for what was computed before. `prompt_logprobs=-1` (all of
the vocabulary) ends the engine as well.

Why: `sample_tokens` takes `hidden_states[i]` for the rows of the batch's i-th prompt, as if they
were [prompts, length, hidden]. They are [prompts * length, hidden] where the model is given flat
ids (`flatten_input`) or the embeddings of one prompt (`_get_model_mm_inputs` squeezes them), and
[1, sum of lengths, hidden] with `VLLM_MERGED_PREFILL`: then this is one token's vector, or out of
range. The other half: `InputBatch.add_request` registers the wish for prompt log probabilities
each time a request comes into the batch, and `remove_request` drops what was computed so far each
time it leaves. vLLM registers once and keeps the buffer with the request.

What is changed: a prompt's rows are cut out of the flat states, at `i` times the padded length,
or behind the prompts before it in a merged batch. No request wants them: nothing is computed. The
buffer is kept in the request's `CachedRequestState`; a request that has output tokens was given
its prompt's log probabilities with the first of them, and is not registered again. -1 becomes the
size of the vocabulary, as in vLLM.

Reference: vllm-gaudi #1101 (the feature) and #1405; #1738 made Qwen3.5 flat. vLLM #16668 is the
same mistake with a mask. Releases: v0.26.0 and v0.30.0, same code.

Other places with the pattern:
* `_get_prompt_logprobs_dict` takes rows from the start of what it is given: left, that is right
  for every chunk, since a chunk's states begin with the chunk.
* The states that `sample_tokens` keeps for a drafter are handed on as they are: left.
* `logprobs=-1` (of sampled tokens) ends the engine in `_build_logprobs_output`: left, another
  function and another feature. Both need `--max-logprobs -1`.

Known limit: with LoRA enabled, the mask that `compute_logits` applies is that of the sampled rows
(`LoraMask`), not of a prompt's, and a request with `prompt_logprobs` still fails there. A request
that asks for prefix hits all the same (`skip_reading_prefix_cache=False`) gets nothing for the
tokens of a hit, as in vLLM: they are not computed. `logprobs_mode` is not looked at.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

RUNNER = "vllm_gaudi/v1/worker/hpu_model_runner.py"
BATCH = "vllm_gaudi/v1/worker/hpu_input_batch.py"

FIX = Fix(
    summary="prompt_logprobs work with flat hidden states and after a preemption",
    symptom="the first request with prompt_logprobs ends the engine on MoE and multimodal models;"
    " a preempted one gets its prompt's log probabilities twice",
    references=(
        "https://github.com/vllm-project/vllm-gaudi/pull/1101",
        "https://github.com/vllm-project/vllm-gaudi/pull/1405",
        "https://github.com/vllm-project/vllm/pull/16668",
    ),
    drop_when="vllm-gaudi cuts a prompt's rows out of flat hidden states and keeps the buffer of"
    " a prompt's log probabilities with the request",
)


@site(RUNNER, "HPUModelRunner.sample_tokens")
def rows_of_a_prompt(code: Definition) -> None:
    """Only where a request of the batch wants them."""
    with code.within("for i, rid in enumerate(req_id): ...") as loop:
        loop.replace_statement(
            "prefill_hidden_states_for_logprobs[rid] = non_flattened_hidden_states[i]",
            """
            # [prompts, length, hidden] and [prompts * length, hidden] have the same rows. A merged
            # batch is one row of prompts without padding between them.
            first_row = i * token_ids.shape[-1]
            if self.use_merged_prefill:
                scheduled = scheduler_output.num_scheduled_tokens
                first_row = sum(scheduled[before] for before in req_id[:i])
            prefill_hidden_states_for_logprobs[rid] = \\
                non_flattened_hidden_states.flatten(0, -2)[first_row:]
            """,
        )


@site(RUNNER, "HPUModelRunner._get_prompt_logprobs_dict")
def buffer_of_the_request(code: Definition) -> None:
    """What was computed so far stays with the request when it leaves the batch."""
    code.remove("in_progress_dict = self.input_batch.in_progress_prompt_logprobs_cpu")
    code.replace_expression(
        "in_progress_dict.get(req_id)", "request.in_progress_prompt_logprobs_cpu"
    )
    code.replace_expression("in_progress_dict[req_id]", "request.in_progress_prompt_logprobs_cpu")
    code.replace_statement(
        "in_progress_dict.pop(req_id, None)",
        "self.requests[req_id].in_progress_prompt_logprobs_cpu = None",
    )


@site(BATCH, "CachedRequestState")
def place_for_the_buffer(code: Definition) -> None:
    """Of the whole prompt, on the host; None before the first chunk and when it is delivered."""
    code.insert_after(
        "lora_request: Optional[LoRARequest] = None",
        "in_progress_prompt_logprobs_cpu: Optional[LogprobsTensors] = None",
    )


@site(BATCH, "InputBatch.add_request")
def registered_once(code: Definition) -> None:
    """A request with output tokens has its prompt's log probabilities already."""
    code.replace_statement(
        """
        if sampling_params.prompt_logprobs is not None:
            self.num_prompt_logprobs[req_id] = (sampling_params.prompt_logprobs)
        """,
        """
        if sampling_params.prompt_logprobs is not None and not request.output_token_ids:
            self.num_prompt_logprobs[req_id] = self.vocab_size \\
                if sampling_params.prompt_logprobs == -1 else sampling_params.prompt_logprobs
        """,
    )

"""logitsprocs-rows: each sampling call has its own requests' logits processors and histories.

What a user sees: `logit_bias`, `min_p`, `min_tokens` and custom logits processors do nothing, and
nothing says so. Under async scheduling (the default) the frequency, presence and repetition
penalties do not see what a request has said (v0.26.0), nor do bad words of several tokens (both
releases).

Why: vLLM's logits processors learn which request is on which row of the batch from the updates
they are given (`update_state`). The Gaudi runner builds them and never gives them any. To give
them the persistent batch's, as vLLM does, would be worse than nothing: the runner samples in
several calls a step, each on some requests, in another order and padded, and their parameters
would go to other requests' rows or to rows that are not there. The histories: under async
scheduling a step's tokens are still on the device when the next one is put together, so the
runner's lists stay empty (v0.26.0) or hold -1 for each token (v0.30.0, PR #1761, which fills in
ids only while some request in the batch has penalties).

What is changed: a support module, `gaudi_fix_row_processors`, keeps by id the requests that have
any such parameter. `make_selective_sampling_metadata` asks it for each call:
* Nobody in the call has one: a call without processors, and nobody is told anything.
* Else the processors are told what is new since the last call they had: requests on other rows
  added, rows that lost theirs removed, nothing if all is as before. Padding is no request. A
  request that leaves the batch is removed from them at once.
* `min_tokens` counts by what has been computed, which is exact without the tokens, also after a
  preemption and where PR #1761 shortens lists.
* `min_p` gets values for as many rows as the call has, in a new buffer whenever rows change: the
  one that vLLM has is for `max_num_seqs` rows, and may still be on its way to the device.
* A custom processor is shown the rows of requests only: what vLLM promises it. If there is one,
  it is told of every request.
* Tokens of requests that read them (penalties, bad words of several tokens, custom processors)
  are copied to the host as the step ends (`sample_tokens`) and waited for in the next call that
  has such a request. Nobody reads them: no copy, no wait.
* `_maybe_compile`: a compiled sampler would be compiled again whenever one of these lists grows,
  and after eight times for nobody any more. Calls that have any run that stage uncompiled; plain
  ones stay one graph. (v0.30.0 takes it out of the graph for all calls.)

Reference: vLLM #16728 (how processors are told), vllm-gaudi #84 (they are built and never told),
#1120 (histories under async scheduling, never merged), #1761 (penalties there, in v0.30.0).
Releases: v0.26.0 and v0.30.0.

Other places with the pattern:
* `generators`, `bad_words_token_ids`, device rows after a swap: `seeded-sampling`,
  `bad-words-index`, `sampling-rows-refresh`.
* In a step with structured output that mixes prompts and decodes the runner gives the sampler the
  requests in another order than the logits: `structured-output-rows`. This fix follows the list
  it is given.
* `InputBatch.min_p` and `batch_update_builder` are filled or made and read by nobody: left.
* `swap_states`, `condense` and speculative decoding: nothing to do, requests are known by id. In a
  speculative call, which has more rows than logits, only rows of requests count. vLLM builds no
  processor but `min_tokens` there.
* `update_async_output_token_ids` (v0.30.0) goes on filling the runner's own lists, whole runs of
  placeholders by one id: left, nobody reads a list whose placeholders matter.
* `thinking_token_budget`: the runner never makes its holder. Another feature: left.

Known limit: a custom processor hears of a request again (with all it has said) when a prefill
call came between, as it does in vLLM after a preemption; and the token of an unfinished prompt,
which is thrown away, is sampled with it too. With `VLLM_T_COMPILE_FULLGRAPH=1` on v0.26.0 such
calls cannot be compiled. Graphs for `min_p` and biases are not warmed up.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

BATCH = "vllm_gaudi/v1/worker/hpu_input_batch.py"
RUNNER = "vllm_gaudi/v1/worker/hpu_model_runner.py"
MODULE = "vllm_gaudi.v1.worker.gaudi_fix_row_processors"

FIX = Fix(
    summary="logits processors and output histories follow the rows of each sampling call",
    symptom="logit_bias, min_p, min_tokens and custom logits processors are ignored; under async"
    " scheduling so are penalties and bad words of several tokens",
    references=(
        "https://github.com/vllm-project/vllm/pull/16728",
        "https://github.com/vllm-project/vllm-gaudi/pull/84",
        "https://github.com/vllm-project/vllm-gaudi/pull/1120",
        "https://github.com/vllm-project/vllm-gaudi/pull/1761",
    ),
    drop_when="vllm-gaudi tells logits processors which rows a sampling call has, and hands the"
    " sampler the tokens of earlier steps under async scheduling",
    support={"vllm_gaudi/v1/worker/gaudi_fix_row_processors.py": "row_processors.py"},
    relies_on=(
        f"{RUNNER}::HPUModelRunner._generate_req_id_output_token_ids_lst",
        "vllm/v1/sample/logits_processor/builtin.py::MinPLogitsProcessor",
        "vllm/v1/sample/logits_processor/builtin.py::process_dict_updates",
    ),
)


@site(BATCH, "InputBatch.__init__")
def one_each_batch(code: Definition) -> None:
    """The batch knows which request its processors have on which row."""
    code.insert_after(
        "self.logitsprocs = ...",
        f"""
        from {MODULE} import RowProcessors
        self.logitsprocs.by_row = RowProcessors(self.logitsprocs, device, pin_memory)
        """,
    )


@site(BATCH, "InputBatch.add_request")
def remember(code: Definition) -> None:
    """By id, so that moves within the batch need nothing."""
    code.insert_before("return req_index", "self.logitsprocs.by_row.add(request)")


@site(BATCH, "InputBatch.remove_request")
def forget(code: Definition) -> None:
    """At once, not when the row is next used."""
    code.insert_first("self.logitsprocs.by_row.remove(req_id)")


@site(BATCH, "InputBatch.make_selective_sampling_metadata")
def rows_of_the_call(code: Definition) -> None:
    """The call's own processors and histories."""
    code.insert_before(
        "return SamplingMetadata(...)",
        """
        output_token_ids, logitsprocs = self.logitsprocs.by_row.of_call(
            req_id_output_token_ids)
        """,
    )
    code.replace_keyword("logitsprocs", "self.logitsprocs", "logitsprocs")


@site(RUNNER, "HPUModelRunner.sample_tokens")
def tokens_for_the_next_step(code: Definition) -> None:
    """Async scheduling: start the copy that somebody will read in the next step."""
    code.insert_after(
        "self.input_batch.prev_req_id_to_index = ...",
        """
        self.input_batch.logitsprocs.by_row.sampled(
            self.input_batch.prev_sampled_token_ids, self.input_batch.prev_req_id_to_index)
        """,
    )


@site(RUNNER, "HPUModelRunner._maybe_compile", shape="compiled")
def python_stays_out_of_the_graph(code: Definition) -> None:
    """v0.26.0: lists of Python are compiled into the sampler."""
    code.insert_before(
        "self.sampler = self._compile(self.sampler)",
        f"""
        from {MODULE} import compiled_if_plain
        Sampler.apply_logits_processors = compiled_if_plain(Sampler.apply_logits_processors)
        """,
    )


@site(RUNNER, "HPUModelRunner._maybe_compile", shape="uncompiled")
def plain_calls_stay_in_the_graph(code: Definition) -> None:
    """v0.30.0: the whole stage is taken out of the graph, also for calls that have no list."""
    code.insert_before(
        "Sampler.apply_logits_processors = ...", f"from {MODULE} import compiled_if_plain"
    )
    code.replace_expression(
        "torch.compiler.disable(Sampler.apply_logits_processors)",
        "compiled_if_plain(Sampler.apply_logits_processors)",
    )

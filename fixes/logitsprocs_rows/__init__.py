"""logitsprocs-rows: TODO

Reference: x
Other places with the pattern: x
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

BATCH = "vllm_gaudi/v1/worker/hpu_input_batch.py"
RUNNER = "vllm_gaudi/v1/worker/hpu_model_runner.py"

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
        """
        from vllm_gaudi.v1.worker.gaudi_fix_row_processors import RowProcessors
        self.row_processors = RowProcessors(self.logitsprocs, device, pin_memory)
        """,
    )


@site(BATCH, "InputBatch.add_request")
def remember(code: Definition) -> None:
    """By id, so that moves within the batch need nothing."""
    code.insert_before("return req_index", "self.row_processors.add(request)")


@site(BATCH, "InputBatch.remove_request")
def forget(code: Definition) -> None:
    """At once, not when the row is next used."""
    code.insert_first("self.row_processors.remove(req_id)")


@site(BATCH, "InputBatch.make_selective_sampling_metadata")
def rows_of_the_call(code: Definition) -> None:
    """The call's own processors and histories."""
    code.insert_before(
        "return SamplingMetadata(...)",
        """
        output_token_ids, logitsprocs = self.row_processors.of_call(
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
        self.input_batch.row_processors.sampled(
            self.input_batch.prev_sampled_token_ids, self.input_batch.prev_req_id_to_index)
        """,
    )

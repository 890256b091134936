"""structured-output-rows on the runner's real `sample_tokens`, with logits that a test chooses.

The forward pass and what prepares it are stood in for. All around them is the runner's own code:
arranging the rows, the lists of requests, the bitmask, the sampler, tokens and logprobs.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from tests.support import bare_runner

pytestmark = [pytest.mark.needs("engine"), pytest.mark.level("class")]

VOCAB = 32


class Step:
    """Requests of one step; what a prompt or a decode answers is in its logits: its favourite."""

    def __init__(self, monkeypatch):
        import torch
        from vllm.v1.sample.sampler import Sampler

        self.runner = bare_runner.runner(vocabulary=VOCAB)
        self.favourites, self.scheduled, self.without_row = {}, {}, set()
        monkeypatch.setattr(bare_runner.module(), "get_kv_transfer_group", lambda: None)
        nothing = contextlib.nullcontext()
        vars(self.runner).update(
            profiler=SimpleNamespace(
                enabled=False,
                record_event=lambda *_: nothing,
                start=lambda *_: None,
                end=lambda: None,
                get_timestamp_us=lambda: 0,
            ),
            sampler=Sampler(logprobs_mode="raw_logprobs"),
            is_driver_worker=False,
            use_aux_hidden_state_outputs=False,
            use_structured_output=False,
            lora_config=None,
            kv_caches=[],
            max_model_len=64,
            batch_changed=True,
            _configure_lora=lambda *_: (None, None),
            _get_model_mm_inputs=lambda *_: (None, None),
            _get_prompt_logprobs_dict=lambda *_: {},
            _prepare_inputs=self.prepared,
            _execute_model_generic=self.forward,
        )
        self.zero = torch.zeros(1)

    def add(self, name, favourite, *, decode=False, row=True, **params):
        """A request whose logits are highest at its favourite; second best is the token after."""
        from vllm.sampling_params import SamplingParams
        from vllm_gaudi.v1.worker.hpu_input_batch import CachedRequestState

        state = self.runner.requests[name] = CachedRequestState(
            req_id=name,
            prompt_token_ids=[1, 2, 3, 4],
            mm_features=[],
            sampling_params=SamplingParams(**({"temperature": 0.0} | params)),
            generator=None,
            block_ids=[[1]],
            num_computed_tokens=4 if decode else 0,
            output_token_ids=[9] if decode else [],
        )
        self.runner.input_batch.add_request(state)
        self.favourites[name] = favourite
        # A prompt that gives no row of logits is not at its end in this step.
        self.scheduled[name] = 1 if decode else 4 if row else 2
        if not row:
            self.without_row.add(name)

    def prepared(self, _output, num_prefills, num_decodes, _warmup):
        """One batch for each prompt, one for the decodes, padded by a row."""
        module = bare_runner.module()
        names = self.runner.input_batch.req_ids
        prompts = module.PrefillInputData()
        for name in names[num_decodes : num_decodes + num_prefills]:
            rows = [] if name in self.without_row else [name]
            for field, value in vars(prompts).items():
                value.append(rows if field in ("logits_indices", "logits_requests") else [name])
            prompts.token_ids[-1] = prompts.attn_metadata[-1] = self.zero
        decodes = module.DecodeInputData(num_decodes=num_decodes)
        decodes.logits_indices = [*names[:num_decodes], names[0]]
        decodes.token_ids = self.zero
        return (prompts, None), (decodes, None)

    def forward(self, _tokens, _positions, _attention, logits_indices, *_args, **_kwargs):
        """Each row of logits is that of the request named."""
        import torch

        logits = torch.zeros(len(logits_indices), VOCAB)
        for row, name in enumerate(logits_indices):
            logits[row, self.favourites[name]] = 4.0
            logits[row, self.favourites[name] + 1] = 3.0
        return self.zero, None, self.zero, logits

    def run(self, **grammars):
        """Sample; `grammars` are the tokens that structured requests may say."""
        import numpy as np
        from vllm.v1.core.sched.output import GrammarOutput

        bits = np.zeros((len(grammars), VOCAB // 32), dtype=np.int32)
        for row, allowed in enumerate(grammars.values()):
            bits[row, 0] = sum(1 << token for token in allowed)
        self.runner.scheduler_output = bare_runner.step(self.scheduled)
        self.runner.warmup_mode = True  # without the connector of a KV cache elsewhere
        self.runner.input_batch.refresh_sampling_metadata()
        grammar = GrammarOutput(list(grammars), bits) if grammars else None
        self.output = self.runner.sample_tokens(grammar)
        rows = self.output.req_id_to_index
        return {name: self.output.sampled_token_ids[rows[name]] for name in self.favourites}


@pytest.fixture
def step(monkeypatch):
    return Step(monkeypatch)


@pytest.mark.red(r"assert \{'D': \[9\], 'P': \[8\]\} == \{'D': \[5\], 'P': \[9\]\}")
def test_mixed_step(step):
    """A decode with a grammar, and a prompt with a list of allowed tokens of its own."""
    step.add("D", 5, decode=True)
    step.add("P", 8, temperature=1.0, allowed_token_ids=[9])
    assert step.run(D=[5, 6, 9]) == {"D": [5], "P": [9]}


@pytest.mark.red(r"IndexError: index 1 is out of bounds for axis 0 with size 1")
def test_prompt_without_a_row_in_front_of_a_structured_one(step):
    """On stock the bitmask is put at the second row of one."""
    step.add("chunk", 3, row=False)
    step.add("S", 5)
    assert step.run(S=[6, 7]) == {"chunk": [], "S": [6]}


@pytest.mark.red(r"IndexError: index 3 is out of bounds for axis 0 with size 3")
def test_prompt_without_a_row_between_others(step):
    step.add("D", 5, decode=True, allowed_token_ids=[11])
    step.add("chunk", 3, row=False, allowed_token_ids=[12])
    step.add("P", 7, allowed_token_ids=[13])
    step.add("S", 9)
    expected = {"D": [11], "chunk": [], "P": [13], "S": [10]}
    assert step.run(S=[10]) == expected


@pytest.mark.red(r"IndexError: index 2 is out of bounds for axis 0 with size 2")
def test_logprobs_with_a_prompt_without_a_row(step):
    step.add("D", 5, decode=True, logprobs=0)
    step.add("chunk", 3, row=False, logprobs=0)
    step.add("S", 9, logprobs=0)
    step.run(S=[10])
    rows = step.output.req_id_to_index
    sampled = step.output.logprobs.logprob_token_ids[:, 0]
    assert (sampled[rows["D"]], sampled[rows["S"]]) == (5, 10)


@pytest.mark.red(r"assert True is False")
def test_flag_of_the_step_before_is_not_read(step):
    """`_prepare_inputs` gives an unfinished prompt a row of logits where the flag is set."""
    step.add("S", 5)
    step.runner.use_structured_output = True
    seen = []
    prepared = step.runner._prepare_inputs

    def watched(*args):
        seen.append(step.runner.use_structured_output)
        return prepared(*args)

    step.runner._prepare_inputs = watched
    step.run(S=[5])
    assert seen[0] is False
    assert step.runner.use_structured_output


# --- neighbours ----------------------------------------------------------------------------------


def test_decodes_only(step):
    step.add("D", 5, decode=True, allowed_token_ids=[11])
    step.add("S", 7, decode=True)
    assert step.run(S=[8]) == {"D": [11], "S": [8]}


def test_prompts_only(step):
    step.add("P", 5, allowed_token_ids=[11])
    step.add("S", 7)
    assert step.run(S=[8]) == {"P": [11], "S": [8]}


def test_step_without_structured_output(step):
    step.add("D", 5, decode=True, allowed_token_ids=[11])
    step.add("P", 7, allowed_token_ids=[13])
    assert step.run() == {"D": [11], "P": [13]}

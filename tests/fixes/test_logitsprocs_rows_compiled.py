"""logitsprocs-rows: lists of Python in a compiled sampler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.needs("engine"), pytest.mark.level("class")]


@pytest.mark.red(r"\[\[1, 0, 0, 0\], \[[1-9]", release="v0.26.0")
@pytest.mark.red(r"\[\[2, 0, 0, 0\]", release="v0.30.0")
def test_a_compiled_sampler_is_compiled_once(monkeypatch):
    """Whatever the requests have said so far; and a call that reads no list is one graph."""
    from tests.support import bare_runner

    module = bare_runner.module()
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    graphs = 0

    def backend(graph, _inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False)),
        model=None,
        sampler=Sampler(),
        _compile_methods=lambda: None,
        _regional_compilation=lambda _model: None,
        # The emulated device makes nothing of torch.compile; this is what it is made of.
        _compile=lambda sampler, **_: torch._dynamo.optimize(backend, dynamic=False)(sampler),
    )
    stage = Sampler.apply_logits_processors
    monkeypatch.setattr(Sampler, "apply_logits_processors", stage)  # given back at the end
    monkeypatch.setattr(module, "is_fake_hpu", lambda: False)
    monkeypatch.setattr(module.htorch.utils.internal, "is_lazy", lambda: False)
    config = SimpleNamespace(regional_compilation=True, fullgraph=False)
    monkeypatch.setattr(module, "HPUCompileConfig", lambda: config)
    monkeypatch.setattr(torch._dynamo.config, "force_parameter_static_shapes", False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # of streams, to trace
    module.HPUModelRunner._maybe_compile(runner)

    said = [[5], [6]]

    def new_graphs(penalties, words):
        before = graphs
        metadata = SamplingMetadata(
            temperature=None,
            all_greedy=True,
            all_random=False,
            top_p=None,
            top_k=None,
            generators={},
            max_num_logprobs=None,
            no_penalties=not penalties,
            prompt_token_ids=torch.zeros(2, 3, dtype=torch.int64),
            frequency_penalties=torch.ones(2),
            presence_penalties=torch.ones(2),
            repetition_penalties=torch.ones(2),
            output_token_ids=[list(tokens) for tokens in said],
            allowed_token_ids_mask=None,
            bad_words_token_ids=words,
            logitsprocs=LogitsProcessors(),
        )
        runner.sampler(logits=torch.randn(2, 16), sampling_metadata=metadata)
        for tokens in said:
            tokens.append(7)
        return graphs - before

    plain = [new_graphs(False, {}) for _ in range(4)]
    with_lists = [new_graphs(True, {}), *(new_graphs(True, {0: [[7, 8]]}) for _ in range(3))]
    assert [plain, with_lists[2:]] == [[1, 0, 0, 0], [0, 0]], with_lists

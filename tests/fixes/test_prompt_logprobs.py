"""prompt-logprobs on the engine, against the same weights in transformers."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("engine")

TOP = 3
LENGTHS = (5, 40, 130)
# One token's vector is taken for its prompt's rows; cut at the prompt's length, it may even fit.
FLAT = (
    r"mat1 and mat2 shapes cannot be multiplied"
    r"|Index tensor must have the same number of dimensions as input tensor"
)
SEVERAL = (("VLLM_PROMPT_BS_BUCKET_MAX", "4"),)  # prompts of a prefill batch; one is the default
MERGED = (("VLLM_MERGED_PREFILL", "1"),)


def wish(top=TOP, length=2):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, prompt_logprobs=top)


@pytest.fixture
def prompts(words):
    return [words(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture
def shapes(monkeypatch):
    """shapes(engine): a list that gets the shapes of ids and states of each forward pass."""

    def of(engine):
        seen = []
        whole = type(engine.runner)._execute_model_generic

        def record(self, token_ids, *args, **kwargs):
            result = whole(self, token_ids, *args, **kwargs)
            seen.append((tuple(token_ids.shape), tuple(result[0].shape)))
            return result

        monkeypatch.setattr(type(engine.runner), "_execute_model_generic", record)
        return seen

    return of


def assert_the_models_own(engine, output, top=TOP, **inputs):
    """Each prompt token and the best ones: ids, log probabilities and ranks.

    bfloat16 sends a token to another expert now and then: one position in ten may be off.
    """
    import torch

    from tests.emulation import reference

    prompt, found = list(output.prompt_token_ids), output.prompt_logprobs
    assert len(found) == len(prompt), f"{len(found)} positions for {len(prompt)} tokens"
    assert found[0] is None
    logits = reference.logits(engine.checkpoint, prompt[:1], prompt[1:], **inputs)
    scores = logits.log_softmax(-1)
    off = []
    for token, position, score in zip(prompt[1:], found[1:], scores, strict=True):
        assert token in position, f"not the prompt's own token {token}: {position}"
        ranked = {entry.rank: entry.logprob for entry in position.values()}
        assert set(ranked) >= set(range(1, top + 1))
        best = score.topk(top).values.tolist() if top else []
        pairs = [(ranked[rank + 1], value) for rank, value in enumerate(best)]
        pairs += [(entry.logprob, float(score[t])) for t, entry in position.items()]
        off.append(max(abs(one - other) for one, other in pairs))
        above = int((score > score[token] + 0.2).sum())
        below = int((score < score[token] - 0.2).sum())
        if off[-1] <= 0.1:
            assert above < position[token].rank <= len(score) - below
    share = torch.tensor(off).quantile(0.9)
    assert share <= 0.1, f"log probabilities are off by {share:.2f}"


def assert_all(engine, outputs, **inputs):
    for output in outputs:
        assert_the_models_own(engine, output, **inputs)


# --- the layouts of hidden states ----------------------------------------------------------------


@pytest.mark.red(FLAT)
def test_model_with_flat_ids(engines, prompts, shapes):
    engine = engines(model="moe")
    seen = shapes(engine)
    assert_all(engine, engine.generate(prompts, wish()))
    assert ((1, 128), (128, 64)) in seen


@pytest.mark.red(FLAT)
def test_model_with_flat_ids_and_several_prompts_in_a_batch(engines, prompts, shapes):
    engine = engines(model="moe", environment=SEVERAL)
    seen = shapes(engine)
    assert_all(engine, engine.generate(prompts, wish()))
    assert ((4, 256), (1024, 64)) in seen


@pytest.mark.red(FLAT)
def test_model_with_flat_ids_and_a_prompt_in_chunks(engines, words):
    engine = engines(model="moe", chunk=128)
    assert_all(engine, engine.generate([words(3, 300), words(4, 129), words(5, 20)], wish()))


@pytest.mark.red(FLAT)
def test_multimodal_model_with_one_prompt_in_a_batch(engines, words, shapes):
    from tests.emulation.pictures import prompt_with_images

    engine = engines(model="vision")
    seen = shapes(engine)
    assert_all(engine, engine.generate([words(6, 40)], wish()))
    prompt, inputs = prompt_with_images(engine, words(50, 6), 2)
    assert_all(engine, engine.generate([prompt], wish()), **inputs)
    assert seen[0] == ((1, 128), (128, 64))


@pytest.mark.red(r"IndexError: index 1 is out of bounds for dimension 0 with size 1")
def test_merged_prefill(engines, prompts, shapes):
    """All prompts in one row, without padding between them."""
    engine = engines(model="dense", environment=MERGED)
    seen = shapes(engine)
    assert_all(engine, engine.generate(prompts, wish()))
    assert ((1, 512), (1, 512, 64)) in seen or ((1, 256), (1, 256, 64)) in seen


@pytest.mark.red(FLAT, release="v0.30.0")
def test_hybrid_model(engines, prompts):
    """Its hidden states are flat on v0.30.0."""
    engine = engines(model="hybrid")
    assert_all(engine, engine.generate(prompts, wish()))


@pytest.mark.red(FLAT)
def test_some_requests_want_them_and_some_do_not(engines, prompts):
    from vllm import SamplingParams

    engine = engines(model="moe", environment=SEVERAL)
    none = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = engine.generate(prompts, [none, wish(), wish(top=0)])
    assert outputs[0].prompt_logprobs is None
    assert_the_models_own(engine, outputs[1])
    assert_the_models_own(engine, outputs[2], top=0)


@pytest.mark.red(r"selected index k out of range")
def test_the_whole_vocabulary(engines, words):
    engine = engines(model="dense", arguments=(("max_logprobs", -1),))
    (output,) = engine.generate([words(8, 12)], wish(top=-1))
    assert [len(position) for position in output.prompt_logprobs[1:]] == [256] * 11
    assert_the_models_own(engine, output, top=256)


# --- requests that leave the batch and come back -------------------------------------------------


def preempted(engine, monkeypatch):
    """A list that gets each preemption: number of output tokens at that moment."""
    seen = []
    scheduler = type(engine.scheduler)
    whole = scheduler._preempt_request

    def record(self, request, *args, **kwargs):
        seen.append((request.num_computed_tokens, request.num_output_tokens))
        return whole(self, request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", record)
    return seen


@pytest.mark.red(r"\d+ positions for 200 tokens")
def test_preempted_after_the_first_token(engines, words, monkeypatch):
    """The whole prompt is computed anew, in one go."""
    engine = engines(model="dense", blocks=6, length=512)
    seen = preempted(engine, monkeypatch)
    outputs = engine.generate([words(100 + n, 200) for n in range(3)], wish(length=80))
    assert any(outputs_so_far for _, outputs_so_far in seen)
    assert_all(engine, outputs)


@pytest.mark.red(r"AssertionError")
def test_preempted_after_the_first_token_and_recomputed_in_chunks(engines, words, monkeypatch):
    """A chunk ends behind the prompt and before the last token: no token comes of it."""
    engine = engines(model="dense", blocks=6, length=512, chunk=128)
    seen = preempted(engine, monkeypatch)
    outputs = engine.generate([words(100 + n, 120) for n in range(3)], wish(length=140))
    assert any(outputs_so_far > 8 for _, outputs_so_far in seen)
    assert_all(engine, outputs)


@pytest.mark.red(r"not the prompt's own token")
def test_not_scheduled_for_a_step_within_the_prompt(engines, words, monkeypatch):
    """As happens where the encoder's budget is used up: the blocks stay, the row goes."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

    engine = engines(model="dense", chunk=128)
    scheduler = type(engine.scheduler)
    whole = scheduler.schedule
    waited = []

    def schedule(self, *args, **kwargs):
        within = [r for r in self.running if 128 <= r.num_computed_tokens < r.num_prompt_tokens]
        if within and not waited:
            waited.extend(within)
            self.running = [r for r in self.running if r not in within]
            try:
                return whole(self, *args, **kwargs)
            finally:
                self.running.extend(within)
        return whole(self, *args, **kwargs)

    def zeros(rows, width):
        """Memory that nobody has written, the same every time."""
        return LogprobsTensors(
            torch.zeros(rows, width, dtype=torch.int32),
            torch.zeros(rows, width),
            torch.zeros(rows, dtype=torch.int32),
        )

    monkeypatch.setattr(scheduler, "schedule", schedule)
    monkeypatch.setattr(LogprobsTensors, "empty_cpu", zeros)
    outputs = engine.generate([words(10, 20), words(11, 300)], wish(length=8))
    assert [request.num_prompt_tokens for request in waited] == [300]
    assert_all(engine, outputs)


# --- neighbours ----------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [(), SEVERAL], ids=["one", "several"])
def test_dense_model(engines, prompts, environment):
    engine = engines(model="dense", environment=environment)
    assert_all(engine, engine.generate(prompts, wish()))


def test_prefix_hits(engines, words):
    """A request that wants them computes its whole prompt, as in vLLM."""
    engine = engines(model="dense", prefix_caching=True)
    shared = words(7, 260)
    engine.tokens([shared])
    (output,) = engine.generate([shared + words(8, 20)], wish())
    assert not output.num_cached_tokens
    assert_the_models_own(engine, output)


def test_nobody_wants_them(engines, prompts, monkeypatch):
    """No logits but those that are sampled, and no request's states are kept."""
    engine = engines(model="moe", environment=SEVERAL)
    runner = engine.runner
    passes, logits, kept = [], [], []
    monkeypatch.setattr(runner, "_execute_model_generic", counted(runner, passes))
    whole = runner.model.compute_logits
    monkeypatch.setattr(
        runner.model, "compute_logits", lambda rows: logits.append(len(rows)) or whole(rows)
    )
    gather = runner._get_prompt_logprobs_dict
    monkeypatch.setattr(
        runner,
        "_get_prompt_logprobs_dict",
        lambda states, step: kept.append(dict(states)) or gather(states, step),
    )
    engine.tokens(prompts, length=3)
    assert len(passes) == len(logits) > 0
    assert not any(kept)


def counted(runner, calls):
    whole = runner._execute_model_generic

    def call(*args, **kwargs):
        calls.append(1)
        return whole(*args, **kwargs)

    return call

"""The emulated engine says what the model says, however the work was cut into steps."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.emulation.engine import Engines

pytestmark = pytest.mark.needs("engine")

MODELS = ["dense", "hybrid", "moe", "vision"]
LENGTHS = (5, 40, 130, 300)  # below a block, and over one, two and three of them

Words = Callable[[int, int], list[int]]


@pytest.fixture(scope="session")
def prompts(words: Words) -> list[list[int]]:
    return [words(seed, length) for seed, length in enumerate(LENGTHS)]


def assert_greedy(engine: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
    from tests.emulation.reference import TIE, regrets

    for prompt, answer in zip(prompts, answers, strict=True):
        found = regrets(engine.checkpoint, prompt, answer)
        assert max(found) <= TIE, f"prompt of {len(prompt)}: {answer} is below the best by {found}"


@pytest.mark.parametrize("model", MODELS)
def test_greedy_equals_transformers_in_a_batch_and_one_at_a_time(
    engines: Engines, prompts: list[list[int]], model: str
) -> None:
    engine = engines(model=model)
    together = engine.tokens(prompts)
    assert_greedy(engine, prompts, together)
    alone = [engine.tokens([prompt])[0] for prompt in prompts]
    assert_greedy(engine, prompts, alone)


@pytest.mark.parametrize("model", MODELS)
def test_asynchronous_scheduling(engines: Engines, prompts: list[list[int]], model: str) -> None:
    engine = engines(model=model, asynchronous=True)
    assert_greedy(engine, prompts, engine.tokens(prompts))


@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_lazy_mode(engines: Engines, prompts: list[list[int]], model: str) -> None:
    engine = engines(model=model, lazy=True)
    assert_greedy(engine, prompts, engine.tokens(prompts))


@pytest.mark.parametrize("model", MODELS)
def test_prompt_in_chunks(engines: Engines, prompts: list[list[int]], model: str) -> None:
    engine = engines(model=model, chunk=128)
    assert_greedy(engine, prompts, engine.tokens(prompts))


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_preempted_requests_go_on(engines: Engines, words: Words, model: str) -> None:
    engine = engines(model=model, blocks=6, length=512)
    prompts = [words(100 + n, 200) for n in range(3)]
    preempted = []
    scheduler = engine.scheduler
    whole = type(scheduler)._preempt_request

    def record(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return whole(self, request, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(scheduler), "_preempt_request", record)
        answers = engine.tokens(prompts, length=80)
    assert preempted, "the pool was large enough for all"
    assert_greedy(engine, prompts, answers)


def test_prefix_hits_of_attention_layers(engines: Engines, words: Words) -> None:
    engine = engines(model="dense", prefix_caching=True)
    shared = words(7, 260)
    prompts = [shared + words(8 + n, 20) for n in range(3)]
    cold = engine.tokens(prompts[:1])
    outputs = [engine.generate([p], _greedy())[0] for p in prompts]
    assert [o.num_cached_tokens for o in outputs] == [256, 256, 256]
    answers = [list(o.outputs[0].token_ids) for o in outputs]
    assert_greedy(engine, prompts, answers)
    assert answers[0] == cold[0]


def _greedy(length: int = 16) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)


def test_text_goes_in_and_comes_out(engines: Engines) -> None:
    engine = engines(model="dense")
    (output,) = engine.generate(["w8 w9 w10"], _greedy(3))
    assert output.prompt_token_ids == [8, 9, 10]
    assert output.outputs[0].text.split() == [f"w{n}" for n in output.outputs[0].token_ids]


@pytest.mark.parametrize("images", [1, 3])
def test_images_are_seen(engines: Engines, words: Words, images: int) -> None:
    """Image tokens come out of the real processor and encoder, and change the answer."""
    from tests.emulation.pictures import prompt_with_images

    engine = engines(model="vision")
    prompt, inputs = prompt_with_images(engine, words(50, 6), images)
    (output,) = engine.generate([prompt], _greedy())
    answer = list(output.outputs[0].token_ids)
    from tests.emulation.reference import TIE, regrets

    found = regrets(engine.checkpoint, list(output.prompt_token_ids), answer, **inputs)
    assert max(found) <= TIE, found

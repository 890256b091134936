"""mm-encoder-budget on the engine: Qwen3-VL with several images in a prompt."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("engine")

VARIABLE = "VLLM_HPU_MM_ENCODER_MAX_PATCHES"
BUDGET = 32


@pytest.fixture
def calls(monkeypatch):
    """The patches of each image, by call of the encoder."""
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

    made = []
    stock = Qwen3VLForConditionalGeneration.embed_multimodal

    def record(self, **inputs):
        made.append(inputs["image_grid_thw"].prod(dim=-1).tolist())
        return stock(self, **inputs)

    monkeypatch.setattr(Qwen3VLForConditionalGeneration, "embed_multimodal", record)
    return made


def answers(engine, words, counts):
    """The answers to prompts with so many images each, in flight together."""
    from tests.emulation.pictures import prompt_with_images

    prompts = [prompt_with_images(engine, words(50 + n, 6), n)[0] for n in counts]
    return engine.tokens(prompts)


@pytest.mark.red(r"assert \[\[.*\] == \[\]")
def test_five_images_and_the_answers_of_one_call(engines, words, calls):
    whole = answers(engines(model="vision"), words, [5, 3])
    assert any(sum(call) > BUDGET for call in calls), "the images are too small for this test"
    calls.clear()
    budgeted = engines(model="vision", environment=((VARIABLE, str(BUDGET)),))
    calls.clear()  # of the start
    assert answers(budgeted, words, [5, 3]) == whole
    assert [call for call in calls if sum(call) > BUDGET and len(call) > 1] == []
    assert sum(len(call) for call in calls) == 8


@pytest.mark.red(r"DID NOT RAISE")
def test_the_start_is_refused(engines):
    with pytest.raises(ValueError, match=rf"{VARIABLE} must be a positive integer"):
        engines(model="vision", environment=((VARIABLE, "64k"),))

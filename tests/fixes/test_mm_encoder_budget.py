"""mm-encoder-budget: the runner's own method on vLLM's real multimodal items."""

from __future__ import annotations

import importlib
import itertools
import weakref
from types import SimpleNamespace

import pytest

from tests.support import standin

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("vllm_gaudi")]

VARIABLE = "VLLM_HPU_MM_ENCODER_MAX_PATCHES"
HIDDEN = 3


@pytest.fixture(scope="module")
def runner_module():
    standin.device()
    return importlib.import_module("vllm_gaudi.v1.worker.hpu_model_runner")


def image(frames, height, width, *, kind="image", seed=0):
    """An image or video of frames x height x width patches; the pixels say which patch it is."""
    import torch
    from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

    inputs = importlib.import_module("vllm.multimodal.inputs")
    patches = frames * height * width
    pixels = torch.arange(patches * 2.0).view(patches, 2) + 1000 * seed
    flat = inputs.MultiModalFlatField(slices=[[slice(0, patches)]], dim=0)
    names = ("pixel_values", "image_grid_thw")
    if kind == "video":
        names = ("pixel_values_videos", "video_grid_thw")
    grid = torch.tensor([frames, height, width])
    data = {
        names[0]: MultiModalFieldElem(data=pixels, field=flat),
        names[1]: MultiModalFieldElem(data=grid, field=inputs.MultiModalBatchedField()),
    }
    return kind, MultiModalKwargsItem(data), patches // 4


def sound(embeddings, seed=0):
    """An item without a grid."""
    import torch
    from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

    inputs = importlib.import_module("vllm.multimodal.inputs")
    features = torch.arange(embeddings * 2.0).view(embeddings, 2) + 1000 * seed
    flat = inputs.MultiModalFlatField(slices=[[slice(0, embeddings)]], dim=0)
    data = {"features": MultiModalFieldElem(data=features, field=flat)}
    return "audio", MultiModalKwargsItem(data), embeddings


class Encoder:
    """Embeds each item by numbers that come from its own pixels; keeps count of its calls."""

    def __init__(self):
        self.calls, self.inputs = [], []

    def embed_multimodal(self, **inputs):
        (values,) = [value for name, value in inputs.items() if not name.endswith("thw")]
        grids = [value for name, value in inputs.items() if name.endswith("thw")]
        if grids:
            sizes = grids[0].prod(dim=1).tolist()
            outputs = [part.view(-1, 4, 2).sum(dim=1) for part in values.split(sizes)]
        else:
            sizes = [len(values)]
            outputs = [values]
        self.calls.append(sizes)
        self.inputs.append(weakref.ref(values))
        return [output.sum(dim=1, keepdim=True).expand(-1, HIDDEN) * 1.0 for output in outputs]

    def assert_released(self):
        alive = [tensor for tensor in self.inputs if tensor() is not None]
        assert not alive, "inputs of the call before are still there"


def encode(runner_module, *requests, cached=(), encoder=None):
    """Run the method for requests (lists of items); the calls it made, and the cache by hash."""
    encoder = encoder or Encoder()
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    states, ids = {}, []
    for number, items in enumerate(requests):
        features = []
        for place, (modality, item, embeddings) in enumerate(items):
            position = PlaceholderRange(offset=place, length=embeddings)
            features.append(
                SimpleNamespace(
                    modality=modality,
                    data=item,
                    identifier=f"{number}.{place}",
                    mm_position=position,
                )
            )
        ids.append(f"r{number}")
        states[ids[-1]] = SimpleNamespace(mm_features=features)
    runner = SimpleNamespace(
        requests=states,
        encoder_cache=dict.fromkeys(cached, "kept"),
        device=torch.device("cpu"),
        pin_memory=False,
        model=encoder,
    )
    try:
        support = importlib.import_module("vllm_gaudi.v1.worker.gaudi_fix_mm_encoder_budget")
    except ModuleNotFoundError:
        pass  # stock does not look at the variable
    else:
        runner.mm_encoder_budget = support.EncoderBudget.from_environment()
    runner_module.HPUModelRunner._execute_mm_encoder(runner, None, ids)
    return encoder.calls, runner.encoder_cache


def assert_same_cache(found, expected):
    import torch

    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def assert_budget(runner_module, monkeypatch, budget, requests, expected):
    """The calls are those expected, and the cache is what one call would have put there."""
    _, whole = encode(runner_module, *requests)
    monkeypatch.setenv(VARIABLE, str(budget))
    calls, cache = encode(runner_module, *requests)
    assert calls == expected
    assert_same_cache(cache, whole)


# --- the fault -----------------------------------------------------------------------------------


@pytest.mark.red(r"assert \[\[64, 64, 64")
def test_calls_hold_no_more_than_the_budget(runner_module, monkeypatch):
    images = [image(1, 8, 8, seed=n) for n in range(16)]
    assert_budget(runner_module, monkeypatch, 256, [images], [[64] * 4] * 4)


@pytest.mark.red(r"assert \[\[256, 256")
def test_every_item_alone(runner_module, monkeypatch):
    images = [image(1, 16, 16, seed=n) for n in range(7)]
    assert_budget(runner_module, monkeypatch, 256, [images], [[256]] * 7)


@pytest.mark.red(r"assert \[\[16, 400, 16, 16\]\]")
def test_one_that_is_larger_comes_alone(runner_module, monkeypatch):
    images = [image(1, 4, 4), image(1, 20, 20, seed=1), image(1, 4, 4, seed=2), image(1, 4, 4)]
    assert_budget(runner_module, monkeypatch, 32, [images], [[16], [400], [16, 16]])


@pytest.mark.red(r"assert \[\[16, 16, 16\]\]")
def test_items_of_several_requests(runner_module, monkeypatch):
    requests = [[image(1, 4, 4, seed=n)] for n in range(3)]
    assert_budget(runner_module, monkeypatch, 47, requests, [[16, 16], [16]])


@pytest.mark.red(r"assert \[\[64, 16\], \[16, 16\]\]")
def test_videos_and_images(runner_module, monkeypatch):
    """Consecutive items of one kind are a call, as before, and a video has frames."""
    items = [
        image(4, 4, 4, kind="video"),
        image(1, 4, 4, kind="video", seed=1),
        image(1, 4, 4, seed=2),
        image(1, 4, 4, seed=3),
    ]
    assert_budget(runner_module, monkeypatch, 64, [items], [[64], [16], [16, 16]])


@pytest.mark.red(r"assert 1 == 3|Expected number of multimodal embeddings")
def test_items_without_a_grid(runner_module, monkeypatch):
    """They count by the embeddings that they become. (This encoder takes one at a time.)"""
    items = [sound(10, seed=n) for n in range(3)]
    monkeypatch.setenv(VARIABLE, "15")
    calls, cache = encode(runner_module, items)
    assert calls == [[10]] * 3
    assert [len(value) for value in cache.values()] == [10] * 3


@pytest.mark.red(r"inputs of the call before are still there")
def test_inputs_are_released_before_the_next_are_made(runner_module, monkeypatch):
    """Between cuts, and between the groups of one cut."""
    encoder = Encoder()
    names = ("group_mm_kwargs_by_modality", "group_and_batch_mm_kwargs")
    (name,) = [name for name in names if hasattr(runner_module, name)]
    stock = getattr(runner_module, name)

    def watched(*args, **options):
        groups = stock(*args, **options)
        while True:
            encoder.assert_released()
            made = [*itertools.islice(groups, 1)]
            if not made:
                return
            yield made.pop()

    monkeypatch.setattr(runner_module, name, watched)
    monkeypatch.setenv(VARIABLE, "48")
    items = [image(1, 4, 4, kind="video"), *(image(1, 4, 4, seed=n) for n in range(4))]
    calls, _ = encode(runner_module, items, encoder=encoder)
    assert calls == [[16], [16, 16], [16, 16]]


@pytest.mark.red(r"AttributeError|DID NOT RAISE")
@pytest.mark.parametrize("value", ["0", "-1", "", "many", "1.5", "1e5", " 64", "+5", "²"])
def test_value_that_is_no_positive_integer_stops_the_start(runner_module, monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    runner = object.__new__(runner_module.HPUModelRunner)
    with pytest.raises(ValueError, match=rf"{VARIABLE} must be a positive integer"):
        runner.__init__(None)


def dummies(runner_module, monkeypatch, item, count):
    """How many items the warm-up's call has."""
    runner = SimpleNamespace(
        mm_budget=object(),
        get_model=lambda: SimpleNamespace(
            vision_bucket_manager=SimpleNamespace(is_batch_based=False)
        ),
        model_config=SimpleNamespace(get_multimodal_config=lambda: None),
        _resolve_mm_limit_options=lambda *_: None,
        _get_dummy_mm_inputs_with_options=lambda **_: {"mm_kwargs": {item[0]: [item[1]]}},
        device=None,
        pin_memory=False,
    )
    try:
        support = importlib.import_module("vllm_gaudi.v1.worker.gaudi_fix_mm_encoder_budget")
    except ModuleNotFoundError:
        pass
    else:
        runner.mm_encoder_budget = support.EncoderBudget.from_environment()
    batch = runner_module.HPUModelRunner._get_mm_dummy_batch(
        runner, item[0], None, 1, 1, count_override=count
    )
    return len(batch["image_grid_thw"]) if "image_grid_thw" in batch else len(batch["features"])


@pytest.mark.red(r"assert 5 == 2")
def test_warm_up(runner_module, monkeypatch):
    monkeypatch.setenv(VARIABLE, "40")
    assert dummies(runner_module, monkeypatch, image(1, 4, 4), 5) == 2


# --- neighbours ----------------------------------------------------------------------------------


def test_unset_is_one_call(runner_module, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    images = [image(1, 8, 8, seed=n) for n in range(16)]
    calls, cache = encode(runner_module, images)
    assert calls == [[64] * 16]
    assert [len(value) for value in cache.values()] == [16] * 16


def test_unset_warm_up(runner_module, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert dummies(runner_module, monkeypatch, image(1, 4, 4), 5) == 5


def test_warm_up_of_one_and_of_items_without_a_grid(runner_module, monkeypatch):
    monkeypatch.setenv(VARIABLE, "10")
    assert dummies(runner_module, monkeypatch, image(1, 4, 4), 1) == 1
    assert dummies(runner_module, monkeypatch, sound(8), 2) == 16


def test_all_fit(runner_module, monkeypatch):
    assert_budget(runner_module, monkeypatch, 32, [[image(1, 4, 4)] * 2], [[16, 16]])


def test_cached_items_are_not_encoded(runner_module, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1000")
    items = [image(1, 4, 4, seed=n) for n in range(3)]
    calls, cache = encode(runner_module, items, cached=["0.1"])
    assert calls == [[16, 16]]
    assert cache["0.1"] == "kept"


def test_nothing_to_encode(runner_module, monkeypatch):
    monkeypatch.setenv(VARIABLE, "16")
    assert encode(runner_module, []) == ([], {})

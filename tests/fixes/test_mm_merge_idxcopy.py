"""mm-merge-idxcopy: the plugin's merge of multimodal embeddings, on real tensors."""

from __future__ import annotations

import importlib

import pytest

from tests.support import standin

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("vllm_gaudi")]

WIDTH = 4
MASK = [False, True, True, False, False, True, False, True, True, False]  # 2 + 3 rows, apart

shapes = pytest.mark.parametrize("shape", [(10, WIDTH), (2, 5, WIDTH)], ids=["2-D", "3-D"])
kinds = pytest.mark.parametrize("kind", ["mask", "index"])


@pytest.fixture(scope="module")
def merge():
    standin.device()
    return importlib.import_module("vllm_gaudi.models.utils")._merge_multimodal_embeddings


@pytest.fixture
def ops():
    """The names of the operations that are dispatched in the test."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Recorder() as recorder:
        yield recorder.names


def where(kind):
    """The places of MASK, as the runner or a model hands them over."""
    import torch

    mask = torch.tensor(MASK)
    return mask if kind == "mask" else mask.nonzero().flatten()


def case(shape, dtype=None):
    """Rows to write into, embeddings of two items, and what the merge has to give."""
    import torch

    inputs = torch.arange(10.0 * WIDTH, dtype=dtype).view(shape)
    items = [-1.0 - torch.arange(n * WIDTH).view(n, WIDTH) for n in (2, 3)]
    expected = inputs.clone()
    expected.view(-1, WIDTH)[torch.tensor(MASK)] = torch.cat(items).to(inputs.dtype)
    return inputs, items, expected


def assert_merged(merged, inputs, expected):
    import torch

    assert merged.shape == expected.shape
    assert merged.dtype == expected.dtype
    assert torch.equal(merged, expected)
    assert merged.data_ptr() == inputs.data_ptr(), "not in place"
    assert torch.equal(inputs, expected)


# --- the fault -----------------------------------------------------------------------------------


@shapes
@pytest.mark.red(r"assert 'aten::masked_scatter_' not in \[")
def test_mask_is_merged_by_one_index_copy(merge, ops, shape):
    inputs, items, expected = case(shape)
    places = where("mask")
    ops.clear()
    merged = merge(inputs, items, places)
    assert "aten::masked_scatter_" not in ops
    assert ops.count("aten::index_copy_") == 1
    assert_merged(merged, inputs, expected)


@shapes
@pytest.mark.red(r"DynamicShape: masked_scatter_")
def test_no_dynamic_shape_on_the_device(merge, shape):
    """All is on the device, as where the runner calls the model."""
    import torch

    from tests.support.sides import OnDevice, Sides

    inputs, items, expected = case(shape)
    with Sides(static=True):
        merged = merge(
            inputs.to("hpu"), [item.to("hpu") for item in items], where("mask").to("hpu")
        )
    assert isinstance(merged, OnDevice)
    assert torch.equal(merged.as_subclass(torch.Tensor), expected)


@shapes
@kinds
@pytest.mark.parametrize("count", [4, 6], ids=["one too few", "one too many"])
@pytest.mark.red(
    r"DID NOT RAISE|RuntimeError: Number of elements of source|IndexError: index_copy_"
    r"|something was written"
)
def test_wrong_number_is_a_clear_error(merge, shape, kind, count):
    """It says how many embeddings there are and how many places, and nothing is written."""
    import torch

    inputs, _, _ = case(shape)
    before = inputs.clone()
    items = [torch.ones(2, WIDTH), torch.ones(count - 2, WIDTH)]
    said = rf"Attempted to assign 2 \+ {count - 2} = {count} multimodal tokens to 5 placeholders"
    with pytest.raises(ValueError, match=said):
        merge(inputs, items, where(kind))
    assert torch.equal(inputs, before), "something was written"


@pytest.mark.red(r"expected self and source to have the same dtype|dtype")
def test_embeddings_of_another_type_are_converted(merge):
    """The branch for an index and two dimensions did not."""
    import torch

    inputs, items, expected = case((10, WIDTH), torch.bfloat16)
    assert_merged(merge(inputs, items, where("index")), inputs, expected)


# --- neighbours ----------------------------------------------------------------------------------


@shapes
@kinds
def test_rows_are_written_in_place(merge, shape, kind):
    inputs, items, expected = case(shape)
    assert_merged(merge(inputs, items, where(kind)), inputs, expected)


@kinds
def test_conversion_in_three_dimensions(merge, kind):
    import torch

    inputs, items, expected = case((2, 5, WIDTH), torch.bfloat16)
    assert_merged(merge(inputs, items, where(kind)), inputs, expected)


def test_conversion_by_a_mask_in_two_dimensions(merge):
    import torch

    inputs, items, expected = case((10, WIDTH), torch.bfloat16)
    assert_merged(merge(inputs, items, where("mask")), inputs, expected)


@shapes
def test_an_index_stays_where_it_is(merge, ops, shape):
    """M-RoPE models: nothing is read or copied for it."""
    inputs, items, expected = case(shape)
    places = where("index")
    ops.clear()
    merged = merge(inputs, items, places)
    assert ops.count("aten::index_copy_") == 1
    assert not {"aten::nonzero", "aten::_local_scalar_dense"} & set(ops)
    assert_merged(merged, inputs, expected)


def test_one_tensor_of_items_of_one_size(merge):
    import torch

    inputs = torch.zeros(10, WIDTH)
    items = torch.arange(1.0, 1 + 4 * WIDTH).view(2, 2, WIDTH)
    mask = torch.arange(10) >= 6
    merged = merge(inputs, items, mask)
    assert torch.equal(merged[6:], items.view(4, WIDTH))
    assert not merged[:6].any()


def test_wider_rows_of_deepstack(merge):
    """Qwen3-VL merges a second tensor, as wide as its levels together."""
    import torch

    inputs = torch.zeros(10, 3 * WIDTH)
    items = [torch.full((5, 3 * WIDTH), 7.0)]
    merged = merge(inputs, items, where("mask"))
    assert merged.sum(dim=1).tolist() == [84.0 * chosen for chosen in MASK]


@kinds
def test_no_embeddings(merge, ops, kind):
    """Text alone, and every decode step: the same object, no operation."""
    inputs, _, _ = case((10, WIDTH))
    places = where(kind)
    ops.clear()
    assert merge(inputs, [], places) is inputs
    assert ops == []


def test_installed_in_vllm(merge):
    from vllm.model_executor.models import utils

    assert utils._merge_multimodal_embeddings is merge

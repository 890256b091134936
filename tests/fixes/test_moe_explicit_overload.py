"""moe-explicit-overload: the plugin's fp8 experts with PyTorch's real dispatcher.

The operation is the emulated one, registered in the order of Habana's bridge; two tests register
it under another name with other overloads, and hand that one out.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from tests.support import standin

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("vllm_gaudi")]

EXPERTS, WIDTH, INNER = 2, 8, 4
SUPPORT = "gaudi_fix_moe_overload"
WAITS = r"waits for the device: \['(formats|_local_scalar_dense)"

tokens = pytest.mark.parametrize("count", [1, 5], ids=["one token", "several tokens"])
scales = pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])


@pytest.fixture
def ops(monkeypatch):
    """The plugin's module, configured as by default, its choice of overloads made anew."""
    standin.device()
    module = importlib.import_module("vllm_gaudi.extension.ops")
    config = SimpleNamespace(moe_chunk=[], moe_token_boundary=[])
    monkeypatch.setattr(module, "get_config", lambda: config)
    _forget_choice(monkeypatch)
    yield module
    _forget_choice(monkeypatch)


def _forget_choice(monkeypatch):
    monkeypatch.delitem(sys.modules, f"vllm_gaudi.extension.{SUPPORT}", raising=False)
    monkeypatch.delattr(f"vllm_gaudi.extension.{SUPPORT}", raising=False)


@pytest.fixture
def register(monkeypatch):
    """Register the operation with these overloads, and put it in the place of the real one."""
    import torch

    libraries = []

    def make(name, schemas):
        emulated = importlib.import_module("habana_frameworks.torch.ops")
        library = torch.library.Library(name, "DEF")
        libraries.append(library)
        for schema in schemas:
            library.define(schema)
            implementation = emulated._by_name(schema, emulated.mixture_of_experts)
            library.impl(schema.partition("(")[0], implementation, "CompositeExplicitAutograd")
        packet = getattr(torch.ops, name).mixture_of_experts
        monkeypatch.setattr(torch.ops.hpu, "mixture_of_experts", packet)
        return packet

    yield make
    for library in libraries:
        library._destroy()


def schemas():
    return list(importlib.import_module("habana_frameworks.torch.ops")._moe_schemas())


def experts(ops, *, dynamic):
    """The plugin's layer with fp8 weights, a scale a row; static: scales of activations too."""
    import torch

    generator = torch.Generator().manual_seed(1)
    layer = ops.VllmMixtureOfExpertsOpFP8PerChannel(EXPERTS, EXPERTS, 0, EXPERTS - 1)
    for group, shape in ((layer.w13_list, (2 * INNER, WIDTH)), (layer.w2_list, (WIDTH, INNER))):
        for expert in group:
            weight = torch.randn(shape, generator=generator)
            expert.set_weight(weight.to(torch.float8_e4m3fn))
            expert.set_scale_inv_fp8(torch.rand(shape[0], 1, generator=generator) + 0.5)
    if not dynamic:
        layer.w13_input_scale = torch.nn.Parameter(torch.tensor(0.02), requires_grad=False)
        layer.w2_input_scale = [torch.tensor(0.03), torch.tensor(0.04)]
    return layer


def inputs(count):
    import torch

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, WIDTH, generator=generator).to(torch.bfloat16)
    chosen = torch.arange(count * 2).view(count, 2) % EXPERTS
    return x, chosen, torch.rand(count, 2, generator=generator)


class Watch:
    """What is called, and what of it would wait for the device, while it is entered."""

    def __init__(self, monkeypatch):
        self.waits, self.called = [], []
        self._patch = monkeypatch

    def __enter__(self):
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        watch = self

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func._schema.name.endswith("::mixture_of_experts"):
                    names = [argument.name for argument in func._schema.arguments]
                    given = dict(zip(names, args, strict=False)) | (kwargs or {})
                    watch.called.append((func, given))
                if func._schema.name == "aten::_local_scalar_dense":
                    watch.waits.append("_local_scalar_dense")
                return func(*args, **(kwargs or {}))

        def formatted(tensor, **_):
            watch.waits.append(f"formats {tuple(tensor.shape)}")
            return "tensor"

        self._patch.setattr(torch.Tensor, "__repr__", formatted)
        self._mode = Recorder()
        self._mode.__enter__()
        return self

    def __exit__(self, *error):
        self._mode.__exit__(*error)
        self._patch.undo()

    def assert_none(self):
        assert not self.waits, f"waits for the device: {self.waits}"


@pytest.fixture
def watch():
    return Watch(pytest.MonkeyPatch())


def assert_same_values(ops, layer, count, out, called):
    """The call's arguments are those of stock, and its result that of the packet."""
    import torch

    x, chosen, share = inputs(count)
    (overload, given) = called
    if layer.w13_input_scale is None:
        quantised, scale = ops.dynamic_quant(x)
    else:
        scale = layer.w13_input_scale.data
        cast = torch.ops.hpu.cast_to_fp8_v2
        quantised = cast(x, 1.0 / scale, False, False, torch.float8_e4m3fn)[0]
    assert torch.equal(given["hidden_states"].float(), quantised.float())
    assert torch.equal(given["d_scale_hidden_states"], scale)
    assert torch.equal(given["expert_routing_table"], chosen)
    assert torch.equal(given["router_weights"], share.to(x.dtype))
    assert (given["experts_min"], given["experts_max"]) == (0, EXPERTS - 1)
    assert torch.equal(out, overload.overloadpacket(**given))
    assert out.abs().sum() > 0


# --- the fault -----------------------------------------------------------------------------------


@tokens
@pytest.mark.red(WAITS)
def test_dynamic_scales(ops, watch, count):
    import torch

    layer = experts(ops, dynamic=True)
    with watch:
        out = layer(*inputs(count))
    watch.assert_none()
    ((called, given),) = watch.called
    assert called is torch.ops.hpu.mixture_of_experts.fp8_fused_weights_dynamic
    assert_same_values(ops, layer, count, out, (called, given))


@tokens
@pytest.mark.red(WAITS)
def test_dynamic_scales_with_chunks(ops, watch, count, monkeypatch):
    """The operation in chunks: two keywords more."""
    config = SimpleNamespace(moe_chunk=[64, 128], moe_token_boundary=[4, 8])
    monkeypatch.setattr(ops, "get_config", lambda: config)
    layer = experts(ops, dynamic=True)
    with watch:
        layer(*inputs(count))
    watch.assert_none()
    ((_, given),) = watch.called
    assert (given["chunk_size"], given["total_experts"]) == (64 if count == 1 else 128, EXPERTS)


@tokens
@scales
@pytest.mark.red(WAITS)
def test_whatever_the_order_of_registration(ops, watch, register, count, dynamic):
    """Backwards: every overload that takes numbers is tried first."""
    packet = register(f"backwards_{count}_{dynamic}", schemas()[::-1])
    layer = experts(ops, dynamic=dynamic)
    with watch:
        out = layer(*inputs(count))
    watch.assert_none()
    ((called, given),) = watch.called
    assert called is getattr(packet, "fp8_fused_weights" + ("_dynamic" if dynamic else ""))
    assert_same_values(ops, layer, count, out, (called, given))


@pytest.mark.red(WAITS)
def test_experts_without_a_gate(ops, watch, register, monkeypatch):
    """v0.30.0 passes `is_gated` for Nemotron-H, to an operation that knows it."""
    register(
        "with_is_gated",
        [schema.replace(") -> Tensor", ", bool is_gated=True) -> Tensor") for schema in schemas()],
    )
    layer = experts(ops, dynamic=True)
    monkeypatch.setattr(layer, "_get_extra_kwargs", lambda _: {"is_gated": False})
    with watch:
        layer(*inputs(5))
    watch.assert_none()
    ((_, given),) = watch.called
    assert given["is_gated"] is False


# --- neighbours ----------------------------------------------------------------------------------


@tokens
def test_static_scales_in_the_order_of_the_bridge(ops, watch, count):
    import torch

    layer = experts(ops, dynamic=False)
    with watch:
        out = layer(*inputs(count))
    watch.assert_none()
    ((called, given),) = watch.called
    assert called is torch.ops.hpu.mixture_of_experts.fp8_fused_weights
    assert_same_values(ops, layer, count, out, (called, given))


@scales
def test_where_the_overload_does_not_exist(ops, watch, register, dynamic):
    """Another release of the Gaudi software: torch finds what there is."""
    renamed = [schema.replace("fp8_fused_weights", "fp8_merged_weights") for schema in schemas()]
    packet = register(f"renamed_{dynamic}", renamed)
    layer = experts(ops, dynamic=dynamic)
    with watch:
        out = layer(*inputs(5))
    ((called, given),) = watch.called
    assert called is getattr(packet, "fp8_merged_weights" + ("_dynamic" if dynamic else ""))
    assert_same_values(ops, layer, 5, out, (called, given))


def test_keyword_that_the_named_overload_does_not_know(ops, watch, register, monkeypatch):
    """Torch finds the one that does."""
    gated = [
        schema.replace(") -> Tensor", ", bool is_gated=True) -> Tensor").replace("(", "_v2(", 1)
        for schema in schemas()
        if schema.startswith("mixture_of_experts.fp8_fused_weights_dynamic")
    ]
    packet = register("second_version", [*schemas(), *gated])
    layer = experts(ops, dynamic=True)
    monkeypatch.setattr(layer, "_get_extra_kwargs", lambda _: {"is_gated": False})
    with watch:
        layer(*inputs(5))
    ((called, _),) = watch.called
    assert called is packet.fp8_fused_weights_dynamic_v2


@tokens
def test_weights_in_bf16_need_no_name(ops, watch, count):
    """The packet calls that are left: nothing is formatted on the way to `fused_weights`."""
    import torch

    layer = ops.VllmMixtureOfExpertsOp(EXPERTS, EXPERTS, 0, EXPERTS - 1)
    for group, shape in ((layer.w13_list, (2 * INNER, WIDTH)), (layer.w2_list, (WIDTH, INNER))):
        for expert in group:
            expert.set_weight(torch.ones(shape, dtype=torch.bfloat16))
    x, chosen, share = inputs(count)
    with watch:
        layer(x, chosen, share.to(x.dtype))
    watch.assert_none()
    ((called, _),) = watch.called
    assert called is torch.ops.hpu.mixture_of_experts.fused_weights

"""``torch.ops.hpu``: the device's own operations, registered with torch's real dispatcher.

Real registration matters: code picks overloads by name or lets torch choose by the arguments, and
one of the pack's fixes is about that choice. Schemas are those the bridge registers
(``eager_custom_op_register``), newer overloads by the names and arguments of the plugin's and of
Intel Neural Compressor's calls.

Sums and softmax are in float32. How the fused kernels round in between is not known and not
emulated.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Scale = torch.Tensor | float | Sequence[float] | None

# Gaudi 2 has no fp8 value above 240: the bridge's test_hpu_fp8_ops_any_mode.py, out of range cases
FP8_MAX = {
    torch.float8_e4m3fn: 448.0 if os.environ.get("EMULATED_GAUDI") == "3" else 240.0,
    torch.float8_e5m2: torch.finfo(torch.float8_e5m2).max,
}

_library = torch.library.Library("hpu", "FRAGMENT")


# ---- attention -------------------------------------------------------------------------------


def _allowed(
    rows: int,
    columns: int,
    batch: int,
    is_causal: bool,
    valid: torch.Tensor | None,
    padding_side: str,
    window: tuple[int, int] | None,
) -> torch.Tensor:
    """[batch, rows, columns]: which column (key) a row (query) may see."""
    row = torch.arange(rows).unsqueeze(-1)
    column = torch.arange(columns)
    allowed = torch.ones(batch, rows, columns, dtype=torch.bool)
    if is_causal:
        allowed &= column <= row
    if window is not None and tuple(window) != (-1, -1):
        left, right = window
        if left >= 0:
            allowed &= column >= row - left
        if right >= 0:
            allowed &= column <= row + right
    if valid is not None:
        valid = valid.view(-1, 1, 1).long()
        if padding_side.lower() == "left":
            allowed &= column >= columns - valid
        else:
            allowed &= column < valid
    return allowed


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    valid_seq_len: torch.Tensor | None = None,
    padding_side: str = "left",
    window: tuple[int, int] | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scaled dot product attention: (result, maximum of each row, 1 / sum of its exponentials).

    Source: Gaudi's documentation of FusedSDPA; the row statistics as vllm_gaudi's
    ``SlicedFusedSDPABase._merge_chunk`` puts chunks together with them. A row that may see nothing
    is zero.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask.float()
    allowed = _allowed(
        *scores.shape[-2:], q.shape[0], is_causal, valid_seq_len, padding_side, window
    )
    allowed = allowed.view(q.shape[0], *[1] * (q.dim() - 3), *allowed.shape[1:])
    scores = scores.masked_fill(~allowed, -math.inf)

    largest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.float().view(*sinks.shape, 1, 1)
        largest = torch.maximum(largest, sinks)
    exponentials = torch.exp(scores - largest.clamp(min=-1e30))
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - largest)
    inverse = torch.where(total > 0, 1.0 / total, 0.0)
    result = torch.matmul(exponentials * inverse, v.float())
    return result.to(q.dtype), largest, inverse


def sdpa_recomp_fwd(call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Attention and the statistics of its rows (bridge: ``FusedSDPA.py``, recompute variant)."""
    names = ("q", "k", "v", "attention_mask", "is_causal", "scale", "valid_seq_len")
    inputs = [call[name] for name in names]
    return (*attention(*inputs, call["seq_padding_type"]), torch.zeros(1, dtype=torch.int32))


def block_softmax(
    attn: torch.Tensor, block_bias: torch.Tensor, block_groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exponentials of each block against its own maximum, the maxima and the sums.

    Source: the unfused branch beside the call in vllm_gaudi's ``extension/ops.py::pipelined_pa``.
    """
    attn = attn + block_bias.to(attn.dtype)
    largest = attn.amax(-1, keepdim=True)
    exponentials = torch.exp(attn - largest.clamp(min=torch.finfo(attn.dtype).min))
    return exponentials, largest, exponentials.sum(-1, keepdim=True)


def block_softmax_adjustment(
    block_max: torch.Tensor,
    block_sums: torch.Tensor,
    block_groups: torch.Tensor,
    batch_size: int,
    out_shape: Sequence[int],
) -> torch.Tensor:
    """The factor that turns each block's own softmax into its share of the sequence's.

    Source: as block_softmax. Blocks of group -1 are padding and belong to no sequence.
    """
    shape = [block_max.shape[0], -1]
    largest, sums = block_max.reshape(shape).float(), block_sums.reshape(shape).float()
    group = torch.where(block_groups < 0, batch_size, block_groups).long()
    group_max = torch.full((batch_size + 1, largest.shape[1]), -math.inf)
    group_max = group_max.index_reduce(0, group, largest, "amax")[group]
    share = torch.nan_to_num(torch.exp(largest - group_max))
    group_sum = torch.zeros(batch_size + 1, largest.shape[1]).index_add(0, group, sums * share)
    factor = torch.nan_to_num(share / group_sum[group], posinf=0.0)
    return factor.view(*out_shape).to(block_max.dtype)


def softmax_fa2(
    attn: torch.Tensor,
    inputM: torch.Tensor | None = None,
    inputL: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of flash attention's running softmax.

    The result is (exponentials, maximum, sum, factor for what came before). Source: the published
    algorithm (Dao, FlashAttention-2, arXiv:2307.08691), where a block is folded into (M, L).
    """
    largest = attn.amax(-1, keepdim=True)
    before = torch.zeros_like(largest)
    if inputM is not None and inputL is not None:
        largest = torch.maximum(largest, inputM)
        before = torch.exp(inputM - largest)
    exponentials = torch.exp(attn - largest)
    total = exponentials.sum(-1, keepdim=True)
    if inputL is not None:
        total = total + before * inputL
    return exponentials, largest, total, before


# ---- fp8 -------------------------------------------------------------------------------------


def _factor(scale: Scale, shape: Sequence[int] | None = None) -> torch.Tensor:
    if scale is None:
        return torch.tensor(1.0)
    factor = scale.float() if isinstance(scale, torch.Tensor) else torch.tensor(scale)
    return factor if shape is None else factor.view(*shape)


def cast_to_fp8_v2(
    input: torch.Tensor,
    scale: Scale = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype | None = None,
    scale_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """input * scale in fp8, saturating, and the largest absolute value when asked for.

    The product is taken in the input's type. Source: the bridge's
    ``test_hpu_fp8_ops_any_mode.py``. Stochastic rounding is not emulated.
    """
    dtype = dtype or torch.float8_e5m2
    limit = FP8_MAX[dtype]
    scaled = (input * _factor(scale, scale_shape).to(input.dtype)).float().clamp(-limit, limit)
    amax = input.abs().amax().float() if is_amax else torch.empty(0)
    return scaled.to(dtype), amax


def cast_from_fp8(
    input: torch.Tensor,
    scale: Scale,
    out_dtype: torch.dtype,
    scale_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """input * scale in a wide type (the same test)."""
    return (input.float() * _factor(scale, scale_shape)).to(out_dtype)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Eight unsigned values out of each int32, lowest first, along the last dimension."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & 0xF).flatten(-2)


def convert_from_uint4(call: dict[str, Any]) -> torch.Tensor:
    """(value - zero point) * scale of packed 4-bit weights.

    Source: the bridge's ``test_hpu_convert_from_int4.py``. Scales and zero points may be those of
    groups of rows, which are of one size or named by g_idx (calls in vllm_gaudi's ``hpu_gptq.py``).
    """
    values, scale, zero = _nibbles(call["input"]), call["scale"], call["zero_point"]
    if zero is not None and zero.dtype == torch.int32:
        zero = _nibbles(zero)
    if scale.shape[0] != values.shape[0]:
        group = call.get("g_idx")
        if group is None:
            group = torch.arange(values.shape[0]) // (values.shape[0] // scale.shape[0])
        scale, zero = scale[group], None if zero is None else zero[group]
    if zero is not None:
        values = values - zero
    return (values.to(call["out_dtype"]) * scale).to(call["out_dtype"])


def fp8_gemm_v2(call: dict[str, Any]) -> torch.Tensor:
    """A @ B with both scaled back, plus bias, plus D when accumulating.

    Source: the bridge's ``test_hpu_fp8_ops.py``.
    """
    left, right = call["A"].float(), call["B"].float()
    left = left.transpose(-1, -2) if call["trans_A"] else left
    right = right.transpose(-1, -2) if call["trans_B"] else right
    columns = _factor(call.get("B_scale_inv"), call.get("B_scale_shape"))
    result = torch.matmul(left, right) * _factor(call.get("A_scale_inv"))
    result = result * (columns.flatten() if columns.dim() > 1 else columns)
    for name, added in (("bias", True), ("D", call.get("accumulate"))):
        if added and call.get(name) is not None:
            result = result + call[name].float()
    return result.to(call["out_dtype"])


# ---- mixture of experts ----------------------------------------------------------------------

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    # the device's kernel is the tanh approximation: comment in vllm_gaudi's extension/ops.py
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}


def mixture_of_experts(call: dict[str, Any]) -> torch.Tensor:
    """Every overload, by the names of its arguments.

    Source: the reference in the bridge's ``test_hpu_mixture_of_experts.py``: of the experts chosen
    for a token those in [experts_min, experts_max] count, each times its router weight; permuted
    weights are [out, in]. fp8 weights have a scale each, or one for each output channel.
    """
    hidden, table = call["hidden_states"], call["expert_routing_table"]
    fp8 = "d_scale_hidden_states" in call
    x = hidden.float() * _factor(call["d_scale_hidden_states"]) if fp8 else hidden
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for number in range(call["experts_min"], call["experts_max"] + 1):
        token, choice = torch.where(table == number)
        if len(token):
            answer = _expert(call, number - call["experts_min"], x[token], fp8).float()
            share = call["router_weights"][token, choice].unsqueeze(-1).float()
            out.index_add_(0, token, answer * share)
    return out.to(torch.bfloat16 if fp8 else hidden.dtype)


def _expert(call: dict[str, Any], n: int, x: torch.Tensor, fp8: bool) -> torch.Tensor:
    permuted = call["permuted_weights"]

    def weight(name: str) -> torch.Tensor:
        if not fp8:
            return call[name][n]
        scale = _factor(call[f"d_scale_{name}"][n]).flatten()
        return call[name][n].float() * (
            scale.unsqueeze(-1) if permuted and len(scale) > 1 else scale
        )

    def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) if permuted else torch.matmul(x, weight)

    if "w12" in call:
        both = project(x, weight("w12"))
    else:
        both = torch.cat((project(x, weight("w1")), project(x, weight("w2"))), dim=-1)
    if "w12_bias" in call:
        inner = _limited_swiglu(both + call["w12_bias"][n], **_given(call, "alpha", "limit"))
        return project(inner, weight("w3")) + call["w3_bias"][n]
    gate, up = both.chunk(2, dim=-1)
    inner = _ACTIVATIONS[call["activation"]](gate) * up
    if "d_scale_intermediate_hidden_states" in call:  # through fp8 with a scale known beforehand
        scale = _factor(call["d_scale_intermediate_hidden_states"][n])
        inner = cast_to_fp8_v2(inner, 1.0 / scale, dtype=torch.float8_e4m3fn)[0].float() * scale
    return project(inner, weight("w3"))


def _limited_swiglu(both: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """gpt-oss's activation: gate and up alternate, both are limited.

    Source: the docstring of the bridge's test of ``bias_mxfp4_fused_weights``.
    """
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


def _given(call: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: call[name] for name in names if name in call}


def _moe_schemas() -> Iterator[str]:
    """In the bridge's order: torch tries overloads in the order of their registration."""
    given = "Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights"
    chunks = "int experts_min, int experts_max, int chunk_size=0, int total_experts=0"
    ending = f"bool permuted_weights, str activation, {chunks}) -> Tensor"
    apart, fused = "Tensor[] w1, Tensor[] w2, Tensor[] w3", "Tensor[] w12, Tensor[] w3"
    yield f"mixture_of_experts({given}, {apart}, {ending}"
    yield f"mixture_of_experts.fused_weights({given}, {fused}, {ending}"
    for dynamic in ("", "_dynamic"):
        for kind, one in (("", "Tensor"), ("_scalars", "float")):
            for name, weights in (("fp8", apart), ("fp8_fused_weights", fused)):
                inner = "" if dynamic else f"{one}[] d_scale_intermediate_hidden_states, "
                scales = weights.replace("Tensor[] ", f"{one}[] d_scale_")
                scales = f"{one} d_scale_hidden_states, {inner}{scales}"
                overload = f"mixture_of_experts.{name}{kind}{dynamic}"
                yield f"{overload}({given}, {weights}, {scales}, {ending}"
    yield (
        f"mixture_of_experts.bias_fused_weights({given}, {fused}, Tensor[] w12_bias, "
        f"Tensor[] w3_bias, bool permuted_weights, {chunks}, "
        "float alpha=1.702, float limit=7.0) -> Tensor"
    )


# ---- registration ----------------------------------------------------------------------------

_SCALES = (("", "Tensor?", "=None"), (".scalar", "float", ""), (".scalar_list", "float[]", ""))


def _schemas() -> Iterator[str]:
    for overload, kind, default in _SCALES:
        yield (
            f"cast_to_fp8_v2{overload}(Tensor input, {kind} scale{default}, "
            "bool stochastic_rounding=False, bool is_amax=False, ScalarType dtype=None, "
            "int[]? scale_shape=None) -> (Tensor, Tensor)"
        )
        yield (
            f"cast_from_fp8{overload}(Tensor input, {kind} scale, ScalarType out_dtype, "
            "int[]? scale_shape=None) -> Tensor"
        )
        yield (
            f"fp8_gemm_v2{overload}(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, "
            f"ScalarType out_dtype, {kind} A_scale_inv{default}, {kind} B_scale_inv{default}, "
            "Tensor? bias=None, bool accumulate=False, int[]? B_scale_shape=None) -> Tensor"
        )
    yield (
        "convert_from_uint4(Tensor input, Tensor scale, Tensor? zero_point, "
        "ScalarType out_dtype, Tensor? g_idx=None) -> Tensor"
    )
    yield (
        "sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, "
        "float scale, bool is_causal, bool requires_backward, str softmax_mode, "
        "Tensor? valid_seq_len, str seq_padding_type) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    yield (
        "block_softmax(Tensor attn, Tensor block_bias, Tensor block_groups) "
        "-> (Tensor, Tensor, Tensor)"
    )
    yield (
        "block_softmax_adjustment(Tensor block_max, Tensor block_sums, Tensor block_groups, "
        "int batch_size, int[] out_shape) -> Tensor"
    )
    yield (
        "softmax_fa2(Tensor attn, Tensor? inputM=None, Tensor? inputL=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    yield from _moe_schemas()


def register() -> None:
    """Define every operation of ``torch.ops.hpu``; the function of the same name computes it."""
    if hasattr(torch.ops.hpu, "mixture_of_experts"):
        return
    for schema in _schemas():
        name = schema.partition("(")[0]
        implementation = globals()[name.partition(".")[0]]
        if next(iter(inspect.signature(implementation).parameters)) == "call":
            implementation = _by_name(schema, implementation)
        _library.define(schema)
        _library.impl(name, implementation, "CompositeExplicitAutograd")


def _by_name(schema: str, function: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    arguments = torch._C.parse_schema(f"hpu::{schema}").arguments
    names = [argument.name for argument in arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(dict(zip(names, args, strict=False)) | kwargs)

    return call

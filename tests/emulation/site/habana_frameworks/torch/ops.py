"""``torch.ops.hpu``: the device's own operations, registered with torch's real dispatcher.

Real registration matters: code picks overloads by name or lets torch choose by the arguments, and one of
the pack's fixes is about that choice. Schemas are those the bridge registers (``eager_custom_op_register``),
newer overloads by the names and arguments of the plugin's and of Intel Neural Compressor's calls.

Sums and softmax are in float32. How the fused kernels round in between is not known and not emulated.
"""

import math
import os
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

Tensors = Sequence[torch.Tensor]
Scale = torch.Tensor | float | Sequence[float] | None

# Gaudi 2 has no fp8 value above 240: the bridge's test_hpu_fp8_ops_any_mode.py, out of range cases
FP8_MAX = {
    torch.float8_e4m3fn: 448.0 if os.environ.get("EMULATED_GAUDI") == "3" else 240.0,
    torch.float8_e5m2: torch.finfo(torch.float8_e5m2).max,
}

_library = torch.library.Library("hpu", "FRAGMENT")


# ---- attention ---------------------------------------------------------------------------------------


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
    ``SlicedFusedSDPABase._merge_chunk`` puts chunks together with them. A row that may see nothing is zero.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask.float()
    allowed = _allowed(*scores.shape[-2:], q.shape[0], is_causal, valid_seq_len, padding_side, window)
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


def sdpa_recomp_fwd(
    q, k, v, attention_mask, p, scale, is_causal, requires_backward, softmax_mode, valid_seq_len, side
):
    """Attention and the statistics of its rows (bridge: ``FusedSDPA.py``, recompute variant)."""
    out, largest, inverse = attention(q, k, v, attention_mask, is_causal, scale, valid_seq_len, side)
    return out, largest, inverse, torch.zeros(1, dtype=torch.int32)


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
    attn: torch.Tensor, inputM: torch.Tensor | None = None, inputL: torch.Tensor | None = None  # noqa: N803
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of flash attention's running softmax: (exponentials, maximum, sum, rescaling of before).

    Source: the published algorithm (Dao, FlashAttention-2, arXiv:2307.08691), fold of one block into (M, L).
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


# ---- fp8 ---------------------------------------------------------------------------------------------


def _factor(scale: Scale, shape: Sequence[int] | None) -> torch.Tensor:
    if scale is None:
        return torch.tensor(1.0)
    factor = scale.float() if isinstance(scale, torch.Tensor) else torch.tensor(scale)
    return factor if shape is None else factor.view(*shape)


def cast_to_fp8_v2(input, scale=None, stochastic_rounding=False, is_amax=False, dtype=None, scale_shape=None):
    """input * scale in fp8, saturating, and the largest absolute value when asked for.

    Source: the bridge's ``test_hpu_fp8_ops_any_mode.py``. Stochastic rounding is not emulated.
    """
    dtype = dtype or torch.float8_e5m2
    limit = FP8_MAX[dtype]
    scaled = (input.float() * _factor(scale, scale_shape)).clamp(-limit, limit)
    amax = input.abs().amax().float() if is_amax else torch.empty(0)
    return scaled.to(dtype), amax


def cast_from_fp8(input, scale, out_dtype, scale_shape=None):
    """input * scale in a wide type (the same test)."""
    return (input.float() * _factor(scale, scale_shape)).to(out_dtype)


def fp8_gemm_v2(
    A, trans_A, B, trans_B, D, out_dtype, A_scale_inv=None, B_scale_inv=None, bias=None, accumulate=False,
    B_scale_shape=None,
):  # noqa: N803
    """A @ B with both scaled back, plus bias, plus D when accumulating (bridge: ``test_hpu_fp8_ops.py``)."""
    left = A.float().transpose(-1, -2) if trans_A else A.float()
    right = B.float().transpose(-1, -2) if trans_B else B.float()
    result = torch.matmul(left, right) * _factor(A_scale_inv, None)
    right_scale = _factor(B_scale_inv, B_scale_shape)
    result = result * (right_scale.flatten() if right_scale.dim() > 1 else right_scale)
    if bias is not None:
        result = result + bias.float()
    if accumulate and D is not None:
        result = result + D.float()
    return result.to(out_dtype)


# ---- mixture of experts ------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    # the device's kernel is the tanh approximation: comment in vllm_gaudi's extension/ops.py
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}


def _experts(
    hidden: torch.Tensor,
    table: torch.Tensor,
    weights: torch.Tensor,
    first: int,
    last: int,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Sum over the chosen experts in [first, last] of their output times its router weight.

    Source: the reference in the bridge's ``test_hpu_mixture_of_experts.py``. Experts elsewhere add nothing.
    """
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for number in range(first, last + 1):
        token, choice = torch.where(table == number)
        if len(token):
            share = weights[token, choice].unsqueeze(-1).float()
            out.index_add_(0, token, expert(number - first, hidden[token]).float() * share)
    return out.to(dtype)


def _times(x: torch.Tensor, weight: torch.Tensor, permuted: bool) -> torch.Tensor:
    """permuted: weights are [out, in]."""
    return F.linear(x, weight) if permuted else torch.matmul(x, weight)


def _gated(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, permuted: bool, activation: str
) -> torch.Tensor:
    inner = _ACTIVATIONS[activation](_times(x, gate, permuted)) * _times(x, up, permuted)
    return _times(inner, down, permuted)


def _halves(w12: Tensors, permuted: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = [w.chunk(2, dim=0 if permuted else 1) for w in w12]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def moe(
    hidden_states, expert_routing_table, router_weights, w1, w2, w3, permuted_weights, activation,
    experts_min, experts_max, chunk_size=0, total_experts=0,
):
    def expert(n: int, x: torch.Tensor) -> torch.Tensor:
        return _gated(x, w1[n], w2[n], w3[n], permuted_weights, activation)

    return _experts(
        hidden_states, expert_routing_table, router_weights, experts_min, experts_max, expert,
        hidden_states.dtype,
    )


def moe_fused(
    hidden_states, expert_routing_table, router_weights, w12, w3, permuted_weights, activation, *rest, **more
):
    w1, w2 = _halves(w12, permuted_weights)
    return moe(
        hidden_states, expert_routing_table, router_weights, w1, w2, w3, permuted_weights, activation,
        *rest, **more,
    )


def moe_bias_fused(
    hidden_states, expert_routing_table, router_weights, w12, w3, w12_bias, w3_bias, permuted_weights,
    experts_min, experts_max, chunk_size=0, total_experts=0, alpha=1.702, limit=7.0,
):
    """gpt-oss's experts: gate and up alternate, both are limited (bridge's ``..._bias_mxfp4`` test text)."""

    def expert(n: int, x: torch.Tensor) -> torch.Tensor:
        both = _times(x, w12[n], permuted_weights) + w12_bias[n]
        gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
        inner = (up + 1) * gate * torch.sigmoid(gate * alpha)
        return _times(inner, w3[n], permuted_weights) + w3_bias[n]

    return _experts(
        hidden_states, expert_routing_table, router_weights, experts_min, experts_max, expert,
        hidden_states.dtype,
    )


def _dequantised(weights: Tensors, scales: Sequence[Scale], permuted: bool) -> list[torch.Tensor]:
    """fp8 weights back to float32; a scale is one number or one for each output channel."""
    wide = []
    for weight, scale in zip(weights, scales, strict=True):
        factor = _factor(scale, None).flatten()
        wide.append(weight.float() * (factor.unsqueeze(-1) if permuted and len(factor) > 1 else factor))
    return wide


def _moe_fp8(
    hidden, table, weights, w12, w3, d_hidden, d_inner, d_w12, d_w3, permuted, activation, first, last
):
    w12, w3 = _dequantised(w12, d_w12, permuted), _dequantised(w3, d_w3, permuted)
    w1, w2 = _halves(w12, permuted)

    def expert(n: int, x: torch.Tensor) -> torch.Tensor:
        inner = _ACTIVATIONS[activation](_times(x, w1[n], permuted)) * _times(x, w2[n], permuted)
        if d_inner is not None:  # static: the inner activation goes through fp8 with a known scale
            scale = _factor(d_inner[n], None)
            inner = cast_to_fp8_v2(inner, 1.0 / scale, dtype=torch.float8_e4m3fn)[0].float() * scale
        return _times(inner, w3[n], permuted)

    wide = hidden.float() * _factor(d_hidden, None)
    return _experts(wide, table, weights, first, last, expert, torch.bfloat16)


def moe_fp8_fused(h, t, r, w12, w3, d_h, d_inner, d_w12, d_w3, permuted, activation, lo, hi, *_chunks):
    return _moe_fp8(h, t, r, w12, w3, d_h, d_inner, d_w12, d_w3, permuted, activation, lo, hi)


def moe_fp8_fused_dynamic(h, t, r, w12, w3, d_h, d_w12, d_w3, permuted, activation, lo, hi, *_chunks):
    return _moe_fp8(h, t, r, w12, w3, d_h, None, d_w12, d_w3, permuted, activation, lo, hi)


def _joined(w1: Tensors, w2: Tensors, permuted: bool) -> list[torch.Tensor]:
    return [torch.cat(pair, dim=0 if permuted else 1) for pair in zip(w1, w2, strict=True)]


def moe_fp8(
    h, t, r, w1, w2, w3, d_h, d_inner, d_w1, d_w2, d_w3, permuted, activation, lo, hi, *_chunks
):
    w1, w2 = _dequantised(w1, d_w1, permuted), _dequantised(w2, d_w2, permuted)
    ones = [1.0] * len(w1)
    joined = _joined(w1, w2, permuted)
    return _moe_fp8(h, t, r, joined, w3, d_h, d_inner, ones, d_w3, permuted, activation, lo, hi)


def moe_fp8_dynamic(h, t, r, w1, w2, w3, d_h, d_w1, d_w2, d_w3, permuted, activation, lo, hi, *_chunks):
    return moe_fp8(h, t, r, w1, w2, w3, d_h, None, d_w1, d_w2, d_w3, permuted, activation, lo, hi)


_MOE_IN = "Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, "
_MOE_CHUNKS = "int experts_min, int experts_max, int chunk_size=0, int total_experts=0"
_MOE_OUT = f"bool permuted_weights, str activation, {_MOE_CHUNKS}) -> Tensor"
_W, _W_FUSED = "Tensor[] w1, Tensor[] w2, Tensor[] w3, ", "Tensor[] w12, Tensor[] w3, "


def _scales(weights: Sequence[str], kind: str, dynamic: bool) -> str:
    one, many = ("Tensor", "Tensor[]") if kind == "tensor" else ("float", "float[]")
    names = ([] if dynamic else ["intermediate_hidden_states"]) + list(weights)
    return f"{one} d_scale_hidden_states, " + "".join(f"{many} d_scale_{name}, " for name in names)


def _moe_overloads() -> list[tuple[str, str, Callable[..., torch.Tensor]]]:
    """(name, arguments, implementation), in the bridge's order: torch tries them in it."""
    overloads: list[tuple[str, str, Callable[..., torch.Tensor]]] = [
        ("", _W, moe),
        (".fused_weights", _W_FUSED, moe_fused),
    ]
    for dynamic in (False, True):
        for kind in ("tensor", "scalar"):
            suffix = ("_scalars" if kind == "scalar" else "") + ("_dynamic" if dynamic else "")
            overloads += [
                (
                    f".fp8{suffix}",
                    _W + _scales(("w1", "w2", "w3"), kind, dynamic),
                    moe_fp8_dynamic if dynamic else moe_fp8,
                ),
                (
                    f".fp8_fused_weights{suffix}",
                    _W_FUSED + _scales(("w12", "w3"), kind, dynamic),
                    moe_fp8_fused_dynamic if dynamic else moe_fp8_fused,
                ),
            ]
    return overloads


# ---- registration ------------------------------------------------------------------------------------


def _define(schema: str, implementation: Callable[..., object]) -> None:
    _library.define(schema)
    _library.impl(schema.partition("(")[0], implementation, "CompositeExplicitAutograd")


def register() -> None:
    """Define every operation of ``torch.ops.hpu``."""
    if hasattr(torch.ops.hpu, "mixture_of_experts"):
        return
    for name, arguments, implementation in _moe_overloads():
        _define(f"mixture_of_experts{name}({_MOE_IN}{arguments}{_MOE_OUT}", implementation)
    _define(
        f"mixture_of_experts.bias_fused_weights({_MOE_IN}{_W_FUSED}Tensor[] w12_bias, Tensor[] w3_bias, "
        f"bool permuted_weights, {_MOE_CHUNKS}, float alpha=1.702, float limit=7.0) -> Tensor",
        moe_bias_fused,
    )
    tail = "bool stochastic_rounding=False, bool is_amax=False, ScalarType dtype=None, int[]? scale_shape=None"
    for name, scale in (("", "Tensor? scale=None"), (".scalar", "float scale"), (".scalar_list", "float[] scale")):
        _define(f"cast_to_fp8_v2{name}(Tensor input, {scale}, {tail}) -> (Tensor, Tensor)", cast_to_fp8_v2)
        needed = scale.removesuffix("=None")
        _define(
            f"cast_from_fp8{name}(Tensor input, {needed}, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor",
            cast_from_fp8,
        )
    for name, kind, default in (("", "Tensor?", "=None"), (".scalar", "float", ""), (".scalar_list", "float[]", "")):
        _define(
            f"fp8_gemm_v2{name}(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, "
            f"{kind} A_scale_inv{default}, {kind} B_scale_inv{default}, Tensor? bias=None, bool accumulate=False, "
            "int[]? B_scale_shape=None) -> Tensor",
            fp8_gemm_v2,
        )
    _define(
        "sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal, "
        "bool requires_backward, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        sdpa_recomp_fwd,
    )
    _define(
        "block_softmax(Tensor attn, Tensor block_bias, Tensor block_groups) -> (Tensor, Tensor, Tensor)",
        block_softmax,
    )
    _define(
        "block_softmax_adjustment(Tensor block_max, Tensor block_sums, Tensor block_groups, int batch_size, "
        "int[] out_shape) -> Tensor",
        block_softmax_adjustment,
    )
    _define(
        "softmax_fa2(Tensor attn, Tensor? inputM=None, Tensor? inputL=None) -> (Tensor, Tensor, Tensor, Tensor)",
        softmax_fa2,
    )

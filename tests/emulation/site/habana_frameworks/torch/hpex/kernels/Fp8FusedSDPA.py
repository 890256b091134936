"""Fused attention with fp8 inputs. Arguments: the bridge's ``Fp8FusedSDPA.py``."""

from typing import Any

import torch

from .FusedSDPA import FusedSDPA, gqa_input_reshape_fwd, gqa_output_reshape, is_gqa

__all__ = ["fp8_fused_sdpa", "gqa_input_reshape_fwd", "gqa_output_reshape", "is_gqa"]


def _wide(tensor: torch.Tensor, inverse_scale: torch.Tensor | float | None) -> torch.Tensor:
    return tensor.float() * (1.0 if inverse_scale is None else inverse_scale)


def fp8_fused_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softmax_mode: str = "None",
    d_scale_q: torch.Tensor | None = None,
    d_scale_k: torch.Tensor | None = None,
    d_scale_v: torch.Tensor | None = None,
    q_scale_s: torch.Tensor | None = None,
    q_scale_o: torch.Tensor | None = None,
    d_scale_s: torch.Tensor | None = None,
    is_amax_s: bool = False,
    is_amax_o: bool = False,
    valid_seq_len: torch.Tensor | None = None,
    seq_padding_type: str = "left",
    *_more: Any,
) -> tuple[torch.Tensor, ...]:
    """The result is bfloat16, or fp8 when an output scale is given.

    The probabilities' own rounding to fp8 between the two products is not emulated.
    """
    out = FusedSDPA.apply(
        _wide(q, d_scale_q),
        _wide(k, d_scale_k),
        _wide(v, d_scale_v),
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        softmax_mode,
        None,
        valid_seq_len,
        seq_padding_type,
    )
    if q_scale_o is not None:
        return torch.ops.hpu.cast_to_fp8_v2(out, q_scale_o, False, False, torch.float8_e4m3fn)
    return out.to(torch.bfloat16), torch.zeros(1), torch.zeros(1)

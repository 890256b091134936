"""Rotary position embedding."""

import enum

import torch


class RotaryPosEmbeddingMode(enum.Enum):
    """How the pairs that are rotated lie in the last dimension."""

    BLOCKWISE = 0  # element i with element i + half
    PAIRWISE = 1  # neighbours


def apply_rotary_pos_emb(
    p: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> torch.Tensor:
    """Formulas and argument order: docstring of the bridge's ``RotaryPosEmbeddingHelper.py``.

    As there, all three inputs are float32 when one of them is, else of the input's type.
    """
    dtype = torch.float32 if torch.float32 in (p.dtype, cos.dtype, sin.dtype) else p.dtype
    p, cos, sin = p.to(dtype), cos.to(dtype), sin.to(dtype)
    if position_ids is not None:
        cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    elif offset:
        cos, sin = cos[offset : p.shape[0] + offset], sin[offset : p.shape[0] + offset]
    if mode is RotaryPosEmbeddingMode.BLOCKWISE:
        first, second = p.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-p[..., 1::2], p[..., ::2]), dim=-1).flatten(-2)
    return p * cos + turned * sin

"""Fused scaled dot product attention. Arguments and helpers: the bridge's ``FusedSDPA.py``."""

from typing import Any

import torch

from habana_frameworks.torch.ops import attention


def is_gqa(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether query heads share key heads (one key head for all broadcasts by itself)."""
    return q.dim() == 4 and k.shape[1] not in (1, q.shape[1])


def gqa_input_reshape_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Heads to (groups, heads of a group), so that one key head broadcasts over its group."""
    groups = k.shape[1]
    per_head = attention_mask is not None and attention_mask.shape[1] == q.shape[1]
    if attention_mask is not None:
        attention_mask = (
            attention_mask.unflatten(1, (groups, -1)) if per_head else attention_mask.unsqueeze(1)
        )
    return q.unflatten(1, (groups, -1)), k.unsqueeze(2), v.unsqueeze(2), attention_mask


def gqa_output_reshape(tensor: torch.Tensor) -> torch.Tensor:
    """(groups, heads of a group) back to heads."""
    return tensor.flatten(1, 2)


class FusedSDPA:
    """``FusedSDPA.apply``: softmax in float32, the result in the query's type."""

    @staticmethod
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: torch.Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        sinks: torch.Tensor | None = None,
        *_more: Any,
    ) -> torch.Tensor:
        assert dropout_p == 0.0, "the emulation is for inference"
        assert valid_seq_len is None or (is_causal and attn_mask is None)  # as the real one
        gqa = is_gqa(q, k)
        if gqa:
            q, k, v, attn_mask = gqa_input_reshape_fwd(q, k, v, attn_mask)
            sinks = None if sinks is None else sinks.view(k.shape[1], -1)
        out, _, _ = attention(
            q,
            k,
            v,
            attn_mask,
            is_causal,
            scale,
            valid_seq_len,
            seq_padding_type,
            window_size,
            sinks,
        )
        return gqa_output_reshape(out) if gqa else out

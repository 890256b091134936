"""``habana_frameworks.torch.hpex.kernels``: fused attention and rotary embedding."""

from .Fp8FusedSDPA import fp8_fused_sdpa
from .FusedSDPA import FusedSDPA
from .rotary import RotaryPosEmbeddingMode, apply_rotary_pos_emb

__all__ = ["FusedSDPA", "RotaryPosEmbeddingMode", "apply_rotary_pos_emb", "fp8_fused_sdpa"]

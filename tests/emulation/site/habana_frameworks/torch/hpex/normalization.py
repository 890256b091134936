"""``habana_frameworks.torch.hpex.normalization``."""

from typing import Any

import torch


class FusedRMSNorm:
    """Root mean square norm. Signature: the bridge's ``hpex/normalization/FusedRMSNorm.py``.

    The statistics are in float32 and the result has the input's type; the fused kernel's own
    rounding is not emulated.
    """

    @staticmethod
    def apply(
        data: torch.Tensor, gamma: torch.Tensor, eps: float, *_stages_and_modes: Any
    ) -> torch.Tensor:
        wide = data.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide.to(data.dtype) * gamma).to(data.dtype)

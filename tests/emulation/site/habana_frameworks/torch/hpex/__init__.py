"""``habana_frameworks.torch.hpex``: fused operations."""

from . import kernels, normalization

__all__ = ["kernels", "normalization"]

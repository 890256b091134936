"""``habana_frameworks.torch.utils``."""

from . import experimental, internal

__all__ = ["experimental", "internal"]

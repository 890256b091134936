"""``habana_frameworks.torch.internal``."""

from . import bridge_config

__all__ = ["bridge_config"]

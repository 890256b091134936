"""``habana_frameworks.torch.distributed``."""

from . import hccl

__all__ = ["hccl"]

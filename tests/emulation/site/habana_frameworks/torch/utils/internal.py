"""``habana_frameworks.torch.utils.internal``."""

import os


def is_lazy() -> bool:
    """``PT_HPU_LAZY_MODE``; eager unless asked for, as vllm_gaudi is run."""
    return os.environ.get("PT_HPU_LAZY_MODE", "0") == "1"

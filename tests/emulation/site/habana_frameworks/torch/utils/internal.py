"""``habana_frameworks.torch.utils.internal``."""

import os


def is_lazy() -> bool:
    """Lazy or eager mode: ``PT_HPU_LAZY_MODE``, eager unless asked for (Gaudi's default since 1.21)."""
    return os.environ.get("PT_HPU_LAZY_MODE", "0") == "1"

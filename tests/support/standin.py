"""A tiny stand-in for the Gaudi software, for tests of single classes on CPU.

`vllm_gaudi` imports `habana_frameworks` and touches `torch.hpu` on import. A test of one class
needs neither, so mocks do; where the emulated stack (or the real one) is importable, that one is
used.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any
from unittest.mock import MagicMock

from tests.emulation import gaudi

_MODULES = (
    "habana_frameworks",
    "habana_frameworks.torch",
    "habana_frameworks.torch.core",
    "habana_frameworks.torch.utils",
    "habana_frameworks.torch.utils.internal",
)


def plain_vllm() -> None:
    """Keep vLLM from making the installed vllm_gaudi its platform. Call before the first import."""
    os.environ.update(VLLM_TARGET_DEVICE="empty", VLLM_PLUGINS="")


def install() -> None:
    """Make `import vllm_gaudi...` work on a machine without a Gaudi."""
    plain_vllm()
    if "habana_frameworks" in sys.modules or importlib.util.find_spec("habana_frameworks"):
        return
    for name in _MODULES:
        sys.modules[name] = MagicMock()
    import torch

    vars(torch)["hpu"] = MagicMock()


def device() -> None:
    """Put the emulated device into this process, where a class needs more of it than mocks."""
    importlib.import_module("torch")  # first: it loads the devices that are on the path by then
    gaudi.install()
    install()


def hpu_input_batch() -> Any:
    """The module `hpu_input_batch`, its copies to the device going to the CPU instead."""
    install()
    from vllm_gaudi.v1.worker import hpu_input_batch as module

    def update(source: Any, dest: Any, indices: list[int], device: str = "cpu") -> None:
        dest[indices] = source[indices]

    module.async_h2d_update = update  # its own default device is "hpu"
    return module


def empty_batch(module: Any, *, vocabulary: int, rows: int = 8, **options: Any) -> Any:
    """An `InputBatch` of that module on the CPU, for requests of 64 tokens in blocks of 16."""
    import torch

    return module.InputBatch(
        max_num_reqs=rows,
        max_model_len=64,
        max_num_batched_tokens=64,
        device=torch.device("cpu"),
        pin_memory=False,
        vocab_size=vocabulary,
        block_sizes=[16],
        kernel_block_sizes=[16],
        **options,
    )

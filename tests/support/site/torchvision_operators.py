"""Lets ``import torchvision`` work beside a CPU torch, in every process that imports torch.

The public torchvision wheel is built for CUDA. Beside a CPU torch its operator library does not
load; torchvision goes on without it, except that it annotates two operators by name.
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

_declared: list[Any] = []  # a declaration lives as long as its object


def declare() -> None:
    """Declare the two operators where there are none. torch calls this when it is imported."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    import torch

    for library in Path(spec.origin).parent.glob("_C*.so"):
        with contextlib.suppress(OSError):
            torch.ops.load_library(library)
            return
    fragment = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        fragment.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(fragment)

"""Stand-in for Intel Gaudi's closed ``habana_frameworks``: the device, in pure torch, on the CPU.

The real vllm_gaudi plugin runs on it unmodified. Written from the plugin's own calls and from
public sources: Gaudi's documentation and the open part of its bridge
(github.com/HabanaAI/gaudi-pytorch-bridge, named "the bridge" below). Each operation names the
source of its semantics. What this cannot show is listed in docs/testing.md.
"""

import importlib.util
from pathlib import Path


def _autoload() -> None:
    """Load the device with torch.

    The real plugin's wheel has the same entry point (``torch.backends``; the bridge's
    ``habana_frameworks/autoload``). Here it matters more: every process that imports torch gets the
    emulated device, spawned workers too. Unlike the real one it also loads in lazy mode.
    """
    import habana_frameworks.torch  # noqa: F401

    _declare_torchvision_operators()


def _declare_torchvision_operators() -> None:
    """Let ``import torchvision`` work beside a CPU torch.

    The public torchvision wheel is built for CUDA, so beside a CPU torch its operator library
    does not load; torchvision goes on without, except that it annotates two operators by name.
    Nothing here calls them.
    """
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
        return
    fragment = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        fragment.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(fragment)  # the declaration lives as long as this object


_declared: list[object] = []

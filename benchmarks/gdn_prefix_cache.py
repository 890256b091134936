#!/usr/bin/env python3
"""What gdn-prefix-cache costs a block, side by side with a plain copy of the same bytes.

    python3 benchmarks/gdn_prefix_cache.py [--rounds 20]

Needs torch (the environment of the engine tests has it) and nothing of vLLM. The sizes are those of
the recipes, three GDN groups an attention group. A store copies the states of one request into the
pages of three blocks, a restore copies them back; the plain copy is one `copy_` a layer of as many
bytes between two contiguous tensors. All three take turns in one process on one thread; shown is
the median, and its ratio to that of the plain copy.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

GROUPS, BLOCKS, REQUESTS = 3, 12, 3
MODELS = {
    # layers, tokens of a block, KV heads, head size, shapes of conv and ssm state
    "Qwen3.5-27B, TP 1": (16, 896, 4, 256, (3, 10240), (48, 128, 128)),
    "Qwen3.5-397B, TP 8": (15, 640, 1, 256, (3, 1536), (8, 128, 128)),
}


def support_module() -> Any:
    """The fix's support module. All it takes from vLLM is a logger."""
    if "vllm" not in sys.modules:
        sys.modules["vllm"] = types.ModuleType("vllm")
        sys.modules["vllm.logger"] = types.ModuleType("vllm.logger")
        vars(sys.modules["vllm.logger"])["init_logger"] = logging.getLogger
    from fixes.gdn_prefix_cache import prefix_cache

    return prefix_cache


def measure(
    rounds: int, count: int, block: int, heads: int, size: int, conv: Any, ssm: Any
) -> None:
    """Print what storing and restoring one request's states takes."""
    import torch

    module = support_module()
    tokens = BLOCKS * block + 128
    layers = [
        module.Layer(
            *(torch.zeros(tokens, heads, size, dtype=torch.bfloat16) for _ in range(2)),
            (
                torch.randn(REQUESTS * GROUPS + 2, *conv).to(torch.bfloat16),
                torch.randn(REQUESTS * GROUPS + 2, *ssm),
            ),
        )
        for _ in range(count)
    ]
    pages = module.StatePages(layers, block, BLOCKS)
    state = sum(pages.rows) * module.WORD.itemsize
    flat = [torch.ones(GROUPS * state, dtype=torch.uint8) for _ in layers]
    copies = [torch.zeros_like(each) for each in flat]

    def plain() -> None:
        for target, source in zip(copies, flat, strict=True):
            target.copy_(source)

    ways: dict[str, Callable[[], None]] = {
        "plain copy": plain,
        "store": lambda: pages.store([4, 5, 6], [3, 9, 11]),
        "restore": lambda: pages.load([7, 8, 9], [3, 9, 11]),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - began)
    base = statistics.median(taken["plain copy"][1:])
    print(f"  {count * GROUPS * state / 2**20:.1f} MiB in {count} layers")
    for name, seconds in taken.items():
        median = statistics.median(seconds[1:])  # the first round touches the memory
        print(f"  {name:<12}{1000 * median:8.2f} ms   {median / base:.2f}")


def main() -> None:
    """Measure all sizes."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, sizes in MODELS.items():
        print(name)
        measure(options.rounds, *sizes)


if __name__ == "__main__":
    main()

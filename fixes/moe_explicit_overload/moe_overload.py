"""Names the overload of ``hpu::mixture_of_experts`` a call is for (fix: moe-explicit-overload)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import habana_frameworks.torch  # noqa: F401  registers the operation
import torch

_PACKET = torch.ops.hpu.mixture_of_experts


def _overload(name: str) -> tuple[Callable[..., torch.Tensor], frozenset[str]]:
    """An overload and its arguments; without arguments where this software does not have it."""
    overload = getattr(_PACKET, name, None)
    if overload is None:
        return _PACKET, frozenset()
    return overload, frozenset(argument.name for argument in overload._schema.arguments)


# By whether the scales of activations are dynamic: computed in the step of the call.
_OVERLOADS = {False: _overload("fp8_fused_weights"), True: _overload("fp8_fused_weights_dynamic")}


def for_fp8(dynamic: bool, options: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    """What to call with fp8 weights.

    ``options`` are the keywords of the call that depend on release and configuration. The packet,
    which tries all overloads, is what is left where the overload does not know one of them.
    """
    overload, arguments = _OVERLOADS[dynamic]
    return overload if all(name in arguments for name in options) else _PACKET

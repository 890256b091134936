"""Tensors that know whether they are on the device, for tests of single classes on a CPU.

A tensor on the emulated device does not know that it is there. Within ``Sides()`` (and with
``standin.device()``) what is made on ``hpu`` or moved there is ``OnDevice``, what is moved to the
CPU is not, and what is computed is where its arguments are. This device computes a little
differently and rounds by cutting off, so that equal bits show where something was computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device

_COMPUTED = {
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("cos", "sin", "pow", "__rpow__", "exp", "einsum", "outer", "div", "mul")
    if hasattr(owner, name)
}
_DYNAMIC = {
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("nonzero", "masked_select", "masked_scatter_", "unique", "argwhere")
    if hasattr(owner, name)
}
_DYNAMIC |= {torch.Tensor.item, torch.Tensor.tolist}  # read on the host
_INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


class DynamicShape(Exception):
    """An operation whose shape depends on the device's data, or that reads it on the host."""


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor on the device."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute, and go wrong where the device would."""
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:
            return torch.device("hpu", 0)
        result = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor)
        if func in _COMPUTED and result.is_floating_point():
            return torch.nextafter(result, torch.full_like(result, torch.inf))
        if func is torch.Tensor.to and (args[0].dtype, result.dtype) == (
            torch.float32,
            torch.bfloat16,
        ):
            cut = args[0].as_subclass(torch.Tensor).view(torch.int32) & ~0xFFFF
            return cut.view(torch.float32).to(torch.bfloat16).as_subclass(OnDevice)
        return result


class Sides(TorchFunctionMode):  # type: ignore[misc]
    """Where tensors are made and moved; ``static`` refuses what has no static shape there."""

    def __init__(self, *, static: bool = False) -> None:
        super().__init__()
        self.static = static

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make the result of a constructor or a transfer what it is."""
        kwargs = kwargs or {}
        if self.static and args and isinstance(args[0], OnDevice):
            masked = func in _INDEXED and getattr(args[1], "dtype", None) == torch.bool
            if masked or func in _DYNAMIC:
                raise DynamicShape(func.__name__)
        result = func(*args, **kwargs)
        device = kwargs.get("device")
        if func is torch.Tensor.to:
            named = [value for value in args[1:] if isinstance(value, (str, torch.device))]
            device = named[0] if named else device
        elif func in default_device._device_constructors():
            device = device or default_device.CURRENT_DEVICE or "cpu"
        else:
            return result
        if device is None:
            return result
        kind = OnDevice if torch.device(device).type == "hpu" else torch.Tensor
        return result.as_subclass(kind)

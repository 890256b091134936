"""The device itself: everything that says ``hpu`` runs on the CPU.

``torch.device("hpu")`` is a legal device without a backend, so code can make, compare and print
it; what fails is putting a tensor there. A function mode sees every call before torch does and

* sends ``hpu`` and ``hpu:N`` to the CPU, also when they come from ``with torch.device("hpu")``;
* copies at every transfer, since host and device never share memory. A tensor does not know its
  side, so a transfer to the side where it already is copies too;
* lets indices be padding, as on the device: negative ones wrap in gathers and scatters and are
  dropped by ``one_hot`` (vllm_gaudi's own branch for a fake device,
  ``HPUModelRunner._set_block_mapping``, says so);
* leaves host memory unpinned: torch pins it with an accelerator's allocator, and there is none.

Modes are per thread, so every thread starts with its own.
"""

import functools
import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device as default_device

CPU = torch.device("cpu")
_HPU_NAME = re.compile(r"hpu(:\d+)?")

# self, dim, index, ...: negative entries of the index wrap
_INDEXED_BY_DIM = {
    getattr(owner, name)
    for name in (
        *("index_select", "index_copy", "index_add", "index_fill", "index_reduce"),
        *("gather", "scatter", "scatter_add", "scatter_reduce"),
        *("index_copy_", "index_add_", "index_fill_", "index_reduce_"),
        *("scatter_", "scatter_add_", "scatter_reduce_"),
    )
    for owner in (torch, torch.Tensor)
    if hasattr(owner, name)
}
_CONSTRUCTORS = default_device._device_constructors()
_TRANSFERS = {torch.Tensor.to, torch.Tensor.cpu}
_VIEWS_OF_HOST_MEMORY = {torch.as_tensor, torch.asarray}


def is_hpu(value: object) -> bool:
    """Whether value names the emulated device."""
    if isinstance(value, torch.device):
        return value.type == "hpu"
    return isinstance(value, str) and _HPU_NAME.fullmatch(value) is not None


def _on_cpu(value: Any) -> Any:
    return CPU if is_hpu(value) else value


def _wrapped(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index < 0, index + size, index)


def _one_hot(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    dropped = index < 0
    hot = torch.nn.functional.one_hot(index.clamp(min=0).long(), num_classes)
    return hot.masked_fill(dropped.unsqueeze(-1), 0)


class HpuMode(TorchFunctionMode):
    """Sends every torch call that names the emulated device to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:  # names a place, puts nothing there; a number is the accelerator's
            return func("hpu", *args) if args and type(args[0]) is int else func(*args, **kwargs)
        named_device = "device" in kwargs and kwargs["device"] is not None
        args = tuple(_on_cpu(arg) for arg in args)
        if named_device:
            numbered = type(kwargs["device"]) is int
            kwargs["device"] = CPU if numbered else _on_cpu(kwargs["device"])
        elif is_hpu(default_device.CURRENT_DEVICE) and func in _CONSTRUCTORS:
            # set_default_device puts torch's own mode below this one: answer before it does
            kwargs["device"] = CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False

        if func in _INDEXED_BY_DIM and len(args) > 2 and isinstance(args[2], torch.Tensor):
            index = _wrapped(args[2], args[0].shape[args[1]])
            args = (*args[:2], index, *args[3:])
        elif func is torch.nn.functional.embedding:
            args = (_wrapped(args[0], args[1].shape[0]), *args[1:])
        elif func is torch.nn.functional.one_hot:
            return _one_hot(*args, **kwargs)

        result = func(*args, **kwargs)
        if func in _TRANSFERS:
            to_device = (
                named_device
                or func is torch.Tensor.cpu
                or any(isinstance(arg, (torch.device, str)) for arg in args[1:])
            )
            if to_device and result is args[0]:
                return result.clone()
        elif func in _VIEWS_OF_HOST_MEMORY and named_device:
            return result.clone()
        return result


class _GeneratorMeta(type(torch._C.Generator)):
    """Lets generators that torch makes itself pass ``isinstance(x, torch.Generator)``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_GeneratorMeta):
    """``torch.Generator`` for which ``hpu`` is a device."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, device=_on_cpu(device))


def _compile(model: Any = None, **_options: object) -> Any:
    """``torch.compile`` as identity: the graph compiler is not emulated, only what it computes."""
    return (lambda decorated: decorated) if model is None else model


def _get_default_device() -> torch.device:
    """As torch's own, which looks where a new tensor lands: never on ``hpu`` here."""
    modes = reversed(_get_current_function_mode_stack())
    device = next((m.device for m in modes if isinstance(m, default_device.DeviceContext)), None)
    if device is not None and is_hpu(device):
        return torch.device("hpu", device.index or 0)
    return _torch_default_device()


_torch_default_device = torch.get_default_device


def install(hpu: ModuleType) -> None:
    """Make ``hpu`` a device here: the module ``torch.hpu``, and a mode for every thread."""
    if hasattr(torch, "hpu"):
        return
    torch._register_device_module("hpu", hpu)
    sys.modules["torch.hpu"] = hpu
    torch.Generator = Generator  # type: ignore[misc]
    torch.compile = _compile  # type: ignore[assignment]
    torch.get_default_device = _get_default_device
    for name in ("synchronize", "empty_cache", "device_count", "is_available"):
        setattr(torch.accelerator, name, getattr(hpu, name))

    run_thread = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    @functools.wraps(run_thread)
    def with_mode(thread: threading.Thread) -> None:
        with HpuMode():
            run_thread(thread)

    threading.Thread._bootstrap_inner = with_mode  # type: ignore[attr-defined]
    HpuMode().__enter__()

"""``torch.hpu``: streams, events, memory, random numbers.

The API follows Gaudi's documentation ("PyTorch Python packages", ``hpu`` module), which mirrors
``torch.cuda``. Work is done when it is issued, so streams and events have nothing to wait for.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch

from . import graphs, metrics, random

__all__ = ["graphs", "metrics", "random"]

# A small card: enough for any test model, little enough that nobody allocates a real one by
# mistake.
TOTAL_MEMORY = 2 << 30


class Stream:
    """A queue of work that is always empty."""

    def __init__(self, device: Any = None, priority: int = 0, **_options: object) -> None:
        self.device = torch.device("hpu", 0)

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: "Stream") -> None: ...

    def wait_event(self, event: "Event") -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A point in a queue that has always been reached."""

    def __init__(self, enable_timing: bool = False, **_options: object) -> None:
        self._time = time.perf_counter()

    def record(self, stream: Stream | None = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return (end._time - self._time) * 1000.0


_default_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    return _default_stream


default_stream = current_stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    yield


def set_stream(stream: Stream) -> None: ...


def synchronize(device: Any = None) -> None: ...


def empty_cache() -> None: ...


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 8


def current_device() -> int:
    return 0


def set_device(device: Any) -> None: ...


def get_device_name(device: Any = None) -> str:
    return "GAUDI2"


def get_device_capability(device: Any = None) -> str:
    return "1.24.1"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes."""
    return TOTAL_MEMORY, TOTAL_MEMORY


def memory_allocated(device: Any = None) -> int:
    return 0


def max_memory_allocated(device: Any = None) -> int:
    return 0


def memory_reserved(device: Any = None) -> int:
    return 0


def reset_peak_memory_stats(device: Any = None) -> None: ...


def memory_stats(device: Any = None) -> dict[str, int]:
    return {"Limit": TOTAL_MEMORY, "InUse": 0, "MaxInUse": 0}


def manual_seed(seed: int) -> None:
    random.manual_seed(seed)


manual_seed_all = manual_seed


def recompute_sdp_enabled() -> bool:
    return False


def wrap_in_hpu_graph(module: Any, *_args: object, **_options: object) -> Any:
    """Capture and replay a module's graph (lazy mode): here the module just runs.

    As in the bridge's ``hpu/graphs.py`` a call of the wrapped module takes one argument more.
    """
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, bypass_hpu_graphs: bool = False, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    module.forward = run
    return module

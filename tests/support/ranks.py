"""Two real worker processes under vLLM's real executor, on CPU, with a worker that does as told.

All of vLLM's own is real: `MultiprocExecutor`, `WorkerProc` and its loops, the shared-memory
message queues, the monitor. Only the `Worker` inside computes nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import threading
import time
from typing import Any

# What a rank can be told to do in a call, instead of returning its name.
RAISE = "raise"  # an exception in the call
RAISE_LATE = "raise late"  # an asynchronous output whose results cannot be copied
HANG = "hang"  # like a rank that waits for its peers in a collective
UNSENDABLE = "unsendable"  # an output that cannot be pickled


class Output:
    """An asynchronous output. Its real base class is mixed in on use: vllm is not imported here."""

    def __init__(self, rank: int, what: str | None) -> None:
        self.rank, self.what = rank, what

    def get_output(self) -> Any:
        """What the output thread of a worker process calls."""
        if self.what == RAISE_LATE:
            raise RuntimeError(f"no copy on rank {self.rank}")
        return threading.Lock() if self.what == UNSENDABLE else f"rank {self.rank}"


class Worker:
    """Stands for the device worker of one rank."""

    clean_up_hangs = False

    def __init__(self, vllm_config: Any, rank: int, **_: Any) -> None:
        self.rank = rank
        self.asynchronous = vllm_config.scheduler_config.async_scheduling

    def init_device(self) -> None: ...

    def load_model(self) -> None: ...

    def shutdown(self) -> None:
        """Clean-up at the end of the process."""
        if self.clean_up_hangs:
            _sleep()

    def execute_model(self, orders: dict[int, str] | None) -> Any:
        """A step, first call: nothing yet."""
        return self.do(orders)

    def sample_tokens(self, orders: dict[int, str] | None) -> Any:
        """A step, second call: the tokens."""
        what = (orders or {}).get(self.rank)
        answer = self.do(orders)
        if not self.asynchronous:
            return answer
        from vllm.v1.outputs import AsyncModelRunnerOutput

        return type("AsyncOutput", (Output, AsyncModelRunnerOutput), {})(self.rank, what)

    def utility(self, orders: dict[int, str] | None) -> Any:
        """A call that all ranks answer, such as adding an adapter."""
        return self.do(orders)

    def do(self, orders: dict[int, str] | None) -> Any:
        """Follow this rank's order."""
        what = (orders or {}).get(self.rank)
        if what == RAISE:
            raise RuntimeError(f"out of memory on rank {self.rank}")
        if what == HANG:
            _sleep()
        return threading.Lock() if what == UNSENDABLE else f"rank {self.rank}"


def _sleep() -> None:
    time.sleep(600)


class Engine:
    """What an engine core sees of two ranks."""

    def __init__(self, *, asynchronous: bool, connector: bool) -> None:
        from vllm.config import DeviceConfig, ParallelConfig, VllmConfig
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        config = VllmConfig(
            device_config=DeviceConfig(device="cpu"),
            parallel_config=ParallelConfig(
                tensor_parallel_size=2,
                worker_cls=f"{__name__}.Worker",
                distributed_executor_backend="mp",
            ),
        )
        config.scheduler_config.async_scheduling = asynchronous
        self.executor = MultiprocExecutor(config)
        self.processes = [worker.proc for worker in self.executor.workers]
        if connector:
            self.executor.kv_output_aggregator = _OfRankZero()
        self.told = threading.Event()  # the engine core has been told that the executor failed
        self.executor.register_failure_callback(self.told.set)

    def step(self, orders: dict[int, str] | None = None, *, method: str = "sample_tokens") -> Any:
        """A call of a step, as the engine core makes it."""
        return getattr(self.executor, method)(orders)

    def utility(self, orders: dict[int, str] | None = None) -> Any:
        """A utility call."""
        return self.executor.collective_rpc("utility", args=(orders,))

    def exit_code(self, rank: int, within: float = 3.0) -> int | None:
        """A rank's exit code; None for a process that still lives after that time."""
        process: multiprocessing.process.BaseProcess = self.processes[rank]
        deadline = time.monotonic() + within
        # While vLLM's monitor, another thread, is reaping the process, a join returns without it.
        while process.exitcode is None and time.monotonic() < deadline:
            process.join(0.05)
            time.sleep(0.01)
        return process.exitcode

    def dead(self, within: float = 10.0) -> bool:
        """Has the engine core been told, and is every process gone?"""
        told = self.told.wait(within)
        for process in self.processes:
            process.join(within)
        return told and not any(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """Leave no process behind."""
        self.executor.shutdown()
        for process in self.processes:
            process.kill()
            process.join(5)


class _OfRankZero:
    """A KV connector's merging of all ranks' outputs, as far as needed."""

    def aggregate(self, outputs: list[Any], output_rank: int = 0) -> Any:
        """The output rank's."""
        return outputs[output_rank]


@contextlib.contextmanager
def engine(monkeypatch: Any, *, asynchronous: bool = False, connector: bool = False) -> Any:
    """An engine's two ranks, up and running."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.multimodal.registry import MultiModalRegistry

    # The processes are copies of this one, the class above included.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    # On stock a wait for an answer that does not come ends like this.
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "8")
    monkeypatch.setattr(
        MultiModalRegistry, "worker_receiver_cache_from_config", lambda *_, **__: None
    )
    monkeypatch.setattr(shm_broadcast, "Context", _kept_context)
    running = Engine(asynchronous=asynchronous, connector=connector)
    try:
        yield running
    finally:
        running.close()


_contexts: list[Any] = []


def _kept_context() -> Any:
    """A ZeroMQ context that is never collected as garbage.

    Collected together with its sockets it can wait for ever for these to be closed. An engine core
    has one executor in its life and never gets there; here the next test would.
    """
    import zmq

    _contexts.append(zmq.Context())
    return _contexts[-1]

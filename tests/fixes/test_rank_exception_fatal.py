"""rank-exception-fatal with two real worker processes, real queues and the real monitor.

Rank 0 is the output rank: the one whose answer the engine waits for in a step.
"""

from __future__ import annotations

import importlib
import os
import time

import pytest

from tests.support import ranks, standin
from tests.support.ranks import HANG, RAISE, RAISE_LATE, UNSENDABLE

pytestmark = pytest.mark.needs("torch")

GOES_ON = r"rank 1 lives on"
UNHEARD = r"TimeoutError: RPC call to sample_tokens timed out"

modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    """Import before any test captures or patches: vLLM sets up its log on import."""
    standin.plain_vllm()
    importlib.import_module("vllm.v1.executor.multiproc_executor")


@pytest.fixture
def start(monkeypatch):
    """Start the two ranks, with the keywords of `ranks.engine`."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(ranks.engine(monkeypatch, **how))


def assert_ended(engine, rank=1):
    """The rank has ended itself, the engine core knows, and nothing is served any more."""
    code = engine.exit_code(rank)
    assert code is not None, f"rank {rank} lives on, and the next step gives {engine.step()!r}"
    assert code == 1
    assert engine.dead()
    assert engine.executor.is_failed
    with pytest.raises((RuntimeError, AssertionError)):
        engine.step()


# --- the fault -----------------------------------------------------------------------------------


@modes
@pytest.mark.red(GOES_ON)
@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_step_fails_on_a_rank_that_does_not_answer(start, asynchronous, method):
    engine = start(asynchronous=asynchronous)
    assert engine.step() == "rank 0"
    assert engine.step({1: RAISE}, method=method) == "rank 0"
    assert_ended(engine)


@pytest.mark.red(GOES_ON)
def test_error_that_shows_when_the_results_are_copied(start):
    """Async scheduling: the output of a rank that does not answer was dropped unread."""
    engine = start(asynchronous=True)
    assert engine.step() == "rank 0"
    engine.step({1: RAISE_LATE})
    assert_ended(engine)


@pytest.mark.red(GOES_ON)
def test_clean_up_that_would_block(start, monkeypatch):
    """Destroying a process group waits for peers, which wait for this rank."""
    monkeypatch.setattr(ranks.Worker, "clean_up_hangs", True)
    engine = start()
    engine.step({1: RAISE})
    assert_ended(engine)


@pytest.mark.red(GOES_ON)
def test_a_log_handler_that_blocks(start, monkeypatch):
    """The last lines may take some seconds, not for ever."""
    import logging

    monkeypatch.setattr(logging, "shutdown", lambda *_: time.sleep(600))
    engine = start()
    engine.step({1: RAISE})
    assert engine.exit_code(1, within=8) == 1, "rank 1 lives on"


@modes
@pytest.mark.red(UNHEARD)
def test_output_rank_waits_for_the_failed_one(start, asynchronous):
    """As in a collective. The engine waits for rank 0, and is woken."""
    engine = start(asynchronous=asynchronous)
    with pytest.raises(RuntimeError, match="cancelled"):
        engine.step({0: HANG, 1: RAISE})
    assert engine.exit_code(1) == 1
    assert engine.dead()


@pytest.mark.red(UNHEARD)
def test_answers_of_all_ranks_with_a_connector(start):
    """The failed rank's answer is behind that of a rank that waits for it."""
    engine = start(asynchronous=True, connector=True)
    assert engine.step() == "rank 0"
    with pytest.raises(RuntimeError, match="cancelled"):
        engine.step({0: HANG, 1: RAISE})
    assert engine.exit_code(1) == 1
    assert engine.dead()


@pytest.mark.red(UNHEARD)
def test_output_that_cannot_be_sent(start):
    """Async scheduling: the thread that sends outputs ended, and with it every answer."""
    engine = start(asynchronous=True)
    with pytest.raises(RuntimeError, match="cannot pickle"):
        engine.step({0: UNSENDABLE})
    assert engine.step() == "rank 0"


@pytest.mark.red(r"TimeoutError: RPC call to utility timed out")
def test_utility_result_that_cannot_be_sent(start):
    """The same for a utility call, which is not fatal."""
    engine = start(asynchronous=True)
    with pytest.raises(RuntimeError, match="cannot pickle"):
        engine.executor.collective_rpc("utility", timeout=3, args=({0: UNSENDABLE},))
    assert engine.exit_code(0, within=1) is None


@pytest.mark.red(r"rank 0 lives on")
def test_queue_that_is_broken(start, monkeypatch):
    """Neither the output nor its error can be sent: the engine must not wait for ever."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    stock, parent = MessageQueue.enqueue, os.getpid()

    def enqueue(self, obj, timeout=None):
        if os.getpid() != parent and obj[1] != "rank 1":
            raise OSError("the queue is broken")
        return stock(self, obj, timeout)

    monkeypatch.setattr(MessageQueue, "enqueue", enqueue)
    engine = start(asynchronous=True)
    engine.executor.sample_tokens(None, non_block=True)
    assert engine.exit_code(0) == 1, "rank 0 lives on"
    assert engine.dead()


@pytest.mark.red(GOES_ON)
def test_says_why(start, tmp_path):
    """The traceback and the reason are in the log when the process is gone, buffered ones too."""
    import logging.handlers

    log = tmp_path / "log"
    file = logging.FileHandler(log)
    buffered = logging.handlers.MemoryHandler(1000, flushLevel=logging.CRITICAL + 1, target=file)
    logger = logging.getLogger("vllm")
    logger.addHandler(buffered)
    try:
        engine = start()
        engine.step({1: RAISE})
        assert engine.exit_code(1) == 1, "rank 1 lives on"
        printed = log.read_text()
    finally:
        logger.removeHandler(buffered)
    assert "out of memory on rank 1" in printed
    assert "A step failed on a rank whose answer the engine does not wait for (rank 1)" in printed


# --- neighbours ----------------------------------------------------------------------------------


@modes
def test_steps_and_utility_calls_are_as_before(start, asynchronous):
    engine = start(asynchronous=asynchronous)
    for _ in range(30):
        assert engine.step(method="execute_model") == "rank 0"
        assert engine.step() == "rank 0"
    assert engine.utility() == ["rank 0", "rank 1"]
    assert engine.exit_code(1, within=0.2) is None
    assert not engine.executor.is_failed


@modes
@pytest.mark.parametrize("rank", [0, 1])
def test_utility_call_that_fails_is_not_fatal(start, asynchronous, rank):
    engine = start(asynchronous=asynchronous)
    with pytest.raises(RuntimeError, match=f"out of memory on rank {rank}"):
        engine.utility({rank: RAISE})
    assert engine.exit_code(rank, within=1) is None
    assert not engine.executor.is_failed


@pytest.mark.parametrize(
    ("asynchronous", "what"),
    [(False, RAISE), (True, RAISE), (True, RAISE_LATE)],
    ids=["sync", "async", "async late"],
)
def test_output_rank_reports_and_lives(start, asynchronous, what):
    """One answer, the error; what the engine then does is its own affair."""
    engine = start(asynchronous=asynchronous)
    with pytest.raises(RuntimeError, match="on rank 0"):
        engine.step({0: what})
    assert engine.exit_code(0, within=1) is None
    assert engine.step() == "rank 0"


@modes
def test_connector_with_a_step_that_fails_on_rank_zero(start, asynchronous):
    engine = start(asynchronous=asynchronous, connector=True)
    with pytest.raises(RuntimeError, match="out of memory on rank 0"):
        engine.step({0: RAISE})


@modes
def test_orderly_shutdown(start, asynchronous):
    """Processes clean up and end with exit code 0, and nobody is told of a failure."""
    engine = start(asynchronous=asynchronous)
    engine.step()
    engine.executor.shutdown()
    assert [engine.exit_code(rank) for rank in (0, 1)] == [0, 0]
    assert not engine.told.is_set()
    assert not engine.executor.is_failed


@modes
def test_step_that_fails_while_shutting_down(start, asynchronous, monkeypatch):
    """The peers are leaving, so what fails now is no news: the rank cleans up as before."""

    def fail_when_told_to_stop(self, orders):
        if self.rank == 1 and orders:
            time.sleep(0.5)
            raise RuntimeError("peer is gone")
        return "rank 0"

    monkeypatch.setattr(ranks.Worker, "execute_model", fail_when_told_to_stop)
    engine = start(asynchronous=asynchronous)
    engine.executor.execute_model({1: "stop"}, non_block=True)
    engine.executor.shutdown()
    assert [engine.exit_code(rank) for rank in (0, 1)] == [0, 0]

"""rank-exception-fatal on the engine: tensor parallel over two worker processes."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.faults import AFTER, BEFORE

pytestmark = pytest.mark.needs("engine")

TIMEOUT = 30  # VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: how long stock waits for an answer


@pytest.fixture
def engine(engines, asynchronous):
    return engines(
        model="dense",
        asynchronous=asynchronous,
        ranks=2,
        own_process=True,
        environment=(
            ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(TIMEOUT)),
            ("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1"),
            # Copies of this process, in which everything is imported: a fifth of the time.
            ("VLLM_WORKER_MULTIPROC_METHOD", "fork"),
        ),
        arguments=(("worker_extension_cls", "tests.support.faults.Faults"),),
    )


def core_process(engine):
    """The process of the engine core."""
    (process,) = engine.llm.llm_engine.engine_core.resources.engine_manager.processes
    return process


def gone(process, within):
    """Does the process end in that time?

    Its own object may never hear of it: vLLM watches processes in threads, and where another one
    has reaped it, `is_alive` stays true.
    """
    deadline = time.monotonic() + within
    while process.is_alive() and time.monotonic() < deadline:
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return not process.is_alive()


def assert_ends(engine, prompt):
    """Generation fails at once, so does every later call, and the engine's process is gone."""
    from vllm.v1.engine.exceptions import EngineDeadError

    process = core_process(engine)
    began = time.monotonic()
    try:
        (answer,) = engine.tokens([prompt])
    except EngineDeadError:
        took = time.monotonic() - began
    else:
        pytest.fail(f"the engine goes on: {len(answer)} tokens")
    assert took < TIMEOUT / 2, "the engine ended only after a timeout"
    with pytest.raises(EngineDeadError):
        engine.tokens([prompt])
    assert gone(process, within=30)


@pytest.mark.parametrize("asynchronous", [True], ids=["async"])
@pytest.mark.red(r"Failed: the engine goes on: 16 tokens")
def test_rank_that_fails_at_the_end_of_its_step(engine, words):
    prompt = words(70, 20)
    assert len(engine.tokens([prompt])[0]) == 16
    engine.llm.collective_rpc("fail_next_sampling", args=(1, AFTER))
    assert_ends(engine, prompt)


@pytest.mark.parametrize("asynchronous", [False], ids=["sync"])
@pytest.mark.red(r"the engine goes on: 16 tokens|the engine ended only after a timeout")
def test_rank_that_its_peer_waits_for(engine, words):
    prompt = words(70, 20)
    engine.llm.collective_rpc("fail_next_sampling", args=(1, BEFORE))
    assert_ends(engine, prompt)

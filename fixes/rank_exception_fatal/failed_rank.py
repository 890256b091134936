"""Ends a worker process whose failure nobody would hear of (fix: rank-exception-fatal)."""

from __future__ import annotations

import logging
import os
import sys
from threading import Thread
from typing import Any

from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput

logger = init_logger(__name__)

# Sent to every rank in each step. With a KV or EC connector all ranks answer them, and the engine
# reads the answers in the order of ranks.
STEP_METHODS = ("execute_model", "sample_tokens")

# How long the last lines may take on their way out: a log handler must not keep the process alive.
FLUSH_SECONDS = 5.0


class Unread:
    """The asynchronous output of a rank that does not answer: waited for, then dropped."""

    def __init__(self, output: AsyncModelRunnerOutput) -> None:
        self.output = output


def call_returned(proc: Any, output: Any, output_rank: int | None) -> None:
    """A call returned on this rank: have the output thread wait for an output that nobody reads."""
    unread = output_rank is not None and proc.rank != output_rank
    if unread and proc.use_async_scheduling and isinstance(output, AsyncModelRunnerOutput):
        proc.async_output_queue.put(Unread(output))


def call_raised(proc: Any, method: str | bytes, output_rank: int | None) -> None:
    """A call raised on this rank: end the process unless the engine is sure to be told."""
    if output_rank is None and method not in STEP_METHODS:
        return  # a utility call: every rank answers, and its failure is the caller's affair
    if proc.rank == (output_rank or 0):
        return  # this rank's answer is the one the engine waits for
    end_process(proc, "A step failed on a rank whose answer the engine does not wait for")


def send(proc: Any, output: Any) -> None:
    """The output thread's work for one output; nothing that goes wrong in it stays unheard."""
    try:
        if isinstance(output, Unread):
            output.output.get_output()
            return
        try:
            proc.enqueue_output(output)
        except Exception as error:
            logger.exception("An output could not be sent; sending the error instead.")
            proc.enqueue_output(error)
    except Exception:
        logger.exception("The output thread hit an exception.")
        end_process(proc, "An output was lost")


def end_process(proc: Any, reason: str) -> None:
    """Exit now, without clean-up: that would wait for peers which wait for this rank.

    The executor watches its workers' processes: it stops the other ranks and fails the engine.
    """
    queue = proc.rpc_broadcast_mq
    if queue is None or queue.shutting_down:
        return  # the engine is going down; what fails meanwhile is no news
    try:
        last_words = Thread(target=_last_words, args=(proc.rank, reason), daemon=True)
        last_words.start()
        last_words.join(FLUSH_SECONDS)
    finally:
        os._exit(1)


def _last_words(rank: int, reason: str) -> None:
    logger.critical("%s (rank %d): ending this process, so that the engine stops.", reason, rank)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()

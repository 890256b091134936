"""Divides wall time between long prompts and whoever decodes (fix: vllm-long-prefill-share).

An account in seconds, one for all long prompts: a step with a chunk of one is a charge, and the
others' steps pay it off. While something is owed, long prompts sit out. Nothing here knows vLLM
but by the attributes of its requests and scheduler.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

SHARE = "VLLM_LONG_PREFILL_SHARE"
MIN_TOKENS = "VLLM_LONG_PREFILL_MIN_TOKENS"
ASYNC = "VLLM_LONG_PREFILL_SHARE_ASYNC"


@dataclass(frozen=True)
class Settings:
    """What the environment asks for."""

    share: float
    """Of wall time, for the chunks of long prompts: above 0, and 1 is all of it (no limit)."""
    min_tokens: int
    """From this length on a prompt is a long one."""
    under_async: bool
    """Whether the limit holds under asynchronous scheduling too."""

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the three variables; :class:`ValueError` names the one that makes no sense."""
        share = _read(SHARE, "1", float, lambda value: 0 < value <= 1, "above 0 and at most 1")
        least = _read(MIN_TOKENS, "32768", int, lambda value: value > 0, "a positive whole number")
        under_async = _read(ASYNC, "0", int, lambda value: value in (0, 1), "0 or 1")
        return cls(share, int(least), bool(under_async))


def _read(
    name: str,
    default: str,
    kind: Callable[[str], float],
    is_valid: Callable[[float], bool],
    what: str,
) -> float:
    text = os.environ.get(name, default)
    try:
        value = kind(text)
    except ValueError:
        value = float("nan")
    if not is_valid(value):
        raise ValueError(f"{name} must be {what}, not {text!r}. Unset, it is {default}.")
    return value


def for_scheduler(scheduler: Any) -> LongPrefillShare | None:
    """The account of a vLLM scheduler; None where the environment or its set-up leaves it off."""
    settings = Settings.from_environment()
    if settings.share == 1:
        return None
    parallel = scheduler.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        # Steps of pipeline stages overlap, and ranks of data parallelism wait for one another.
        logger.warning("%s has no effect with pipeline or data parallelism.", SHARE)
        return None
    if scheduler.scheduler_config.async_scheduling and not settings.under_async:
        logger.warning("%s has no effect under async scheduling without %s=1.", SHARE, ASYNC)
        return None
    logger.info(
        "Prompts of %d tokens and more get at most %g of the wall time while others decode.",
        settings.min_tokens,
        settings.share,
    )
    return LongPrefillShare(settings.share, settings.min_tokens, scheduler.max_model_len)


@dataclass(frozen=True)
class _Step:
    """A step that was scheduled and is not complete yet."""

    output: object
    scheduled_at: float  # seconds of the clock
    charged: bool  # it has a chunk of a long prompt, and somebody was decoding
    held: bool  # a long prompt sat it out


class LongPrefillShare:
    """The account, and who sits out a step because of it.

    In any stretch of time in which somebody decodes and that begins with a long prompt's chunk,
    such chunks take at most ``share`` of it and one chunk more.
    """

    def __init__(
        self,
        share: float,
        min_tokens: int,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.min_tokens = min_tokens
        self.max_model_len = max_model_len
        self.clock = clock
        self.owed = 0.0
        """Seconds that others must run before a long prompt may; below 0 it is a credit."""
        self._price = (1 - share) / share  # seconds owed for one of a long prompt's
        self._in_flight: deque[_Step] = deque()
        self._last_completed = float("-inf")
        # Of the step that is being scheduled:
        self._contended: bool | None = None  # not looked at yet
        self._held = False
        self._long: list[str] = []  # ids of the long prompts that may have a chunk

    def holds(self, request: Any, running: Iterable[Any]) -> bool:
        """Whether a request must sit this step out; asked of each that still has prompt left.

        A chunk of the step before, of unknown cost as long as it runs, holds as well as a debt.
        """
        if request.num_tokens < self.min_tokens or not _prefills(request):
            return False
        if self._contended is None:
            self._contended = any(map(self._decodes, running))
            if not self._contended:
                self.owed = 0.0
        if self._contended and (self.owed > 0 or any(step.charged for step in self._in_flight)):
            self._held = True
            return True
        self._long.append(request.request_id)
        return False

    def scheduled(self, output: Any) -> None:
        """A step has been put together: remember what it is until it is complete."""
        scheduled = output.num_scheduled_tokens
        charged = bool(self._contended) and any(name in scheduled for name in self._long)
        step = _Step(output, self.clock(), charged, self._held)
        self._in_flight.append(step)
        if self._held and not scheduled:
            self.owed = 0.0  # nobody could run after all (no memory): nothing to hold for
        self._contended, self._held = None, False
        self._long.clear()

    def completed(self, output: object) -> None:
        """A step is complete: book its time. Steps run one after the other, in this order."""
        while self._in_flight:
            step = self._in_flight.popleft()
            if step.output is output:
                break
        else:
            return
        now = self.clock()
        began = max(step.scheduled_at, self._last_completed)
        idle, took = began - self._last_completed, now - began
        self._last_completed = now
        if self.owed > 0:
            others = idle if step.charged or step.held else idle + took
            self.owed = max(0.0, self.owed - others)
        if step.charged:
            # A credit is worth one chunk at most, so it never buys more than one.
            self.owed = max(0.0, max(self.owed, -took) + took * self._price)
        elif step.held:
            # Paid in whole steps, one of them under way when it is enough (async scheduling):
            # without a credit for the rest the long prompts would fall short of their share.
            self.owed -= took

    def _decodes(self, request: Any) -> bool:
        """Whether the request gets a token in this step, and not one of its prompt.

        One that waits for its last token, under async scheduling, has none to get.
        """
        if _prefills(request):
            return False
        pending = request.num_output_placeholders
        last = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return bool(pending == 0 or request.num_computed_tokens + 2 - pending < last)


def _prefills(request: Any) -> bool:
    """Whether there is more to compute before the request's next token than the one before it."""
    return bool(request.num_tokens - request.num_computed_tokens > 1)

"""What each sampling call needs to know of its own rows (fix: logitsprocs-rows).

vLLM samples its whole batch in one call a step, and its logits processors keep what they know of
a request under its row. The Gaudi runner samples in several calls, each on the rows of some
requests, padded to a bucket: here the processors are told before each call which requests its
rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
)

# What stands in a list of output tokens for one that is still on the device.
PLACEHOLDER = -1

NO_PROCESSORS = LogitsProcessors()


class OutputCount(Sequence[int]):
    """A request's output for a processor that only asks for its length.

    Exact without the tokens: under async scheduling they are still on the device, and the
    runner's list of them is too short or holds placeholders.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._at_start = len(_known(state.output_token_ids))

    def __len__(self) -> int:
        """Number of tokens sampled before this step's."""
        state = self._state
        # This step computes the token sampled last. Less than that are chunks of a prompt, which
        # for a resumed request includes the output it had.
        computed: int = state.num_computed_tokens + 1 - len(state.prompt_token_ids)
        listed: list[int] = state.output_token_ids
        return max(self._at_start, computed, len(listed) if listed[-1:] != [PLACEHOLDER] else 0)

    def __getitem__(self, index: Any) -> Any:
        """Not for reading: a processor that reads the tokens is given the history itself."""
        raise TypeError("the tokens are not known, only their number")


@dataclass(eq=False)
class Request:
    """A request in the batch that logits processors or output histories matter to."""

    state: Any  # the runner's CachedRequestState
    params: SamplingParams
    processed: bool
    """Whether the logits processors have to know of it."""
    history: list[int] | None
    """Its output tokens, for who reads them; always the same list. None: nobody does."""
    count: OutputCount


class FirstRows:
    """A processor that is shown the first rows of a call: those of requests, without padding."""

    def __init__(self, processor: LogitsProcessor, rows: int) -> None:
        self._processor = processor
        self._rows = rows

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [padded rows, vocabulary], changed in place."""
        head = logits[: self._rows]
        result = self._processor.apply(head)
        if result is not head:
            head.copy_(result)
        return logits


class RowProcessors:
    """What the logits processors of an `InputBatch` know: which request is on which row.

    Kept with them, as ``logitsprocs.by_row``.
    """

    def __init__(
        self, processors: LogitsProcessors, device: torch.device, pin_memory: bool
    ) -> None:
        self._processors = processors
        self._device = device
        self._pin_memory = pin_memory
        self._custom = [p for p in processors.all if type(p) not in BUILTIN_LOGITS_PROCESSORS]
        for processor in processors.argmax_invariant:
            _run_uncompiled(processor)
        self._requests: dict[str, Request] = {}
        # The runner hands the processors on when it makes a new batch: they know what they know.
        before: RowProcessors | None = getattr(processors, "by_row", None)
        self._rows: list[Request | None] = [] if before is None else before._rows
        self._size = 0
        self._asynchronous = False
        # Async scheduling: [requests] token ids on their way to the host, the event that says
        # they are there, and whose they are by row.
        self._on_the_way: tuple[torch.Tensor, Any, list[tuple[int, Request]]] | None = None

    def add(self, state: Any) -> None:
        """A request has come into the batch."""
        params = state.sampling_params
        if params is None:
            return  # pooling
        processed = bool(self._custom or params.min_p or params.min_tokens or params.logit_bias)
        reads = bool(self._custom) or _reads_outputs(params)
        if processed or reads:
            history = _known(state.output_token_ids) if reads else None
            self._requests[state.req_id] = Request(
                state, params, processed, history, OutputCount(state)
            )

    def remove(self, req_id: str) -> None:
        """A request has left the batch: the processors forget it."""
        request = self._requests.pop(req_id, None)
        if request is not None and request in self._rows:
            self._tell([None if other is request else other for other in self._rows], self._size)

    def of_call(
        self, rows: list[tuple[str, list[int]]]
    ) -> tuple[list[list[int]], LogitsProcessors]:
        """The output histories and the processors for a call on these rows.

        Rows are (request id, the runner's list of its output), padding last and repeating row 0.
        """
        if not self._requests:
            return [tokens for _, tokens in rows], NO_PROCESSORS
        found = {req_id: self._requests.get(req_id) for req_id, _ in rows}
        self._read_outputs([r for r in found.values() if r is not None and r.history is not None])
        histories = [
            tokens
            if (request := found[req_id]) is None or request.history is None
            # The same list for every row of a request, as the runner's is.
            else request.history
            for req_id, tokens in rows
        ]
        wanted = [r if r is not None and r.processed else None for r in found.values()]
        if not any(wanted):
            return histories, NO_PROCESSORS
        self._tell(wanted, len(rows))
        return histories, self._for_rows(len(wanted), len(rows))

    def sampled(self, token_ids: torch.Tensor, row_of: dict[str, int]) -> None:
        """Async scheduling: a step's tokens [requests], on the device, and whose they are.

        Starts to copy them to the host if somebody will read them there.
        """
        self._asynchronous = True
        self._on_the_way = None
        readers = [
            (row, request)
            for req_id, row in row_of.items()
            if (request := self._requests.get(req_id)) is not None and request.history is not None
        ]
        if readers:
            on_host = token_ids.to("cpu", non_blocking=True)
            event = torch.hpu.Event()
            event.record()
            self._on_the_way = on_host, event, readers

    def _read_outputs(self, readers: list[Request]) -> None:
        """Complete the histories of requests in this call. Waits for the step before, if at all."""
        if readers and self._on_the_way is not None:
            on_host, event, arrived = self._on_the_way
            self._on_the_way = None
            event.synchronize()
            tokens = on_host.tolist()
            for row, request in arrived:
                assert request.history is not None
                request.history.append(tokens[row])
        elif not self._asynchronous:
            for request in readers:
                assert request.history is not None
                request.history += request.state.output_token_ids[len(request.history) :]

    def _tell(self, wanted: list[Request | None], size: int) -> None:
        """Tell the processors what is on the rows now: requests, then padding up to ``size``."""
        removed = [
            row
            for row in reversed(range(len(self._rows)))
            if self._rows[row] is not None and _at(wanted, row) is None
        ]
        added = [
            (row, request)
            for row, request in enumerate(wanted)
            if request is not None and _at(self._rows, row) is not request
        ]
        changed = bool(removed or added or size != self._size or len(wanted) != len(self._rows))
        self._rows[:] = wanted
        self._size = size
        if changed:
            self._renew_min_p()
        for processor in self._processors.all:
            if not changed:
                processor.update_state(None)
                continue
            if type(processor) is MinPLogitsProcessor:
                continue
            custom = processor in self._custom
            additions = [
                (
                    row,
                    request.params,
                    request.state.prompt_token_ids,
                    request.history if custom else request.count,
                )
                for row, request in added
            ]
            processor.update_state(
                BatchUpdate(len(wanted) if custom else size, removed, additions, [])
            )

    def _renew_min_p(self) -> None:
        """Give a call whose rows changed a `MinPLogitsProcessor` of its own, as large as the call.

        It keeps one value a row in a buffer for `max_num_seqs` rows, which a decode bucket can
        exceed, and copies it to the device without waiting: the next call must not write there.
        """
        processors = self._processors.argmax_invariant
        for place, old in enumerate(processors):
            if type(old) is not MinPLogitsProcessor:
                continue
            users = [(row, r) for row, r in enumerate(self._rows) if r and r.params.min_p]
            if not users and not old.min_p_count:
                continue
            config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=self._size))
            new = MinPLogitsProcessor(config, self._device, self._pin_memory)
            _run_uncompiled(new)
            values = [(row, r.params, r.state.prompt_token_ids, r.count) for row, r in users]
            new.update_state(BatchUpdate(self._size, [], values, []))
            processors[place] = new

    def _for_rows(self, requests: int, size: int) -> LogitsProcessors:
        if not self._custom or requests == size:
            return self._processors
        shown = LogitsProcessors()
        for kind in ("argmax_invariant", "non_argmax_invariant"):
            each = getattr(self._processors, kind)
            setattr(shown, kind, [FirstRows(p, requests) if p in self._custom else p for p in each])
        return shown


def _known(tokens: list[int]) -> list[int]:
    return [token for token in tokens if token != PLACEHOLDER]


def _at(rows: list[Request | None], row: int) -> Request | None:
    return rows[row] if row < len(rows) else None


def _reads_outputs(params: SamplingParams) -> bool:
    """Whether sampling a request takes the tokens it has so far."""
    words = params.bad_words_token_ids or []
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or any(len(word) > 1 for word in words)
    )


def _run_uncompiled(processor: LogitsProcessor) -> None:
    """Have a compiled sampler step around a processor: it would be compiled for each state anew."""
    vars(processor)["apply"] = torch.compiler.disable(processor.apply)


def compiled_if_plain(stage: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``Sampler.apply_logits_processors`` for a sampler that is to be compiled.

    It reads lists that grow with every token, for which it would be compiled every step. Calls
    that have any such list run it uncompiled; all others are compiled whole.
    """
    uncompiled = torch.compiler.disable(stage)

    def apply(sampler: Any, logits: torch.Tensor, metadata: Any, bonus: bool) -> torch.Tensor:
        plain = (
            metadata.no_penalties
            and not metadata.bad_words_token_ids
            and not metadata.logitsprocs.non_argmax_invariant
        )
        return (stage if plain else uncompiled)(sampler, logits, metadata, bonus)

    return apply

"""vllm-long-prefill-share: long prompts leave the others a share of the wall time. Opt-in.

What a user sees: somebody sends a prompt of 250,000 tokens, and for the minute that it takes
everybody else's answers crawl: a token a second in place of seventeen. New short prompts get no
first token until it is done.

Why: `Scheduler.schedule` visits the running requests in order. Each that decodes gets its token,
and the long prompt all the rest of `max_num_batched_tokens`, in every step. A step then lasts as
long as a chunk of the prompt, most of a second, so that every stream advances once a chunk. What
is left of the budget is too little for a waiting prompt's chunk, or nothing.

What is changed: with `VLLM_LONG_PREFILL_SHARE=0.5`, while a prompt of at least
`VLLM_LONG_PREFILL_MIN_TOKENS` tokens (32768) is prefilling and somebody else is decoding, steps
with a chunk of it get at most that share of the wall time. An account, one for all such prompts,
is charged with the time that each of these steps took from one completion to the next, and paid
by that of the others; while something is owed, long prompts sit out, in the running loop as in
the waiting queue. Chunks keep their size, so that nothing about budgets, block alignment or
buckets changes. Where nobody decodes, nobody sits out: a hold needs somebody who runs in that
step. Under async scheduling, where a step is scheduled while the one before still runs, it takes
`VLLM_LONG_PREFILL_SHARE_ASYNC=1` too; one chunk is then in flight at a time. A value that makes
no sense stops the start. Unset, or 1, is the stock schedule.

The scheduler asks only about requests that still have prompt left, and looks for somebody who
decodes at the first long one: what it costs where there is none is two clock readings a step.
Measured in docs/long-prefill-share.md.

Reference: https://github.com/vllm-project/vllm/issues/54919 asks for it.

Known limit: inactive, with a warning, under pipeline parallelism (steps overlap, so that a
completion says nothing about one step's time) and data parallelism (ranks wait for one another's
experts; each would hold at another time). A short prompt that comes while nobody decodes waits
for the long one as in stock. A step that compiles a graph counts with all its time. A prompt
whose prefix is cached is long by its length; what it is charged is the time it really took. With
`priority` scheduling a long prompt yields to decoding requests whatever their priorities, and
with a KV connector a held one asks for its remote blocks when it is let in. Where memory is so
short that the only one who decodes must give up its own blocks, one step is empty. A held prompt
leaves the worker's batch and comes back, which reorders its rows: on Gaudi the fixes about rows
and async inputs, all in the profile, belong to it.

Other places with the pattern:
* Prefills deferred for data parallelism (`throttle_prefills`): counts steps, defers all prefills
  alike and short ones behind them; left.
* `long_prefill_token_threshold` makes chunks smaller, not their share: a step with 250,000 tokens
  of context is slow with a small chunk too; left.
* `AsyncScheduler` and vllm_gaudi's `HPUAsyncScheduler` inherit the changed methods: nothing to do.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FILE = "vllm/v1/core/sched/scheduler.py"

FIX = Fix(
    summary="long prompts leave decoding requests a share of the wall time (opt-in)",
    symptom="while a prompt of 250,000 tokens is prefilling, everybody else gets a token a second",
    references=("https://github.com/vllm-project/vllm/issues/54919",),
    drop_when="vLLM can bound the share of time that long prefills take from decoding requests",
    environment={
        "VLLM_LONG_PREFILL_SHARE": "the share, above 0 and at most 1; unset or 1 is no limit",
        "VLLM_LONG_PREFILL_MIN_TOKENS": "tokens from which on a prompt is long; unset is 32768",
        "VLLM_LONG_PREFILL_SHARE_ASYNC": "1 for the limit under async scheduling too",
    },
    support={"vllm/v1/core/sched/gaudi_fix_long_prefill_share.py": "long_prefill_share.py"},
    relies_on=(
        f"{FILE}::Scheduler._update_after_schedule",
        f"{FILE}::Scheduler._preempt_request",
        "vllm/v1/core/sched/async_scheduler.py::AsyncScheduler",
        "vllm/v1/engine/core.py::EngineCore.step",
        "vllm/v1/engine/core.py::EngineCore.step_with_batch_queue",
    ),
)


@site(FILE, "Scheduler.__init__")
def open_the_account(code: Definition) -> None:
    """None where it is not asked for."""
    code.insert_first("from vllm.v1.core.sched import gaudi_fix_long_prefill_share")
    code.insert_last("self.long_prefills = gaudi_fix_long_prefill_share.for_scheduler(self)")


@site(FILE, "Scheduler.schedule")
def sit_out(code: Definition) -> None:
    """Skipped like a prefill that is deferred, or like a waiting request that is not ready."""
    code.insert_after(
        "if defer_prefills and request.is_prefill_chunk: ...",
        """
        if (
            request.is_prefill_chunk
            and self.long_prefills is not None
            and self.long_prefills.holds(request, self.running)
        ):
            req_index += 1
            continue
        """,
    )
    code.insert_after(
        "if request.num_stale_output_tokens > 0 and ...: ...",
        """
        if self.long_prefills is not None and self.long_prefills.holds(request, self.running):
            # Those behind it may go ahead.
            request_queue.pop_request()
            step_skipped_waiting.prepend_request(request)
            continue
        """,
    )
    # Before the requests are advanced: the last chunk must still be told from a decode.
    code.insert_before(
        "with record_function_or_nullcontext(...): self._update_after_schedule(scheduler_output)",
        """
        if self.long_prefills is not None:
            self.long_prefills.scheduled(scheduler_output)
        """,
    )


@site(FILE, "Scheduler.update_from_output")
def book_the_time(code: Definition) -> None:
    """A step is complete as its output comes in."""
    code.insert_first(
        """
        if self.long_prefills is not None:
            self.long_prefills.completed(scheduler_output)
        """
    )

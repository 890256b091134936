"""async-discard-counter: a frame that nobody waits for is dropped, not an error.

What a user sees: the engine dies for everybody with `AttributeError: 'Request' object has no
attribute 'discard_latest_async_tokens'`, under asynchronous scheduling (the default), after a
preemption under load or after the prefix cache was reset while requests were running.

Why: `HPUAsyncScheduler._update_request_with_output` drops a frame of tokens that arrives for a
request with no output placeholder, and takes back the flag by which vLLM's scheduler meant to drop
it. vLLM 0.26.0 has no such flag any more but a number of frames, `async_tokens_to_discard`: there
can be several in flight. Two ways lead there: `reset_prefix_cache(reset_running_requests=True)`
with a frame in flight, and a resumed request that was sampled in a chunk that is not its last one
(`resumed-prefill-logits`; on hybrid models nearly every preemption).

What is changed: that statement takes one from the number, if there is one. A frame dropped here is
then not dropped a second time: otherwise the base class would take the first good token after the
request resumes for it, and the request would wait for that one for ever.

Reference: vllm-gaudi #1691; vllm-gaudi #931 brought the override. Releases: v0.26.0 only. On
v0.30.0 it is repaired: the flag is read with a default, and vLLM #48245 put another mechanism in
the number's place (`num_stale_output_tokens`), drained by the base class.

Other places with the pattern: the flag is read nowhere else in vllm_gaudi, and nothing else
overrides a method that handles the number.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="a frame that nobody waits for is dropped and counted, not an error",
    symptom="AttributeError 'discard_latest_async_tokens' ends the engine after a preemption or a"
    " reset of the prefix cache",
    references=(
        "https://github.com/vllm-project/vllm-gaudi/pull/1691",
        "https://github.com/vllm-project/vllm/pull/48245",
    ),
    drop_when="the override reads discard_latest_async_tokens with a default and vLLM counts stale"
    " frames in num_stale_output_tokens, as from v0.30.0 on",
)


@site(
    "vllm_gaudi/v1/core/sched/hpu_async_scheduler.py",
    "HPUAsyncScheduler._update_request_with_output",
)
def count_the_dropped_frame(code: Definition) -> None:
    """Take one from the number where a flag was taken back."""
    code.replace_statement(
        "if request.discard_latest_async_tokens: ...",
        """
        if request.async_tokens_to_discard > 0:
            request.async_tokens_to_discard -= 1
        """,
    )

"""Requests put into a living runner's batch by hand, for tests of single methods of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def request(name: str, prompt: int, output: int, computed: int) -> Any:
    """A request with this many tokens of each kind; its ids are 0, 1, 2, ..."""
    from vllm.sampling_params import SamplingParams
    from vllm_gaudi.v1.worker.hpu_input_batch import CachedRequestState

    return CachedRequestState(
        req_id=name,
        prompt_token_ids=list(range(prompt)),
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0),
        generator=None,
        block_ids=[list(range(1, 9))],
        num_computed_tokens=computed,
        output_token_ids=list(range(prompt, prompt + output)),
    )


def fill(runner: Any, requests: Sequence[Any]) -> None:
    """These requests, in this order, instead of whatever the batch holds."""
    batch = runner.input_batch
    for name in list(batch.req_id_to_index):
        batch.condense([batch.remove_request(name)])
    runner.requests.clear()
    for one in requests:
        runner.requests[one.req_id] = one
        batch.add_request(one)
    batch.refresh_sampling_metadata()


def step(**scheduled: int) -> Any:
    """A scheduler's output for a step that computes so many tokens of each request."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = scheduled
    output.total_num_scheduled_tokens = sum(scheduled.values())
    return output

"""async-discard-counter on the real scheduler class and vLLM's real `Request`."""

from __future__ import annotations

import pytest

from tests.support import standin

pytestmark = pytest.mark.needs("torch", "vllm_gaudi")

MISSING = r"AttributeError: 'Request' object has no attribute 'discard_latest_async_tokens'"


class Cache:
    """Where the base class says which tokens are computed: those of a frame it took."""

    def __init__(self):
        self.computed = []

    def cache_blocks(self, request, num_computed_tokens):
        self.computed.append(num_computed_tokens)


@pytest.fixture
def scheduler():
    standin.install()
    from vllm_gaudi.v1.core.sched.hpu_async_scheduler import HPUAsyncScheduler

    bare = HPUAsyncScheduler.__new__(HPUAsyncScheduler)
    bare.max_model_len = 64
    bare.kv_cache_manager = Cache()
    return bare


def request(placeholders, to_discard):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    one = Request("a", [1, 2, 3], SamplingParams(max_tokens=8), None)
    one.status = RequestStatus.RUNNING
    one.num_computed_tokens = 3 + placeholders
    one.num_output_placeholders = placeholders
    one.async_tokens_to_discard = to_discard
    return one


def left(one):
    """Placeholders and frames still to be dropped."""
    return one.num_output_placeholders, one.async_tokens_to_discard


# --- the fault -----------------------------------------------------------------------------------


@pytest.mark.red(MISSING)
def test_a_frame_that_nobody_waits_for(scheduler):
    one = request(placeholders=0, to_discard=0)
    assert scheduler._update_request_with_output(one, [5]) == ([], False)
    assert left(one) == (0, 0)
    assert list(one.output_token_ids) == []


@pytest.mark.red(MISSING)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_each_dropped_frame_is_counted_once(scheduler, in_flight):
    """And never below zero: one frame more than were counted comes in."""
    one = request(placeholders=0, to_discard=in_flight)
    for dropped in range(1, in_flight + 2):
        assert scheduler._update_request_with_output(one, [5]) == ([], False)
        assert left(one) == (0, max(0, in_flight - dropped))
    assert list(one.output_token_ids) == []


@pytest.mark.red(MISSING)
def test_the_first_good_token_after_the_request_resumes_is_taken(scheduler):
    """Were the dropped frame not counted, the base class would drop this one in its place."""
    one = request(placeholders=0, to_discard=1)
    scheduler._update_request_with_output(one, [5])
    one.num_output_placeholders = 1
    assert scheduler._update_request_with_output(one, [6]) == ([6], False)
    assert left(one) == (0, 0)
    assert list(one.output_token_ids) == [6]


# --- neighbours ----------------------------------------------------------------------------------


def test_wanted_frames_pass(scheduler):
    one = request(placeholders=2, to_discard=0)
    assert scheduler._update_request_with_output(one, [5]) == ([5], False)
    assert scheduler._update_request_with_output(one, [6]) == ([6], False)
    assert left(one) == (0, 0)
    assert list(one.output_token_ids) == [5, 6]
    assert scheduler.kv_cache_manager.computed == [4, 5]


def test_the_base_class_drops_stale_frames_of_a_request_that_goes_on(scheduler):
    """Scheduled again before the frame in flight came back: the number is the base class's."""
    one = request(placeholders=1, to_discard=1)
    assert scheduler._update_request_with_output(one, [5]) == ([], False)
    assert left(one) == (1, 0)
    assert scheduler._update_request_with_output(one, [6]) == ([6], False)


def test_the_last_token_stops_the_request(scheduler):
    one = request(placeholders=1, to_discard=0)
    one.max_tokens = 1
    assert scheduler._update_request_with_output(one, [5]) == ([5], True)

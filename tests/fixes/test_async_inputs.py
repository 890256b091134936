"""async-inputs on the real runner: the ids of a decode step, and what is copied for them."""

from __future__ import annotations

import pytest

from tests.support import rows

pytestmark = [pytest.mark.needs("engine"), pytest.mark.level("class")]

OLD = -7  # what an older step left in the device's buffer
FRESH = [77, 78, 79, 80]  # what the previous step sampled, by its rows


@pytest.fixture(scope="module")
def living(engines):
    engine = engines(model="dense", asynchronous=True)
    engine.broken = True
    return engine.runner


@pytest.fixture
def runner(living):
    living.input_ids_hpu.fill_(OLD)
    return living


def decode(runner, names, previous):
    """The ids that a decode step of these requests is given.

    ``previous`` are the rows of the step before; None stands for one whose token was discarded.
    An id that the host knows is shown as such.
    """
    import torch

    known = range(100, 100 + len(names))
    requests = [rows.request(name, prompt=20, output=10, computed=29) for name in names]
    for one, token in zip(requests, known, strict=True):
        one.output_token_ids[-1] = token
    rows.fill(runner, requests)
    batch = runner.input_batch
    if previous is None:
        batch.prev_sampled_token_ids = batch.prev_req_id_to_index = None
    else:
        batch.prev_sampled_token_ids = torch.tensor(FRESH[: len(previous)], dtype=torch.int32)
        batch.prev_req_id_to_index = {
            name: row for row, name in enumerate(previous) if name is not None
        }
        batch.prev_sampled_token_ids_invalid_indices = {
            row for row, name in enumerate(previous) if name is None
        }
    output = rows.step(**dict.fromkeys(names, 1))
    _, (data, _) = runner._prepare_inputs(output, 0, len(names))
    ids = data.token_ids.flatten().tolist()[: len(names)]
    return ["known" if token == its else token for token, its in zip(ids, known, strict=True)]


# --- the fault -----------------------------------------------------------------------------------


@pytest.mark.red(r"\[77, -7\] == \[77, 'known'\]")
def test_one_request_was_not_in_the_previous_step(runner):
    """It resumed with one token left, or a step passed it over."""
    assert decode(runner, ["a", "b"], previous=["a"]) == [77, "known"]


@pytest.mark.red(r"\[-7, 77\] == \['known', 77\]")
def test_it_comes_first_in_the_batch(runner):
    assert decode(runner, ["b", "a"], previous=["a"]) == ["known", 77]


@pytest.mark.red(r"\[79, -7, 77, -7\] == \[79, 'known', 77, 'known'\]")
def test_several_among_others_that_changed_places(runner):
    answer = decode(runner, ["c", "x", "a", "y"], previous=["a", "b", "c"])
    assert answer == [79, "known", 77, "known"]


@pytest.mark.red(r"\[-7, -7\] == \['known', 'known'\]")
def test_first_return_no_previous_step(runner):
    assert decode(runner, ["a", "b"], previous=None) == ["known", "known"]


@pytest.mark.red(r"\[-7, -7\] == \['known', 'known'\]")
def test_second_return_nobody_was_in_the_previous_step(runner):
    assert decode(runner, ["a", "b"], previous=["c", "d"]) == ["known", "known"]


@pytest.mark.red(r"\[77, 78, -7\] == \[77, 78, 'known'\]")
def test_third_return_the_old_rows_unchanged_and_a_new_one(runner):
    assert decode(runner, ["a", "b", "c"], previous=["a", "b"]) == [77, 78, "known"]


@pytest.mark.red(r"\[77, -7\] == \[77, 'known'\]")
def test_the_token_of_the_previous_step_was_discarded(runner):
    """As after a chunk that was not the last one."""
    assert decode(runner, ["a", "b"], previous=["a", None]) == [77, "known"]


@pytest.mark.red(r"\[-7, 77\] == \['known', 77\]")
def test_an_older_step_does_not_shine_through(runner):
    """The buffer keeps what it was given: two steps, the second with a row of its own."""
    assert decode(runner, ["a", "b"], previous=["a", "b"]) == [77, 78]
    runner.input_ids_hpu.fill_(OLD)
    assert decode(runner, ["c", "a"], previous=["a", "b"]) == ["known", 77]


@pytest.mark.red(r"assert \(?\[-7|assert \[.*'known'")
def test_any_step_against_a_model(runner):
    """Random batches: each row has the previous step's token, or else the one that is known."""
    import random

    rng = random.Random(5)
    for _ in range(200):
        names = rng.sample("abcdefg", rng.randint(1, 4))
        previous = rng.sample("abcdefg", rng.randint(1, 4))
        previous = [name if rng.random() < 0.8 else None for name in previous]
        expected = [FRESH[previous.index(n)] if n in previous else "known" for n in names]
        assert decode(runner, names, previous) == expected


# --- what it costs -------------------------------------------------------------------------------


@pytest.fixture
def copies(runner, monkeypatch):
    """The sources of all copies from the host into the device's buffer of ids."""
    from vllm_gaudi.v1.worker import hpu_model_runner as module

    sources = []
    copy = module.async_h2d_copy

    def watched(source, dest_tensor=None, **options):
        if dest_tensor is not None and dest_tensor.data_ptr() == runner.input_ids_hpu.data_ptr():
            sources.append(source)
        return copy(source, dest_tensor, **options)

    monkeypatch.setattr(module, "async_h2d_copy", watched)
    return sources


@pytest.mark.red(r"assert 0 == 1")
def test_the_copy_reads_nothing_that_the_next_step_writes(runner, copies):
    """A copy to a card may be done later than the call returns."""
    decode(runner, ["a", "b"], previous=["a"])
    assert len(copies) == 1
    assert (
        copies[0].untyped_storage().data_ptr() != runner.input_ids_cpu.untyped_storage().data_ptr()
    )


@pytest.mark.parametrize("names", [["a", "b", "c"], ["c", "a"], ["b", "c"]])
def test_a_steady_step_copies_nothing(runner, copies, names):
    previous = ["a", "b", "c"]
    assert decode(runner, names, previous) == [FRESH[previous.index(name)] for name in names]
    assert copies == []


def test_synchronous_steps_do_not_use_the_buffer(runner, copies, monkeypatch):
    monkeypatch.setattr(runner, "use_async_scheduling", False)
    assert decode(runner, ["a", "b"], previous=None) == ["known", "known"]
    assert copies == []
    assert set(runner.input_ids_hpu.tolist()) == {OLD}

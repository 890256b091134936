"""sampling-rows-refresh on the real `InputBatch`: what the sampler is given after rows moved."""

from __future__ import annotations

import pytest

from tests.support import standin

pytestmark = pytest.mark.needs("torch", "vllm_gaudi")

VOCAB = 16


@pytest.fixture(scope="module")
def module():
    return standin.hpu_input_batch()


@pytest.fixture
def copies(module, monkeypatch):
    """The names of the module's own copies to the device, as they are made."""
    made = []
    for name in ("async_h2d_copy", "async_h2d_update"):
        stock = getattr(module, name)

        def counted(*args, name=name, stock=stock, **kwargs):
            made.append(name)
            return stock(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return made


@pytest.fixture
def batch(module):
    return standin.empty_batch(module, vocabulary=VOCAB)


def add(module, batch, req_id, prompt=(1, 2, 3), **params):
    from vllm.sampling_params import SamplingParams

    state = module.CachedRequestState(
        req_id=req_id,
        prompt_token_ids=list(prompt),
        mm_features=[],
        sampling_params=SamplingParams(**params),
        generator=None,
        block_ids=[[]],
        num_computed_tokens=0,
        output_token_ids=[],
    )
    batch.add_request(state)


def seen(batch, *req_ids, changed=False):
    """What the sampler gets for these requests, one dict a row."""
    metadata = batch.make_selective_sampling_metadata(
        [(req_id, []) for req_id in req_ids], skip_copy=not changed
    )
    named = {
        "temperature": metadata.temperature,
        "top_p": metadata.top_p,
        "top_k": metadata.top_k,
        "frequency_penalty": metadata.frequency_penalties,
        "presence_penalty": metadata.presence_penalties,
        "repetition_penalty": metadata.repetition_penalties,
    }
    rows = [
        {key: round(float(values[row]), 4) for key, values in named.items() if values is not None}
        for row in range(len(req_ids))
    ]
    for row, result in enumerate(rows):
        if metadata.prompt_token_ids is not None:
            result["prompt"] = [id for id in metadata.prompt_token_ids[row].tolist() if id < VOCAB]
        if metadata.allowed_token_ids_mask is not None:
            mask = metadata.allowed_token_ids_mask[row]
            result["allowed"] = (~mask).nonzero().flatten().tolist()
    return rows


COLD = {
    "temperature": 0.1,
    "top_p": 0.2,
    "top_k": 3,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.25,
    "repetition_penalty": 1.5,
}
HOT = {
    "temperature": 0.9,
    "top_p": 0.8,
    "top_k": 7,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def two(module, batch):
    """Two requests in a batch that was refreshed, as `_update_states` does."""
    add(module, batch, "cold", prompt=(10, 11, 12, 13), **COLD)
    add(module, batch, "hot", prompt=(4, 5), **HOT)
    batch.refresh_sampling_metadata()
    return {**COLD, "prompt": [10, 11, 12, 13]}, {**HOT, "prompt": [4, 5]}


# --- the fault -----------------------------------------------------------------------------------


@pytest.mark.red(r"AssertionError: assert \[\{'temperature': 0\.9.*== \[\{'temperature': 0\.1")
def test_swap_in_a_step_without_other_changes(module, batch):
    cold, hot = two(module, batch)
    batch.swap_states(0, 1)
    assert seen(batch, "cold", "hot") == [cold, hot]


@pytest.mark.red(r"AssertionError: assert \[\{'temperature': 0\.9.*== \[\{'temperature': 0\.1")
def test_row_that_is_not_sampled_in_the_step_of_the_swap(module, batch):
    """A prompt's chunk moves; the prompt is sampled some quiet steps later."""
    cold, hot = two(module, batch)
    batch.swap_states(0, 1)
    assert seen(batch, "hot", changed=True) == [hot]
    assert seen(batch, "hot") == [hot]
    assert seen(batch, "cold") == [cold]


@pytest.mark.red(r"assert \[\[6\], \[6\]\] == \[\[5\], \[6\]\]")
def test_allowed_token_masks_are_exchanged(module, batch):
    add(module, batch, "r0", allowed_token_ids=[5])
    add(module, batch, "r1", allowed_token_ids=[6])
    batch.refresh_sampling_metadata()
    batch.swap_states(0, 1)
    assert [row["allowed"] for row in seen(batch, "r0", "r1")] == [[5], [6]]


@pytest.mark.red(r"assert \[\[6\], \[6\]\] == \[\[0, 1, .*, 15\], \[6\]\]")
def test_mask_of_a_request_without_one(module, batch):
    """Not allowed is True in the mask; a row without a list is all False."""
    add(module, batch, "free")
    add(module, batch, "bound", allowed_token_ids=[6])
    batch.refresh_sampling_metadata()
    batch.swap_states(0, 1)
    assert [r["allowed"] for r in seen(batch, "free", "bound")] == [list(range(VOCAB)), [6]]


@pytest.mark.red(r"assert \[\[6\], \[6\]\] == \[\[6\], \[0, 1, .*, 15\]\]")
def test_condense_leaves_no_mask_behind(module, batch):
    """The next request in the row that was emptied has no list."""
    add(module, batch, "first")
    add(module, batch, "bound", allowed_token_ids=[6])
    batch.condense([batch.remove_request("first")])
    add(module, batch, "free")
    batch.refresh_sampling_metadata()
    assert [r["allowed"] for r in seen(batch, "bound", "free")] == [[6], list(range(VOCAB))]


@pytest.mark.red(r"assert \['async_h2d_update'\] == \[\]")
def test_quiet_step_copies_no_mask(module, batch, copies):
    add(module, batch, "r0", allowed_token_ids=[5])
    add(module, batch, "r1", allowed_token_ids=[6])
    batch.refresh_sampling_metadata()
    copies.clear()
    assert [row["allowed"] for row in seen(batch, "r0", "r1")] == [[5], [6]]
    assert copies == []


@pytest.mark.red(r"moved to the device in a quiet step")
def test_quiet_step_moves_no_prompt_tokens(module, batch, monkeypatch):
    """Penalties look at the prompt's tokens: those on the device are right until a row moves."""
    import torch

    two(module, batch)

    def moved(*_args, **_kwargs):
        raise AssertionError("moved to the device in a quiet step")

    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch.Tensor, "copy_", moved)
    metadata = batch.make_selective_sampling_metadata([("hot", []), ("cold", [])], skip_copy=True)
    monkeypatch.undo()
    assert metadata.prompt_token_ids.tolist() == [[4, 5, VOCAB, VOCAB], [10, 11, 12, 13]]


# --- neighbours ----------------------------------------------------------------------------------


def test_quiet_step_copies_nothing(module, batch, copies):
    cold, hot = two(module, batch)
    copies.clear()
    for _ in range(3):
        assert seen(batch, "cold", "hot") == [cold, hot]
        assert seen(batch, "hot") == [hot]
    assert copies == []


@pytest.mark.red(r"assert 0 == 6")
def test_many_swaps_refresh_once(module, batch, copies):
    """All rows of the six parameters in use, whatever the number of swaps and of sampling calls."""
    two(module, batch)
    add(module, batch, "third")
    batch.refresh_sampling_metadata()
    copies.clear()
    for pair in ((0, 1), (1, 2), (0, 2), (0, 1)):
        batch.swap_states(*pair)
    assert copies == []
    for _ in range(2):
        seen(batch, "third")
        seen(batch, "cold", "hot")
    assert len(copies) == 6


def test_swap_before_the_refresh_is_covered_by_it(module, batch, copies):
    cold, hot = two(module, batch)
    batch.swap_states(0, 1)
    batch.refresh_sampling_metadata()
    copies.clear()
    assert seen(batch, "cold", "hot") == [cold, hot]
    assert copies == []


def test_greedy_batch_refreshes_nothing_that_nobody_reads(module, batch, copies):
    add(module, batch, "r0", temperature=0.0)
    add(module, batch, "r1", temperature=0.0)
    batch.refresh_sampling_metadata()
    batch.swap_states(0, 1)
    copies.clear()
    metadata = batch.make_selective_sampling_metadata([("r0", []), ("r1", [])], skip_copy=True)
    assert metadata.all_greedy
    assert copies == []


def test_pooling_batch_swaps_as_before(module):
    """`swap_states` leaves early for pooling models."""
    batch = standin.empty_batch(module, vocabulary=VOCAB, rows=4, is_pooling_model=True)
    add(module, batch, "r0")
    add(module, batch, "r1")
    batch.swap_states(0, 1)
    assert batch.req_ids == ["r1", "r0"]
    assert batch.req_id_to_index == {"r0": 1, "r1": 0}

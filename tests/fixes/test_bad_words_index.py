"""bad-words-index on the real `InputBatch` and vLLM's real sampler op.

The op is called as the runner calls it: once per prefill batch and once for the padded decode
batch, on the rows of just those requests.
"""

from __future__ import annotations

import pytest

from tests.support import standin

pytestmark = pytest.mark.needs("torch", "vllm_gaudi")

VOCAB = 16
NO_WORDS: list[list[int]] = []


@pytest.fixture(scope="module")
def module():
    return standin.hpu_input_batch()


@pytest.fixture
def batch(module):
    return standin.empty_batch(module, vocabulary=VOCAB)


def add(module, batch, req_id, words, outputs=()):
    """Add a request whose bad words are these token ids (the front end fills them in from text)."""
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0)
    params._bad_words_token_ids = words or None
    state = module.CachedRequestState(
        req_id=req_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=params,
        generator=None,
        block_ids=[[]],
        num_computed_tokens=0,
        output_token_ids=list(outputs),
    )
    batch.add_request(state)
    return state


def rows_for(states, pad_to=None):
    """The rows of a sampling call, (request, outputs) each; padding repeats row 0."""
    rows = [(state.req_id, state.output_token_ids) for state in states]
    while pad_to is not None and len(rows) < pad_to:
        rows.append(rows[0])
    return rows


def banned(batch, rows, num_logits=None):
    """For each logits row of this sampling call, the token ids that vLLM's sampler op bans."""
    import torch
    from vllm.v1.sample.ops.bad_words import apply_bad_words

    metadata = batch.make_selective_sampling_metadata(rows)
    logits = torch.zeros(num_logits or len(rows), VOCAB)
    apply_bad_words(logits, metadata.bad_words_token_ids, metadata.output_token_ids)
    return [row.isinf().nonzero().flatten().tolist() for row in logits]


# --- the fault -----------------------------------------------------------------------------------


@pytest.mark.red(r"IndexError: index 1 is out of bounds for dimension 0 with size 1")
def test_second_request_sampled_alone(module, batch):
    add(module, batch, "r0", NO_WORDS)
    second = add(module, batch, "r1", [[7]])
    assert banned(batch, rows_for([second])) == [[7]]


@pytest.mark.red(r"\[\[7\], \[\]\] == \[\[\], \[7\]\]")
def test_rows_in_another_order_than_the_batch(module, batch):
    first = add(module, batch, "r0", NO_WORDS)
    second = add(module, batch, "r1", [[7]])
    add(module, batch, "r2", NO_WORDS)
    # Prompts first, then decodes: not the order of the batch.
    batch.swap_states(0, 1)
    assert banned(batch, rows_for([first, second])) == [[], [7]]


@pytest.mark.red(r"\[\[7\]\] == \[\[\]\]")
def test_request_outside_the_call_bans_nothing(module, batch):
    add(module, batch, "r0", [[7]])
    second = add(module, batch, "r1", NO_WORDS)
    assert banned(batch, rows_for([second])) == [[]]


@pytest.mark.red(r"\[\[7\], \[8\]\] == \[\[8\], \[7\]\]")
def test_each_row_has_its_own_words(module, batch):
    first = add(module, batch, "r0", [[7]])
    second = add(module, batch, "r1", [[8]])
    assert banned(batch, rows_for([second, first])) == [[8], [7]]


@pytest.mark.red(r"\[\[\], \[\]\] == \[\[7\], \[7\]\]")
def test_word_of_several_tokens_is_looked_up_in_its_own_output(module, batch):
    """On stock the op reads the history of whatever request sits in that row."""
    first = add(module, batch, "r0", [[5, 7]], outputs=[4, 5])
    second = add(module, batch, "r1", [[9, 7]], outputs=[4, 9])
    assert banned(batch, rows_for([second, first])) == [[7], [7]]


@pytest.mark.red(r"\[\[\], \[7\], \[\], \[\]\] == \[\[7\], \[\], \[\], \[\]\]")
def test_padding_rows_have_no_words(module, batch):
    """The padding of a decode bucket repeats row 0; nobody reads what those rows sample."""
    add(module, batch, "prefill", NO_WORDS)
    second = add(module, batch, "r1", [[7]])
    third = add(module, batch, "r2", NO_WORDS)
    assert banned(batch, rows_for([second, third], pad_to=4)) == [[7], [], [], []]


@pytest.mark.red(r"IndexError: index 2 is out of bounds for dimension 0 with size 2")
def test_more_rows_than_logits(module, batch):
    """Speculative call: rows for every drafted token, logits for the bonus tokens only."""
    add(module, batch, "prefill", NO_WORDS)
    first = add(module, batch, "r1", [[7]])
    second = add(module, batch, "r2", [[8]])
    assert banned(batch, rows_for([first, second], pad_to=6), num_logits=2) == [[7], [8]]


@pytest.mark.red(r"IndexError: index 2 is out of bounds for dimension 0 with size 1")
def test_after_a_request_has_left_and_the_batch_has_closed_up(module, batch):
    first = add(module, batch, "r0", NO_WORDS)
    add(module, batch, "r1", NO_WORDS)
    third = add(module, batch, "r2", [[7]])
    assert batch.remove_request("r1") == 1
    batch.condense([1])
    batch.swap_states(0, 1)
    add(module, batch, "r3", NO_WORDS)
    fifth = add(module, batch, "r4", [[8]])
    assert batch.req_id_to_index[fifth.req_id] == 3
    batch.swap_states(2, 3)
    assert banned(batch, rows_for([fifth])) == [[8]]
    assert banned(batch, rows_for([third, first])) == [[7], []]


@pytest.mark.red(r"IndexError: index 3 is out of bounds for dimension 0 with size 1")
def test_through_the_sampler_itself(module, batch):
    """The whole sampler: the greedy choice of a request avoids its own words and only those."""
    import torch
    from vllm.v1.sample.sampler import Sampler

    states = [add(module, batch, f"r{i}", NO_WORDS) for i in range(3)]
    states.append(add(module, batch, "r3", [[11]]))
    logits = torch.zeros(1, VOCAB)
    logits[0, 11], logits[0, 12] = 3.0, 2.0

    def chosen(state):
        metadata = batch.make_selective_sampling_metadata(rows_for([state]))
        return Sampler()(logits=logits.clone(), sampling_metadata=metadata).sampled_token_ids.item()

    assert [chosen(state) for state in reversed(states)] == [12, 11, 11, 11]


@pytest.mark.red(r"IndexError|assert \[\[")
def test_any_batch_and_any_call_against_a_model(module, batch):
    """Random batches, orders, subsets and paddings: each row as if its request were alone."""
    import random

    rng = random.Random(20)
    states: dict[str, tuple[object, list[list[int]]]] = {}
    serial = 0
    for _ in range(300):
        if len(states) < 8 and rng.random() < 0.5:
            word = [rng.randrange(VOCAB)]
            words = rng.choice([NO_WORDS, [word], [[2, 3], word]])
            name = f"r{serial}"
            states[name] = (add(module, batch, name, words, rng.choice([[], [1, 2]])), words)
            serial += 1
        elif len(states) > 1 and rng.random() < 0.4:
            name = rng.choice(list(states))
            del states[name]
            batch.condense([batch.remove_request(name)])
        elif len(states) > 1:
            batch.swap_states(*rng.sample(range(len(states)), 2))
        if not states:
            continue
        called = rng.sample(list(states), rng.randint(1, len(states)))
        num_rows = len(called) + rng.randint(0, 3)
        expected = []
        for name in called:
            state, words = states[name]
            history = state.output_token_ids
            tokens = {w[-1] for w in words if len(w) == 1 or history[1 - len(w) :] == w[:-1]}
            expected.append(sorted(tokens))
        expected += [[]] * (num_rows - len(called))
        rows = rows_for([states[name][0] for name in called], pad_to=num_rows)
        assert banned(batch, rows) == expected


# --- neighbours ----------------------------------------------------------------------------------


def test_whole_batch_in_batch_order_is_as_before(module, batch):
    states = [add(module, batch, f"r{i}", [[i + 4]] if i % 2 else NO_WORDS) for i in range(4)]
    assert banned(batch, rows_for(states)) == [[], [5], [], [7]]


def test_first_row_alone(module, batch):
    first = add(module, batch, "r0", [[7], [9]])
    assert banned(batch, rows_for([first])) == [[7, 9]]


def test_no_bad_words_gives_an_empty_dict(module, batch):
    """Falsy: the sampler then skips the op."""
    states = [add(module, batch, f"r{i}", NO_WORDS) for i in range(3)]
    metadata = batch.make_selective_sampling_metadata(rows_for(states[1:], pad_to=4))
    assert metadata.bad_words_token_ids == {}


def test_metadata_of_the_whole_batch_keeps_its_dict(module, batch):
    """There the rows are the batch, so that dict is right as it is (and stays the live one)."""
    add(module, batch, "r0", NO_WORDS)
    add(module, batch, "r1", [[7]])
    batch.refresh_sampling_metadata()
    assert batch.sampling_metadata.bad_words_token_ids is batch.bad_words_token_ids
    assert batch.bad_words_token_ids == {1: [[7]]}


def test_other_metadata_is_untouched(module, batch):
    """Same rows, same temperatures, same histories: only the words are re-indexed."""
    states = [add(module, batch, f"r{i}", [[i + 4]], outputs=[i]) for i in range(3)]
    metadata = batch.make_selective_sampling_metadata(rows_for(states[1:], pad_to=4))
    assert metadata.output_token_ids == [[1], [2], [1], [1]]
    assert metadata.temperature.shape == (4,)
    assert metadata.generators == {}
    assert batch.bad_words_token_ids == {0: [[4]], 1: [[5]], 2: [[6]]}


@pytest.mark.parametrize("outputs", [[], [-1, -1]], ids=["v0.26.0", "v0.30.0"])
def test_known_limit_words_of_several_tokens_under_async_scheduling(module, batch, outputs):
    """Under async scheduling the runner has no ids in the history (none at all, or placeholders).

    The last token of a word of several tokens is then not banned. This pins what happens; the fix's
    docstring says so to the user.
    """
    first = add(module, batch, "r0", [[5, 7], [8]], outputs=outputs)
    assert banned(batch, rows_for([first])) == [[8]]

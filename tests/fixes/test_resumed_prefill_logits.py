"""resumed-prefill-logits on the real runner: which positions of a step get a logits row."""

from __future__ import annotations

import pytest

from tests.support import rows

pytestmark = [pytest.mark.needs("engine"), pytest.mark.level("class")]

PROMPT, OUTPUT = 40, 30
KNOWN = PROMPT + OUTPUT


@pytest.fixture(scope="module")
def living(engines):
    engine = engines(model="dense")
    engine.broken = True
    return engine.runner


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def runner(living, request, monkeypatch):
    monkeypatch.setattr(living, "use_async_scheduling", request.param)
    monkeypatch.setattr(living, "use_structured_output", False, raising=False)
    monkeypatch.setattr(living, "invalid_req_indices", [], raising=False)
    return living


def resumed(computed, name="r"):
    return rows.request(name, PROMPT, OUTPUT, computed)


def logits(runner, *requests):
    """The positions with a logits row of each request, and the names of those discarded.

    A request comes as (request, tokens of this step); prompts only, as after the decodes.
    """
    rows.fill(runner, [one for one, _ in requests])
    scheduled = [tokens for _, tokens in requests]
    contents, _ = runner._extract_prefill_batch_contents(len(requests), 0, scheduled)
    positions = {}
    for batch in contents:
        positions.update(zip(batch.req_ids, batch.logits_positions, strict=True))
    discarded = [runner.input_batch.req_ids[row] for row in runner.invalid_req_indices]
    return positions, discarded


def nothing_sampled(runner, tokens):
    """What a chunk has that is not the last: no row, or one of which the token is discarded."""
    if runner.use_async_scheduling:
        return {"r": [tokens - 1]}, ["r"]
    return {"r": []}, []


def arrange(runner, output):
    """Put the rows of a step in place as `sample_tokens` does."""
    from vllm_gaudi.v1.worker.hpu_model_runner import ensure_multi_token_decodes_last

    runner._ensure_decodes_first(output)
    ensure_multi_token_decodes_last(runner.input_batch, output.num_scheduled_tokens)


# --- the fault -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hit", [1, 16, 32, 39, 40, 41, 64, 68])
@pytest.mark.red(r"\[\d+, \d+")
def test_last_chunk_has_one_row_whatever_the_hit(runner, hit):
    tokens = KNOWN - hit
    assert logits(runner, (resumed(hit), tokens)) == ({"r": [tokens - 1]}, [])


@pytest.mark.parametrize(
    ("hit", "tokens"), [(32, 8), (32, 16), (16, 53), (40, 1), (40, 5), (64, 5), (1, 68)]
)
@pytest.mark.red(r"assert \(\{'r': \[.*\]\}, \[\]\) == ")
def test_earlier_chunk_samples_nothing(runner, hit, tokens):
    """The chunk ends at the end of the prompt, or in the request's own output."""
    assert logits(runner, (resumed(hit), tokens)) == nothing_sampled(runner, tokens)


@pytest.mark.red(r"AssertionError: \(1, 39\)")  # from the end of the bare prompt on
def test_every_way_to_cut_a_resumed_request(runner):
    """All hits and chunks: one row in the last chunk, nothing sampled in an earlier one."""
    for hit in range(1, KNOWN):
        for tokens in range(1, KNOWN - hit + 1):
            runner.invalid_req_indices = []
            last = ({"r": [tokens - 1]}, [])
            expected = last if hit + tokens == KNOWN else nothing_sampled(runner, tokens)
            assert logits(runner, (resumed(hit), tokens)) == expected, (hit, tokens)


@pytest.mark.red(r"\[\d+, \d+")
def test_several_resumed_requests_and_no_row_of_others_shifts(runner):
    positions, discarded = logits(
        runner,
        (rows.request("new", PROMPT, 0, 0), PROMPT),
        (resumed(32, "hit"), 38),
        (rows.request("chunk", PROMPT, 0, 16), 8),
        (resumed(64, "long hit"), 6),
    )
    chunk = [7] if runner.use_async_scheduling else []
    assert positions == {"new": [39], "hit": [37], "chunk": chunk, "long hit": [5]}
    assert discarded == (["chunk"] if runner.use_async_scheduling else [])
    assert list(positions) == runner.input_batch.req_ids  # rows are sampled in the batch's order


@pytest.mark.red(r"assert \['a', 'r'\] == \['a'\]")
@pytest.mark.parametrize("computed", [PROMPT, 55, KNOWN - 2])
def test_one_token_with_more_to_come_is_no_decode(runner, computed):
    rows.fill(runner, [rows.request("a", PROMPT, 3, PROMPT + 2), resumed(computed)])
    found = runner._get_prompts_and_decodes(rows.step(a=1, r=1))
    assert found.decode_req_ids == ["a"]
    assert found.prompt_req_ids == ["r"]


@pytest.mark.red(r"assert \['a', 'r'\] == \['a'\]")
@pytest.mark.parametrize("last", ["r", "many"])
def test_it_keeps_its_place_among_the_prompts(runner, last):
    """The other one takes several tokens: prompts run in the order of their rows."""
    resumed_ones = [resumed(50, "many"), resumed(55)]
    decode = rows.request("a", PROMPT, 3, PROMPT + 2)
    order = [decode, *sorted(resumed_ones, key=lambda one: one.req_id == last)]
    rows.fill(runner, order)
    output = rows.step(**{one.req_id: 5 if one.req_id == "many" else 1 for one in order})
    arrange(runner, output)
    found = runner._get_prompts_and_decodes(output)
    assert found.decode_req_ids == ["a"]
    assert found.prompt_req_ids == [one.req_id for one in order[1:]]


# --- neighbours ----------------------------------------------------------------------------------


def test_resumed_without_a_hit(runner):
    """The row's prompt then counts the output too: stock is right."""
    assert logits(runner, (resumed(0), KNOWN)) == ({"r": [KNOWN - 1]}, [])


@pytest.mark.parametrize(("computed", "tokens"), [(0, 16), (16, 16), (0, PROMPT - 1)])
def test_chunk_of_a_new_prompt(runner, computed, tokens):
    new = rows.request("r", PROMPT, 0, computed)
    assert logits(runner, (new, tokens)) == nothing_sampled(runner, tokens)


@pytest.mark.parametrize("computed", [0, 1, 16, PROMPT - 1])
def test_end_of_a_new_prompt(runner, computed):
    new = rows.request("r", PROMPT, 0, computed)
    tokens = PROMPT - computed
    assert logits(runner, (new, tokens)) == ({"r": [tokens - 1]}, [])


def test_the_last_known_token_alone_is_a_decode(runner):
    rows.fill(runner, [resumed(KNOWN - 1), rows.request("new", PROMPT, 0, 0)])
    found = runner._get_prompts_and_decodes(rows.step(r=1, new=PROMPT))
    assert (found.decode_req_ids, found.prompt_req_ids) == (["r"], ["new"])


def test_the_batch_still_says_where_the_prompt_ends(runner):
    """Penalties and prompt logprobs read it."""
    rows.fill(runner, [resumed(32)])
    assert runner.input_batch.num_prompt_tokens[0] == PROMPT
    contents, _ = runner._extract_prefill_batch_contents(1, 0, [38])
    assert [batch.prompt_lens for batch in contents if batch.req_ids] == [[PROMPT]]

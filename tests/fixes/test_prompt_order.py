"""prompt-order on the runner's real methods and the real `InputBatch`."""

from __future__ import annotations

import random

import pytest

from tests.support import bare_runner

pytestmark = [pytest.mark.needs("engine"), pytest.mark.level("class")]

BLOCK = 4


@pytest.fixture
def runner():
    return bare_runner.runner(block_size=BLOCK)


@pytest.fixture
def swaps(runner, monkeypatch):
    """The pairs of rows that are exchanged, as they are."""
    made = []
    stock = type(runner.input_batch).swap_states

    def counted(batch, first, second):
        made.append((first, second))
        stock(batch, first, second)

    monkeypatch.setattr(type(runner.input_batch), "swap_states", counted)
    return made


def add(runner, req_id, prompt, computed, *, outputs=0, blocks=None, row=None, temperature=0.0):
    """A request of this many prompt tokens, computed tokens and output tokens."""
    from vllm.sampling_params import SamplingParams
    from vllm_gaudi.v1.worker.hpu_input_batch import CachedRequestState

    if blocks is None:
        blocks = [1000 + len(runner.requests) * 100 + n for n in range(16)]
    state = runner.requests[req_id] = CachedRequestState(
        req_id=req_id,
        prompt_token_ids=list(range(prompt)),
        mm_features=[],
        sampling_params=SamplingParams(temperature=temperature),
        generator=None,
        block_ids=[blocks],
        num_computed_tokens=computed,
        output_token_ids=list(range(outputs)),
    )
    runner.input_batch.add_request(state, row)


def arranged(runner, **scheduled):
    """(decodes, prompts) of a step, in the order in which they run."""
    info = bare_runner.arrange(runner, bare_runner.step(scheduled))
    assert runner.input_batch.req_ids == info.decode_req_ids + info.prompt_req_ids
    return info.decode_req_ids, info.prompt_req_ids


# --- prompts among themselves --------------------------------------------------------------------


@pytest.mark.red(r"\['B', 'A'\]\) == \(\['D'\], \['A', 'B'\]\)")
def test_exchange_with_a_decode_turns_prompts_around(runner):
    """A and B took the rows of two that ended, in front of a decode."""
    add(runner, "A", 40, 0)
    add(runner, "B", 48, 40)
    add(runner, "D", 8, 8, outputs=1)
    assert arranged(runner, D=1, A=40, B=8) == (["D"], ["A", "B"])


@pytest.mark.red(r"\['B', 'A'\]\) == \(\['D1'\], \['A', 'B'\]\)")
def test_new_request_in_the_row_of_one_that_ended(runner):
    add(runner, "D0", 8, 8, outputs=1)
    add(runner, "D1", 8, 8, outputs=1)
    add(runner, "A", 40, 16)
    assert runner.input_batch.remove_request("D0") == 0
    add(runner, "B", 32, 24, row=0)
    assert arranged(runner, D1=1, A=8, B=8) == (["D1"], ["A", "B"])


@pytest.mark.red(r"\['B', 'A'\]\) == \(\['D'\], \['A', 'B'\]\)")
def test_new_request_in_front_without_any_exchange(runner, swaps):
    add(runner, "D", 8, 8, outputs=1)
    add(runner, "B", 32, 24)
    add(runner, "A", 40, 16)
    assert arranged(runner, D=1, A=8, B=8) == (["D"], ["A", "B"])
    assert swaps == [(1, 2)]


@pytest.mark.red(r"\['C', 'A', 'B'\]\) == \(\[\], \['A', 'B', 'C'\]\)")
def test_condense_moves_the_last_row_to_the_front(runner):
    add(runner, "X", 8, 8, outputs=1)
    add(runner, "A", 40, 16)
    add(runner, "B", 32, 24)
    add(runner, "C", 36, 32)
    runner.input_batch.condense([runner.input_batch.remove_request("X")])
    assert arranged(runner, A=8, B=8, C=4) == ([], ["A", "B", "C"])


def test_nothing_out_of_order_swaps_nothing(runner, swaps):
    add(runner, "D0", 8, 8, outputs=1)
    add(runner, "D1", 8, 8, outputs=1)
    add(runner, "A", 40, 16)
    add(runner, "B", 32, 24)
    assert arranged(runner, D0=1, D1=1, A=8, B=8) == (["D0", "D1"], ["A", "B"])
    assert swaps == []


def test_step_of_decodes_swaps_nothing(runner, swaps):
    add(runner, "D0", 8, 8, outputs=1)
    add(runner, "D1", 8, 8, outputs=1)
    assert arranged(runner, D1=1, D0=1) == (["D0", "D1"], [])
    assert swaps == []


def test_swapped_prompts_keep_their_sampling_parameters(runner):
    """`sampling-rows-refresh` sees the rows that this fix moves; on stock none is moved."""
    add(runner, "D", 8, 8, outputs=1, temperature=0.25)
    add(runner, "B", 32, 24, temperature=0.5)
    add(runner, "A", 40, 16, temperature=1.5)
    runner.input_batch.refresh_sampling_metadata()
    arranged(runner, D=1, A=8, B=8)
    metadata = runner._prepare_sampling(False, ["A", "D", "B"])
    assert metadata.temperature.tolist() == [1.5, 0.25, 0.5]


@pytest.mark.red(r"prompts ran as")
def test_any_batch_runs_its_prompts_as_they_were_granted(runner):
    """Random batches; a decode that caught up with several tokens counts as a prompt."""
    rng = random.Random(5)
    for _ in range(200):
        names = [f"r{n}" for n in range(rng.randint(1, 8))]
        scheduled, decodes = {}, []
        for name in rng.sample(names, len(names)):
            kind = rng.choice(["decode", "chunk", "catch-up"])
            scheduled[name] = 1 if kind == "decode" else rng.randint(2, 8)
            if kind == "decode":
                decodes.append(name)
            computed = rng.randint(0, 7) if kind == "chunk" else 8
            add(runner, name, 8, computed, outputs=8 if kind == "catch-up" else 1)
        granted = [name for name in scheduled if name not in decodes]
        ran_decodes, ran = arranged(runner, **scheduled)
        assert sorted(ran_decodes) == sorted(decodes)
        assert ran == granted, f"prompts ran as {ran}, granted as {granted}"
        for name in names:
            runner.input_batch.remove_request(name)
        runner.requests.clear()
        runner.input_batch.condense(list(reversed(range(len(names)))))


# --- a decode that fills the block ---------------------------------------------------------------


@pytest.mark.red(r"\(\['A', 'D'\], \['B'\]\) == \(\['D'\], \['A', 'B'\]\)")
def test_decode_that_fills_a_block_runs_before_the_prompt_that_reads_it(runner):
    add(runner, "A", 5, 7, outputs=3, blocks=[21, 22, 23])  # computes the last slot of block 22
    add(runner, "D", 5, 7, outputs=3, blocks=[31, 32, 33])
    add(runner, "B", 12, 8, blocks=[21, 22, 24])
    assert arranged(runner, A=1, D=1, B=4) == (["D"], ["A", "B"])


@pytest.mark.red(r"\(\['A', 'D'\], \['B', 'C'\]\) == \(\[\], \['D', 'A', 'B', 'C'\]\)")
def test_two_such_decodes(runner):
    add(runner, "A", 5, 7, outputs=3, blocks=[21, 22, 23])
    add(runner, "D", 5, 7, outputs=3, blocks=[31, 32, 33])
    add(runner, "B", 12, 8, blocks=[21, 22, 24])
    add(runner, "C", 12, 8, blocks=[31, 32, 34])
    assert arranged(runner, D=1, A=1, B=4, C=4) == ([], ["D", "A", "B", "C"])


@pytest.mark.red(r"assert \[\] == \[0\]")
def test_such_a_decode_gives_its_row_of_logits(runner):
    """One row, from its one token, which sits at the place that the decode would have had."""
    runner._get_attention_group_id_for_hybrid = lambda: 0
    vars(runner).update(
        attn_block_size=BLOCK,
        use_structured_output=False,
        max_prefill_batch_size=1,
        _resolve_block=lambda block: block,
        _can_merge_prefill_contents=lambda *_: False,
        get_dp_padding=lambda _: 0,
    )
    add(runner, "A", 5, 7, outputs=3, blocks=[21, 22, 23])
    add(runner, "B", 12, 8, blocks=[21, 22, 24])
    decodes, prompts = arranged(runner, A=1, B=4)
    batches, _ = runner._extract_prefill_batch_contents(len(prompts), len(decodes), [1, 4])
    by_request = {b.req_ids[0]: b for b in batches if b.req_ids}
    assert [n for b in [by_request.get("A")] if b for n in b.logits_positions[0]] == [0]
    assert by_request["A"].token_ids == [[2]]
    assert by_request["A"].context_lens == [7]
    # From the next step on it is a decode as before.
    runner.input_batch.remove_request("B")
    runner.input_batch.condense([runner.input_batch.req_ids.index(None)])
    runner.input_batch.num_computed_tokens_cpu[0] = 8
    assert arranged(runner, A=1) == (["A"], [])


def test_decode_that_shares_only_written_blocks_stays_one(runner):
    add(runner, "A", 5, 8, outputs=4, blocks=[21, 22, 23])
    add(runner, "B", 12, 8, blocks=[21, 22, 24])
    assert arranged(runner, A=1, B=4) == (["A"], ["B"])


@pytest.mark.parametrize("reason", ["drafts", "decoder", "recurrent"])
def test_known_limit_decodes_that_stay_where_they_are(runner, reason):
    """Drafted tokens, the decoding side of disaggregated prefill, recurrent layers."""
    add(runner, "A", 5, 7, outputs=3, blocks=[21, 22, 23])
    add(runner, "B", 12, 8, blocks=[21, 22, 24])
    scheduled, fields = {"A": 1, "B": 4}, {}
    if reason == "drafts":
        runner.vllm_config.speculative_config = object()
        scheduled["A"], fields = 3, {"scheduled_spec_decode_tokens": {"A": [1, 2]}}
    elif reason == "decoder":
        runner.input_batch.req_type["A"] = "decode"
    else:
        runner.num_mamba_like_layers = 3
    info = bare_runner.arrange(runner, bare_runner.step(scheduled, **fields))
    assert (info.decode_req_ids, info.prompt_req_ids) == (["A"], ["B"])

"""logprobs-decode-guard on real (tiny) fast tokenizers and vLLM's real logprobs processor."""

from __future__ import annotations

import pytest

from tests.support import standin

pytestmark = pytest.mark.needs("torch")

# What a wrapped or torn 64-bit value looks like when it arrives as an id.
NOT_IDS = [-1, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63)]
# A row of the padded output layer: the model can rank it, the tokenizer has no text for it.
PADDED_ID = 900
OVERFLOW = r"OverflowError: out of range integral type conversion attempted"
NO_PIECE = r"TypeError: 'NoneType' object is not iterable"

# "你" is three byte pieces; ids 20 and up leave a hole behind 10.
VOCAB = ["a", "b", "<unk>", "你", "<0xE4>", "<0xBD>", "<0xA0>", "c", "▁a", "▁▁b", "▁"]
LATE_ID = 20
A, B, HAN, E4, BD, A0, C, SP_A, SP_SP_B, SP = 0, 1, 3, 4, 5, 6, 7, 8, 9, 10


def make_tokenizer(kind):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: i for i, piece in enumerate(VOCAB)} | {"late": LATE_ID}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if kind == "metaspace":
        # As sentencepiece models convert: the leading space of a single piece is lost in decode().
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁")
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    standin.plain_vllm()


@pytest.fixture(params=["plain", "metaspace", "cached by vLLM"])
def tokenizer(request):
    from vllm.tokenizers.hf import get_cached_tokenizer

    if request.param == "cached by vLLM":
        return get_cached_tokenizer(make_tokenizer("metaspace"))
    return make_tokenizer(request.param)


@pytest.fixture
def metaspace():
    return make_tokenizer("metaspace")


def to_tokens(tokenizer, ids):
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

    return convert_ids_list_to_tokens(tokenizer, ids)


def processor(tokenizer, *, flat=False, num_logprobs=1):
    """A request's logprobs state, made by vLLM from the request."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.logprobs import LogprobsProcessor

    params = SamplingParams(
        logprobs=num_logprobs, prompt_logprobs=num_logprobs, flat_logprobs=flat, max_tokens=8
    )

    class Request:
        sampling_params = params

    return LogprobsProcessor.from_new_request(tokenizer, Request())


def lists(rows):
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    ids = np.array(rows, dtype=np.int64)
    return LogprobsLists(ids, np.full(ids.shape, -0.5, np.float32), np.ones(len(rows), np.int64))


def tensors(rows):
    import torch
    from vllm.v1.outputs import LogprobsTensors

    ids = torch.tensor(rows, dtype=torch.int64)
    return LogprobsTensors(ids, torch.full(ids.shape, -0.5), torch.ones(len(rows)))


def decoded(container):
    return [p and {i: entry.decoded_token for i, entry in p.items()} for p in container]


# --- the fault -----------------------------------------------------------------------------------


@pytest.mark.red(OVERFLOW)
@pytest.mark.parametrize("bad", NOT_IDS)
def test_value_that_is_no_id(tokenizer, bad):
    good = [A, SP_A, HAN]
    for position in range(len(good) + 1):
        ids = [*good[:position], bad, *good[position:]]
        expected = to_tokens(tokenizer, good)
        expected.insert(position, "")
        assert to_tokens(tokenizer, ids) == expected


@pytest.mark.red(NO_PIECE)
@pytest.mark.parametrize("unknown", [11, 19, PADDED_ID, 2**31 - 1, 2**32 - 1])
def test_id_without_a_piece_in_a_sentencepiece_tokenizer(metaspace, unknown):
    assert to_tokens(metaspace, [SP_A, unknown, B]) == [" a", "", "b"]


@pytest.mark.red(OVERFLOW)
def test_several_of_them(tokenizer):
    expected = to_tokens(tokenizer, [SP_SP_B])
    assert to_tokens(tokenizer, [-1, SP_SP_B, 2**40, -1]) == ["", *expected, "", ""]
    assert to_tokens(tokenizer, [-7]) == [""]


@pytest.mark.red(r"KeyError: 'Invalid token for decoding")
def test_tokenizers_that_report_it_otherwise():
    """tiktoken (Mistral's tekken, Kimi) raises KeyError, sentencepiece IndexError."""

    class Tekken:
        def decode(self, ids):
            for i in ids:
                if i > 99:
                    raise IndexError("piece id is out of range.")
                if i > 9:
                    raise KeyError(f"Invalid token for decoding: {i}")
            return "x" * len(ids)

    assert to_tokens(Tekken(), [1, 10, 2, 100]) == ["x", "", "x", ""]


@pytest.mark.red(OVERFLOW)
@pytest.mark.parametrize("flat", [False, True], ids=["lists", "flat"])
@pytest.mark.parametrize("row", [[-1, A], [A, -1], [2**40, -1]], ids=["sampled", "top-k", "both"])
def test_sample_logprobs(tokenizer, row, flat):
    state = processor(tokenizer, flat=flat)
    state._update_sample_logprobs(lists([[A, B], row, [B, C]]))
    texts = {A: "a", B: "b", C: "c"}
    assert decoded(state.logprobs) == [
        {i: texts.get(i, "") for i in ids} for ids in ([A, B], row, [B, C])
    ]


@pytest.mark.red(OVERFLOW)
@pytest.mark.parametrize("flat", [False, True], ids=["lists", "flat"])
def test_prompt_logprobs(tokenizer, flat):
    """Also rows that were never written: a request that was preempted within its prompt."""
    state = processor(tokenizer, flat=flat)
    state._update_prompt_logprobs(tensors([[A, B], [-(2**62), 2**62], [B, C]]))
    assert decoded(state.prompt_logprobs)[1:] == [
        {A: "a", B: "b"},
        {-(2**62): "", 2**62: ""},
        {B: "b", C: "c"},
    ]


@pytest.mark.red(OVERFLOW)
@pytest.mark.parametrize("flat", [False, True], ids=["lists", "flat"])
@pytest.mark.parametrize("source", ["sample", "prompt"])
def test_context_of_a_byte_fallback_correction(tokenizer, source, flat):
    """The bad id is read again, steps later, as context of a character split over pieces."""
    state = processor(tokenizer, flat=flat)
    steps = [[[-1, B]], [[E4, A]], [[BD, A]], [[A0, HAN]]]
    for rows in steps:
        if source == "sample":
            state._update_sample_logprobs(lists(rows))
        else:
            state._update_prompt_logprobs(tensors(rows))
    container = state.logprobs if source == "sample" else state.prompt_logprobs
    assert decoded(container)[-4:] == [
        {-1: "", B: "b"},
        {E4: "", A: "a"},
        {BD: "", A: "a"},
        {A0: "你", HAN: "你"},
    ]


@pytest.mark.red(OVERFLOW)
@pytest.mark.parametrize("where", [2, 3])
def test_context_with_a_bad_id_among_the_bytes(tokenizer, where):
    """`_correct_decoded_token` itself: the context without the bad id is what counts."""
    assert_completes_the_character(tokenizer, where)


@pytest.mark.parametrize("where", [0, 1])
def test_context_with_a_bad_id_before_the_bytes(tokenizer, where):
    """Not looked at: the character is complete before."""
    assert_completes_the_character(tokenizer, where)


def assert_completes_the_character(tokenizer, where):
    state = processor(tokenizer)
    context = [A, E4, BD]
    assert state._correct_decoded_token(A0, list(context)) == "你"
    for bad in NOT_IDS:
        torn = [*context[:where], bad, *context[where:]]
        assert state._correct_decoded_token(A0, torn) == "你"


@pytest.mark.red(OVERFLOW)
def test_context_of_bad_ids_only(tokenizer):
    state = processor(tokenizer)
    assert state._correct_decoded_token(E4, [-1, 2**40, -3, -4]) == ""


@pytest.mark.red(OVERFLOW)
def test_one_request_does_not_take_the_others_with_it(tokenizer):
    """The front end handles all outputs in one loop; an exception there ends the server."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    front_end = OutputProcessor(tokenizer, log_stats=False)
    for name in ("bad", "good"):
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[A, B],
            mm_features=None,
            sampling_params=SamplingParams(logprobs=1, max_tokens=8),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        front_end.add_request(request, prompt=None)
    outputs = [
        EngineCoreOutput("bad", [A], new_logprobs=lists([[-1, A]])),
        EngineCoreOutput("good", [B], new_logprobs=lists([[B, A]])),
    ]
    results = {r.request_id: r for r in front_end.process_outputs(outputs).request_outputs}
    assert results["good"].outputs[0].text == "b"
    assert decoded(results["good"].outputs[0].logprobs) == [{B: "b", A: "a"}]
    assert results["bad"].outputs[0].text == "a"
    assert decoded(results["bad"].outputs[0].logprobs) == [{-1: "", A: "a"}]


@pytest.mark.red(OVERFLOW)
def test_says_so_once(tokenizer, monkeypatch):
    """One line in the log for the operator, however many ids are torn."""
    from vllm import logger

    lines = []
    once = logger._print_warning_once
    once.cache_clear()
    monkeypatch.setattr(logger.logging.Logger, "warning", lambda _, text, **__: lines.append(text))
    for bad in (-1, -2, 2**40, 2**41):
        assert to_tokens(tokenizer, [A, bad]) == ["a", ""]
    once.cache_clear()
    assert lines == ["A token id in the logprobs has no text; an empty string stands for it."]


# --- neighbours ----------------------------------------------------------------------------------


def test_valid_ids_are_as_before():
    ids = [A, B, 2, HAN, E4, BD, A0, C, SP_A, SP_SP_B, SP, LATE_ID]
    plain = ["a", "b", "<unk>", "你", "�", "�", "�", "c", "▁a", "▁▁b", "▁", "late"]
    spaced = ["a", "b", "<unk>", "你", "�", "�", "�", "c", " a", "  b", " ", "late"]
    assert to_tokens(make_tokenizer("plain"), ids) == plain
    assert to_tokens(make_tokenizer("metaspace"), ids) == spaced


def test_id_behind_a_hole_in_the_vocabulary_keeps_its_text(tokenizer):
    """It is not below len(tokenizer), and valid all the same."""
    assert len(tokenizer) <= LATE_ID
    assert to_tokens(tokenizer, [LATE_ID]) == ["late"]


def test_id_of_the_padded_vocabulary_is_empty():
    assert to_tokens(make_tokenizer("plain"), [A, PADDED_ID]) == ["a", ""]


def test_empty_list(tokenizer):
    assert to_tokens(tokenizer, []) == []


def test_byte_fallback_correction_is_as_before(tokenizer):
    state = processor(tokenizer)
    state._update_sample_logprobs(lists([[A, B], [E4, A], [BD, A], [A0, HAN], [B, E4]]))
    assert [next(iter(p.values())) for p in decoded(state.logprobs)] == ["a", "", "", "你", "b"]


def test_no_tokenizer():
    state = processor(None)
    state._update_sample_logprobs(lists([[-1, 2**40]]))
    assert decoded(state.logprobs) == [{-1: None, 2**40: None}]


def test_valid_lists_cost_what_they_did(metaspace, monkeypatch):
    """One decode an id, one look-up of the pieces a list, and never the length of the tokenizer."""
    calls = {"decode": 0, "convert_ids_to_tokens": 0, "__len__": 0}
    base = type(metaspace)

    def counted(name):
        def method(self, *args, **kwargs):
            calls[name] += 1
            return getattr(base, name)(self, *args, **kwargs)

        return method

    counting = type("Counting", (base,), {name: counted(name) for name in calls})
    monkeypatch.setattr(metaspace, "__class__", counting)
    assert to_tokens(metaspace, [SP_A, B, C, HAN] * 25) == [" a", "b", "c", "你"] * 25
    assert calls == {"decode": 100, "convert_ids_to_tokens": 1, "__len__": 0}


def test_exceptions_that_are_no_errors_pass():
    """Ctrl-C while decoding is not an id without a text."""

    class Interrupted:
        def decode(self, ids):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_tokens(Interrupted(), [A, B])

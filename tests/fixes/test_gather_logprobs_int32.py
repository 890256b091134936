"""gather-logprobs-int32: the two functions, with a record of what they run, and the engine.

The functions are called in the engine's process, where the model runner can be imported.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("engine")

VOCABULARY = 50


def sampled(logprobs, num_logprobs, token_ids):
    from vllm_gaudi import patches

    return patches._hpu_gather_logprobs(logprobs, num_logprobs, token_ids)


def of_the_prompt(logprobs, num_logprobs, token_ids):
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    return HPUModelRunner._gather_prompt_logprobs_hpu(None, logprobs, num_logprobs, token_ids)


class_level = pytest.mark.level("class")
both = pytest.mark.parametrize("gather", [sampled, of_the_prompt])


def inputs(rows, seed=0):
    """Log probabilities and the ids chosen from them; int64, as the callers give them."""
    import torch

    source = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(rows, VOCABULARY, generator=source).log_softmax(-1)
    return logprobs, torch.randint(0, VOCABULARY, (rows,), generator=source)


def operations(gather, num_logprobs):
    """(what, dtypes of what goes in, dtype of what comes out) of each concatenation and cast."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if name == "cat":
                seen.append((name, [part.dtype for part in args[0]], result.dtype))
            if name == "_to_copy":
                seen.append((name, [args[0].dtype], result.dtype))
            return result

    logprobs, ids = inputs(3)
    with Record():
        gather(logprobs, num_logprobs, ids)
    assert [what for what, _, _ in seen].count("cat") == 2  # ids and log probabilities
    return seen, torch


# --- the fault -----------------------------------------------------------------------------------


@pytest.mark.red(r"concatenated as \[torch.int64, torch.int64\]")
@class_level
@both
@pytest.mark.parametrize("num_logprobs", [0, 1, 5])
def test_no_concatenation_of_64_bit_ids(gather, num_logprobs):
    seen, torch = operations(gather, num_logprobs)
    for what, given, _ in seen:
        assert what != "cat" or torch.int64 not in given, f"concatenated as {given}"


@pytest.mark.red(r"assert \['cat', '_to_copy'\] == ")
@class_level
@both
def test_ids_are_narrowed_first(gather):
    """The casts come before the concatenation; none comes behind it."""
    seen, torch = operations(gather, 4)
    ids = [what for what, given, out in seen if torch.float32 not in [*given, out]]
    assert [name for name in ids if name in ("cat", "_to_copy")][-3:] == ["_to_copy"] * 2 + ["cat"]


# --- neighbours ----------------------------------------------------------------------------------


@class_level
@both
@pytest.mark.parametrize("num_logprobs", [0, 1, 5, VOCABULARY])
@pytest.mark.parametrize("rows", [1, 4])
def test_same_values_shapes_and_types(gather, num_logprobs, rows):
    """Against the definition: the chosen id first, then the best ones; rank 1 is the best."""
    import torch

    logprobs, ids = inputs(rows, seed=rows)
    found = gather(logprobs, num_logprobs, ids)
    assert found.logprob_token_ids.dtype == torch.int32
    assert found.logprob_token_ids.shape == (rows, num_logprobs + 1)
    assert found.logprobs.dtype == torch.float32
    for row, chosen in enumerate(ids.tolist()):
        best = logprobs[row].argsort(descending=True)[:num_logprobs].tolist()
        assert found.logprob_token_ids[row].tolist() == [chosen, *best]
        assert found.logprobs[row].tolist() == logprobs[row, [chosen, *best]].tolist()
        above = int((logprobs[row] >= logprobs[row, chosen]).sum())
        assert int(found.selected_token_ranks[row]) == above


@class_level
@both
def test_large_vocabulary_ids_are_kept(gather):
    """Ids of real vocabularies (over 2**16) pass the narrower type."""
    import torch

    logprobs = torch.zeros(1, 300_000)
    logprobs[0, 299_999] = 1.0
    ids = torch.tensor([262_143])
    assert gather(logprobs, 1, ids).logprob_token_ids.tolist() == [[262_143, 299_999]]


@pytest.mark.level("class")
def test_the_sampler_insists_on_64_bit_ids():
    """`torch.gather` needs them as its index; the check in front of it stays."""
    logprobs, ids = inputs(2)
    with pytest.raises(AssertionError):
        sampled(logprobs, 1, ids.int())


# --- the engine ----------------------------------------------------------------------------------


@pytest.fixture
def torn(monkeypatch):
    """A device on which joining 64-bit ids goes wrong, as on a card in lazy mode."""
    import torch

    whole = torch.cat

    def cat(tensors, *args, **kwargs):
        result = whole(tensors, *args, **kwargs)
        return -1 - result if result.dtype == torch.int64 and result.dim() == 2 else result

    monkeypatch.setattr(torch, "cat", cat)


@pytest.mark.red(r"OverflowError: out of range integral type conversion attempted")
@pytest.mark.parametrize("which", ["logprobs", "prompt_logprobs"])
def test_a_device_that_cannot_join_64_bit_ids(engines, words, torn, which):
    """The ids that a user gets are tokens: the chosen one first among them."""
    from vllm import SamplingParams

    engine = engines(model="dense", asynchronous=True)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, **{which: 3})
    (output,) = engine.generate([words(70, 9)], params)
    if which == "logprobs":
        chosen, found = output.outputs[0].token_ids, output.outputs[0].logprobs
    else:
        chosen, found = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    assert len(found) == len(chosen)
    for token, position in zip(chosen, found, strict=True):
        assert token in position, f"{token} is not in {position}"


def test_the_function_is_the_samplers_own(engines):
    """vllm_gaudi looks at the text of vLLM's function before it replaces it: still found."""
    engines(model="dense", asynchronous=True)
    from vllm.v1.sample.sampler import Sampler
    from vllm_gaudi import patches

    assert Sampler.gather_logprobs is patches._hpu_gather_logprobs

"""seeded-sampling on the real `InputBatch` and vLLM's real `random_sample`."""

from __future__ import annotations

import random

import pytest

from tests.support import standin

pytestmark = pytest.mark.needs("torch", "vllm_gaudi")

VOCABULARY = 64


@pytest.fixture(scope="module")
def module():
    return standin.hpu_input_batch()


@pytest.fixture
def batch(module):
    return standin.empty_batch(module, vocabulary=VOCABULARY)


def generator(seed):
    import torch

    return None if seed is None else torch.Generator().manual_seed(seed)


def add(module, batch, req_id, seed):
    """Add a request as the runner does; without a seed it has no generator."""
    from vllm.sampling_params import SamplingParams

    state = module.CachedRequestState(
        req_id=req_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=SamplingParams(temperature=1.0, seed=seed),
        generator=generator(seed),
        block_ids=[[]],
        num_computed_tokens=0,
        output_token_ids=[],
    )
    batch.add_request(state)
    return state


def probabilities(name, step):
    """What the model says to a request at a step of its own."""
    import torch

    source = torch.Generator().manual_seed(1000 * int(name[1:]) + step)
    return torch.randn(VOCABULARY, generator=source).softmax(-1)


def alone(seed, rows):
    """The tokens of a request that is the only one: one draw a token."""
    import torch

    own, tokens = generator(seed), []
    for row in rows:
        noise = torch.empty(VOCABULARY).exponential_(generator=own)
        tokens.append(int((row / noise).argmax()))
    return tokens


def sample(batch, called, probs, pad_to):
    """A sampling call on the rows of these requests; padding repeats row 0."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    rows = [(name, []) for name in called]
    rows += [rows[0]] * (pad_to - len(rows))
    batch.refresh_sampling_metadata()
    metadata = batch.make_selective_sampling_metadata(rows)
    stacked = torch.stack(probs + [probs[0]] * (pad_to - len(probs)))
    return random_sample(stacked, metadata.generators).tolist()[: len(called)]


# --- the fault -----------------------------------------------------------------------------------


@pytest.mark.red(r"depends on the padding")
@pytest.mark.parametrize("pad_to", [2, 4, 8])
def test_padding_draws_nothing(module, batch, pad_to):
    add(module, batch, "r0", 7)
    rows = [probabilities("r0", step) for step in range(8)]
    tokens = [sample(batch, ["r0"], [row], pad_to)[0] for row in rows]
    assert tokens == alone(7, rows), "the answer depends on the padding"


@pytest.mark.red(r"r\d+ is not as alone")
def test_any_batch_and_any_call_against_each_request_alone(module, batch):
    """Random batches, orders, subsets and paddings."""
    rng = random.Random(11)
    seeds, seen, tokens = {}, {}, {}
    for _ in range(300):
        if len(seeds) < 8 and rng.random() < 0.5:
            name = f"r{len(seen)}"
            seeds[name] = rng.choice([None, rng.randrange(1000)])
            seen[name], tokens[name] = [], []
            add(module, batch, name, seeds[name])
        elif len(seeds) > 1 and rng.random() < 0.3:
            name = rng.choice(list(seeds))
            del seeds[name]
            batch.condense([batch.remove_request(name)])
        elif len(seeds) > 1:
            batch.swap_states(*rng.sample(range(len(seeds)), 2))
        if not seeds:
            continue
        called = rng.sample(list(seeds), rng.randint(1, len(seeds)))
        for name in called:
            seen[name].append(probabilities(name, len(seen[name])))
        probs = [seen[name][-1] for name in called]
        for name, token in zip(
            called, sample(batch, called, probs, len(called) + rng.randint(0, 3)), strict=True
        ):
            tokens[name].append(token)
            if seeds[name] is not None:
                assert tokens[name] == alone(seeds[name], seen[name]), f"{name} is not as alone"


@pytest.mark.red(r"generator is not supported in refs")  # torch's words: not on "meta"
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_a_generator_draws_where_it_is(module, wide):
    """The probabilities are on another device ("meta": it computes shapes and types only)."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    drawn = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ == "exponential_":
                drawn.append((args[0].device.type, args[0].dtype, "generator" in (kwargs or {})))
            return result

    probs = torch.empty(3, VOCABULARY, device="meta")
    with Record():
        random_sample(probs, {0: generator(1), 2: generator(2)}, wide)
    dtype = torch.float64 if wide else torch.float32
    assert drawn == [("meta", dtype, False), ("cpu", dtype, True), ("cpu", dtype, True)]


# --- neighbours ----------------------------------------------------------------------------------


def test_a_generator_on_the_same_device_draws_as_before(module):
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    rows = [probabilities("r0", step) for step in range(6)]
    own = generator(5)
    tokens = [int(random_sample(torch.stack([row]), {0: own})) for row in rows]
    assert tokens == alone(5, rows)


def test_compiled_draws_go_on_from_call_to_call(module):
    """Nothing of a generator's state gets into a graph: the third call draws the third numbers."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    compiled = torch.compile(random_sample, backend="eager", dynamic=True)
    rows = [probabilities("r0", step) for step in range(6)]
    own = generator(5)
    tokens = [int(compiled(torch.stack([row, row]), {1: own})[1]) for row in rows]
    assert tokens == alone(5, rows)


def test_no_seed_no_generator(module, batch):
    """Falsy: the sampler then skips the loop."""
    for name in ("r0", "r1"):
        add(module, batch, name, None)
    metadata = batch.make_selective_sampling_metadata([("r1", []), ("r0", []), ("r1", [])])
    assert metadata.generators == {}


def test_requests_without_a_seed_draw_from_the_default_generator(module):
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    probs = torch.stack([probabilities("r0", step) for step in range(4)])
    torch.manual_seed(3)
    tokens = random_sample(probs.clone(), {})
    torch.manual_seed(3)
    noise = torch.empty_like(probs).exponential_()
    assert tokens.tolist() == (probs / noise).argmax(-1).tolist()

"""logitsprocs-rows on the real `InputBatch`, vLLM's real logits processors and its real sampler.

The sampler is called as the runner calls it: once a prefill batch and once for the padded decode
batch, on the rows of just those requests. What each row becomes is compared with what its request
asks for, written out here.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from tests.support import standin

pytestmark = pytest.mark.needs("torch", "vllm_gaudi")

VOCAB = 16
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def module():
    batch_module = standin.hpu_input_batch()
    from vllm.utils import torch_utils

    torch_utils.PIN_MEMORY = False  # there is no device to pin it for
    return batch_module


def processors(*custom, max_num_seqs=8):
    """The processors that the runner makes."""
    import torch
    from vllm.v1.sample.logits_processor import build_logitsprocs

    config = SimpleNamespace(
        speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs)
    )
    return build_logitsprocs(config, torch.device("cpu"), False, False, custom)


class Batch:
    """An `InputBatch` driven as the model runner drives it, and what its requests ask for."""

    def __init__(self, module, *custom, asynchronous=False, max_num_seqs=8, max_num_reqs=8):
        self.module = module
        self.processors = processors(*custom, max_num_seqs=max_num_seqs)
        self.asynchronous = asynchronous
        self.real = standin.empty_batch(
            module, vocabulary=VOCAB, rows=max_num_reqs, logitsprocs=self.processors
        )
        self.states = {}
        self.answers = {}  # each request's tokens, whether the runner's list has them or not

    def add(self, name, answer=(), **params):
        from vllm.sampling_params import SamplingParams

        words = params.pop("bad_words", None)
        params = SamplingParams(**{"temperature": 1.0} | params)
        params._bad_words_token_ids = words
        self.states[name] = self.module.CachedRequestState(
            req_id=name,
            prompt_token_ids=list(PROMPT),
            mm_features=[],
            sampling_params=params,
            generator=None,
            block_ids=[[]],
            num_computed_tokens=len(PROMPT) + len(answer) - 1 if answer else 0,
            output_token_ids=list(answer),
        )
        self.answers[name] = list(answer)
        self.real.add_request(self.states[name])

    def remove(self, name):
        del self.states[name], self.answers[name]
        self.real.condense([self.real.remove_request(name)])

    def resume(self, name):
        """Preempted, then scheduled again: the runner makes its list anew (async) and adds it."""
        state = self.states[name]
        self.real.condense([self.real.remove_request(name)])
        if self.asynchronous:
            state.output_token_ids = list(self.answers[name])
        state.num_computed_tokens = 0
        self.real.add_request(state)

    def metadata(self, names, pad_to=0):
        rows = [(name, self.states[name].output_token_ids) for name in names]
        rows += [rows[0]] * (pad_to - len(rows))
        return self.real.make_selective_sampling_metadata(rows)

    def sampled_from(self, names, pad_to=0, rows=0):
        """The logits [names, VOCAB] that a call on these requests samples from; even at first."""
        import torch
        from vllm.v1.sample.sampler import Sampler

        metadata = self.metadata(names, pad_to)
        logits = torch.arange(VOCAB).float().repeat(rows or max(len(names), pad_to), 1)
        logits = Sampler().apply_logits_processors(logits, metadata, predict_bonus_token=False)
        for processor in metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        return logits[: len(names)]

    def advance(self, tokens):
        """A step is over: these requests have a new token each (name -> token)."""
        import torch

        for name, token in tokens.items():
            state = self.states[name]
            self.answers[name].append(token)
            state.num_computed_tokens = len(PROMPT) + len(self.answers[name]) - 1
            if not self.asynchronous:
                state.output_token_ids.append(token)
        if self.asynchronous:
            ids = self.real.req_ids
            self.real.prev_sampled_token_ids = torch.tensor([tokens.get(n, 0) for n in ids])
            self.real.prev_req_id_to_index = {n: i for i, n in enumerate(ids) if n in tokens}
            if hasattr(self.real.logitsprocs, "by_row"):  # the line in sample_tokens
                self.real.logitsprocs.by_row.sampled(
                    self.real.prev_sampled_token_ids, self.real.prev_req_id_to_index
                )

    def expected(self, name):
        """The logits [VOCAB] that this request alone is to be sampled from."""
        import torch

        params, answer = self.states[name].sampling_params, self.answers[name]
        logits = torch.arange(VOCAB).float()
        for word in params.bad_words_token_ids or []:
            if answer[len(answer) - len(word) + 1 :] == word[:-1]:
                logits[word[-1]] = -torch.inf
        if len(answer) < params.min_tokens:
            logits[list(params.all_stop_token_ids)] = -torch.inf
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        for token in set(answer) if params.extra_args else ():
            logits[token] += params.extra_args["seen"]
        for token in range(VOCAB):
            times = answer.count(token)
            logits[token] -= params.frequency_penalty * times
            logits[token] -= params.presence_penalty * (times > 0)
        shares = logits.softmax(-1)
        logits[shares < params.min_p * shares.max()] = -torch.inf
        return logits

    def assert_each_alone(self, names, pad_to=0):
        import torch

        found = self.sampled_from(names, pad_to)
        expected = torch.stack([self.expected(name) for name in names])
        wrong = [n for n, *rows in zip(names, found, expected, strict=True) if not near(*rows)]
        assert not wrong, f"rows of {wrong} are not as alone"


def near(found, expected):
    import torch

    return torch.allclose(found, expected, atol=1e-4)


def make_seen():
    """A custom processor in vLLM's own form: adds to the logits of what a request has said."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class Seen(LogitsProcessor):
        def __init__(self, vllm_config, device, is_pin_memory):
            self.requests = {}
            self.size = 0

        def is_argmax_invariant(self):
            return False

        def update_state(self, batch_update):
            if batch_update is None:
                return
            for row in batch_update.removed:
                del self.requests[row]
            for row, params, prompt, outputs in batch_update.added:
                assert prompt == PROMPT
                self.requests[row] = (params.extra_args, outputs)
            self.size = batch_update.batch_size

        def apply(self, logits):
            # What vLLM promises: the batch is what it was told, row by row.
            assert sorted(self.requests) == list(range(self.size)) == list(range(len(logits)))
            added = logits.clone()
            for row, (options, outputs) in self.requests.items():
                if options:
                    added[row, sorted(set(outputs))] += options["seen"]
            return added

    return Seen


# --- the fault -----------------------------------------------------------------------------------

NOT_ALONE = r"rows of \['[^]]*\] are not as alone"
NEVER_TOLD = r"assert \[\] == \[0"  # the custom processor's own check
red = pytest.mark.red(NOT_ALONE)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def batch(module, request):
    return Batch(module, asynchronous=request.param)


@red
def test_logit_bias(batch):
    batch.add("r0")
    batch.add("r1", logit_bias={3: 50.0, 4: -50.0})
    batch.assert_each_alone(["r1"])
    batch.assert_each_alone(["r0"])
    batch.assert_each_alone(["r1", "r0"], pad_to=4)


@red
def test_logit_bias_of_a_greedy_request(batch):
    batch.add("r0", temperature=0.0)
    batch.add("r1", temperature=0.0, logit_bias={3: 50.0})
    batch.assert_each_alone(["r0", "r1"])


@red
def test_min_p(batch):
    batch.add("r0")
    batch.add("r1", min_p=0.5)
    batch.add("r2", min_p=0.01)
    batch.assert_each_alone(["r2"])
    batch.assert_each_alone(["r1", "r0", "r2"], pad_to=4)


@red
def test_min_tokens_is_released_on_time(batch):
    batch.add("r0")
    batch.add("r1", min_tokens=3, stop_token_ids=[15, 6])
    batch.assert_each_alone(["r1"], pad_to=2)
    for token in [9, 8, 9, 8, 9]:
        batch.advance({"r0": 5, "r1": token})
        batch.assert_each_alone(["r0", "r1"], pad_to=4)


@red
def test_min_tokens_of_a_request_that_is_resumed(batch):
    """What it said before is prompt when it is computed again, and counts all the same."""
    batch.add("r0", min_tokens=4, stop_token_ids=[15])
    for _ in range(2):
        batch.assert_each_alone(["r0"])
        batch.advance({"r0": 9})
    batch.resume("r0")
    for _ in range(4):
        batch.assert_each_alone(["r0"])
        batch.advance({"r0": 9})


@red
def test_chunks_of_a_prompt_count_for_nothing(batch):
    batch.add("r0", min_tokens=1, stop_token_ids=[15])
    for computed in range(len(PROMPT)):
        batch.states["r0"].num_computed_tokens = computed
        batch.assert_each_alone(["r0"])


@pytest.mark.red(NEVER_TOLD)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_custom_processor(module, asynchronous):
    """Shown exactly the rows of requests, told what each has said, in whatever call."""
    batch = Batch(module, make_seen(), asynchronous=asynchronous)
    batch.add("r0")
    batch.add("r1", extra_args={"seen": -30.0})
    batch.add("r2", extra_args={"seen": 30.0})
    for tokens in [(4, 5, 6), (7, 8, 9), (10, 11, 12)]:
        batch.assert_each_alone(["r2", "r1"], pad_to=3)
        batch.assert_each_alone(["r0"], pad_to=4)
        batch.advance(dict(zip(["r0", "r1", "r2"], tokens, strict=True)))
    batch.assert_each_alone(["r0", "r1", "r2"], pad_to=16)


@pytest.mark.red(NEVER_TOLD)
@pytest.mark.parametrize("rows", [2, 3, 8, 20])
def test_more_rows_than_max_num_seqs(module, rows):
    """A decode bucket may be larger than the number of requests there can be."""
    batch = Batch(module, make_seen(), max_num_seqs=2, max_num_reqs=2)
    batch.add("r0", min_p=0.5, logit_bias={3: 50.0})
    batch.add("r1", min_p=0.01, min_tokens=1, stop_token_ids=[15], extra_args={"seen": 5.0})
    for size in (2, rows, 2):
        batch.assert_each_alone(["r0", "r1"], pad_to=size)
        batch.assert_each_alone(["r1"], pad_to=size)


@red
def test_more_rows_than_logits(module):
    """Speculative call: rows for every drafted token, logits for the bonus tokens only."""
    batch = Batch(module)
    batch.add("r0", logit_bias={3: 50.0})
    batch.add("r1", min_tokens=1, stop_token_ids=[15])
    found = batch.sampled_from(["r0", "r1"], pad_to=8, rows=2)
    wrong = [
        n for n, row in zip(["r0", "r1"], found, strict=True) if not near(row, batch.expected(n))
    ]
    assert not wrong, f"rows of {wrong} are not as alone"


@pytest.mark.red(f"{NOT_ALONE}|{NEVER_TOLD}")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("custom", [False, True], ids=["builtin", "custom"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_any_batch_and_any_call(module, seed, custom, asynchronous):
    """Random requests, orders, calls, paddings and preemptions: each row as if alone."""
    rng = random.Random(seed)
    batch = Batch(module, *[make_seen()] * custom, asynchronous=asynchronous, max_num_seqs=4)

    def options():
        token = rng.randrange(VOCAB)
        return rng.choice(
            [
                {},
                {"logit_bias": {token: rng.choice([-40.0, 40.0])}},
                {"min_p": rng.choice([0.01, 0.3, 0.9])},
                {"min_tokens": rng.randrange(1, 6), "stop_token_ids": [token, 15]},
                {"frequency_penalty": 1.5, "presence_penalty": 0.5},
                {"extra_args": {"seen": 9.0}} if custom else {},
            ]
        )

    serial = 0
    for _ in range(60):
        names = list(batch.states)
        action = rng.random()
        if len(names) < 8 and (action < 0.4 or not names):
            batch.add(f"r{serial}", **options() | options())
            serial += 1
        elif action < 0.5:
            batch.remove(rng.choice(names))
        elif action < 0.6 and len(names) > 1:
            batch.real.swap_states(*rng.sample(range(len(names)), 2))
        elif action < 0.7:
            batch.resume(rng.choice(names))
        called = list(batch.states)
        rng.shuffle(called)
        cut = rng.randint(0, len(called))
        for part in (called[:cut], called[cut:]):
            if part:
                batch.assert_each_alone(part, pad_to=len(part) + rng.randint(0, 4))
        batch.advance({name: rng.choice([13, 14, 15]) for name in called})
    for name in list(batch.states):
        batch.remove(name)
    assert not leftovers(batch)


# --- nothing is left, nothing is paid ------------------------------------------------------------


def leftovers(batch):
    """What the processors still know."""
    found = []
    for processor in batch.processors.all:
        for name in ("biases", "min_toks", "min_p_count", "requests"):
            found += [name] if getattr(processor, name, None) else []
    tracker = getattr(batch.processors, "by_row", None)
    if tracker is not None:
        found += [name for name in ("_requests",) if getattr(tracker, name)]
        found += [row for row in tracker._rows if row is not None]
    return found


@red
def test_a_finished_request_leaves_nothing(batch):
    """Its row's next owner is untouched; the processors forget it at once."""
    batch.add("r0", logit_bias={3: 50.0}, min_p=0.5, min_tokens=9, stop_token_ids=[15])
    batch.add("r1", min_p=0.2)
    batch.assert_each_alone(["r0", "r1"])
    batch.remove("r0")
    batch.add("r2")
    batch.assert_each_alone(["r2", "r1"])
    batch.remove("r1")
    assert not leftovers(batch)
    batch.assert_each_alone(["r2"])


@red
def test_a_request_under_the_name_of_one_that_finished(batch):
    batch.add("r0", logit_bias={3: 50.0})
    batch.assert_each_alone(["r0"])
    batch.remove("r0")
    batch.add("r0", logit_bias={4: 50.0})
    batch.assert_each_alone(["r0"])
    batch.remove("r0")
    batch.add("r0")
    batch.assert_each_alone(["r0"])


@red
def test_a_new_batch_with_the_same_processors(module):
    """The runner makes one when the size of blocks turns out to be another."""
    first = Batch(module)
    first.add("r0", logit_bias={3: 50.0})
    first.assert_each_alone(["r0"])
    second = Batch(module)
    second.real = module.InputBatch(
        max_num_reqs=8,
        max_model_len=64,
        max_num_batched_tokens=64,
        device=second.real.device,
        pin_memory=False,
        vocab_size=VOCAB,
        block_sizes=[16],
        kernel_block_sizes=[16],
        logitsprocs=first.real.logitsprocs,
    )
    second.add("r1")
    second.add("r2", min_tokens=1, stop_token_ids=[15])
    second.assert_each_alone(["r1", "r2"])


def count_work(batch, monkeypatch):
    """Counts updates of processors, copies of them to the device, and waits for the device."""
    import torch
    from vllm.v1.sample.logits_processor import builtin

    counted = {"told": 0, "copied": 0, "waited": 0}

    def counting(name, real):
        def call(*args, **kwargs):
            counted[name] += 1
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(builtin, "async_tensor_h2d", counting("copied", builtin.async_tensor_h2d))
    for processor in batch.processors.all:
        monkeypatch.setattr(processor, "update_state", counting("told", processor.update_state))
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", counting("waited", to))
    return counted


def test_a_batch_that_uses_none_of_it_costs_nothing(batch, monkeypatch):
    batch.add("r0")
    batch.add("r1", temperature=0.0, top_p=0.5, bad_words=[[7]])
    counted = count_work(batch, monkeypatch)
    for _ in range(3):
        batch.metadata(["r1"], pad_to=2)
        batch.metadata(["r0", "r1"], pad_to=4)
        batch.advance({"r0": 5, "r1": 6})
    batch.remove("r0")
    assert counted == {"told": 0, "copied": 0, "waited": 0}


def test_a_call_that_uses_none_of_it_is_given_no_processor(batch):
    """Requests of other calls are not its affair."""
    batch.add("r0", logit_bias={3: 50.0})
    batch.add("r1")
    batch.metadata(["r0"])
    logits = batch.sampled_from(["r1"], pad_to=4)
    assert near(logits, batch.expected("r1"))


@pytest.mark.red(r"'told': 0")
def test_the_same_rows_again_copy_nothing(batch, monkeypatch):
    """They are told that a step has passed, which is how `min_tokens` ends."""
    batch.add("r0", logit_bias={3: 50.0})
    batch.add("r1", min_tokens=3, stop_token_ids=[15])
    batch.add("r2")
    batch.metadata(["r0", "r1", "r2"], pad_to=4)
    batch.advance({"r0": 5, "r1": 6, "r2": 7})
    counted = count_work(batch, monkeypatch)
    batch.metadata(["r0", "r1", "r2"], pad_to=4)
    assert counted == {"told": 3, "copied": 0, "waited": 0}


@pytest.mark.red(r"0\.9")
def test_values_on_their_way_to_the_device_are_not_overwritten(module):
    """The copy of a call's values may not be done when the next call is put together."""
    batch = Batch(module)
    batch.add("r0", min_p=0.9)
    batch.add("r1", min_p=0.125)
    (first,) = batch.metadata(["r0"]).logitsprocs.argmax_invariant
    (second,) = batch.metadata(["r1", "r0"]).logitsprocs.argmax_invariant
    assert first.min_p_cpu_tensor[:1].tolist() == pytest.approx([0.9])
    assert second.min_p_cpu_tensor[:2].tolist() == pytest.approx([0.125, 0.9])
    batch.remove("r0")
    assert second.min_p_cpu_tensor[:2].tolist() == pytest.approx([0.125, 0.9])


# --- the history under async scheduling ----------------------------------------------------------


@red
@pytest.mark.parametrize(
    "options",
    [{"frequency_penalty": 1.5}, {"presence_penalty": 1.5}, {"bad_words": [[13, 14], [9, 13, 14]]}],
    ids=["frequency", "presence", "bad_words"],
)
def test_history_under_async_scheduling(module, options):
    """The tokens of a request that reads them, once they are on the host."""
    batch = Batch(module, asynchronous=True)
    batch.add("r0", **options)
    batch.add("r1")
    for token in [13, 9, 13, 14, 13]:
        batch.assert_each_alone(["r0"], pad_to=2)
        batch.assert_each_alone(["r0", "r1"], pad_to=4)
        batch.advance({"r0": token, "r1": 14})
    batch.resume("r0")
    batch.assert_each_alone(["r0", "r1"])
    batch.advance({"r1": 14})  # what an incomplete prompt samples is thrown away
    batch.assert_each_alone(["r0", "r1"])

"""sampling-rows-refresh by property: each request is sampled as if it were alone.

Random schedules drive the runner's real `_update_states`, `_ensure_decodes_first` and
`_prepare_sampling` on the real `InputBatch`: requests come, end, are skipped and come back, prompts
advance by chunks and end at different times, decodes catch up. The model of what is right is the
request's own `SamplingParams`. A step without change must copy nothing.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import bare_runner

pytestmark = [pytest.mark.needs("engine"), pytest.mark.level("class")]

VOCAB = 32
OUTPUT = 1  # what every request says
PROPERTY = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 2.0]),
        "top_p": st.sampled_from([0.25, 0.75]),
        "top_k": st.sampled_from([3, 7]),
        "frequency_penalty": st.sampled_from([0.5, -0.5]),
        "presence_penalty": st.sampled_from([0.25, -0.25]),
        "repetition_penalty": st.sampled_from([1.5, 2.0]),
        "allowed_token_ids": st.sampled_from([[4], [5, 6]]),
        "bad_words": st.sampled_from([[[7]], [[8], [9]]]),
    },
)


class Alone:
    """A request and what a sampler must be given for it, whoever else there is."""

    def __init__(self, name, prompt, options):
        from vllm.sampling_params import SamplingParams

        words = options.pop("bad_words", [])
        self.prompt = prompt
        self.blocks = [int(name[1:]) * 16 + n + 1 for n in range(16)]  # its own
        self.params = SamplingParams(**options)
        self.params._bad_words_token_ids = words or None
        self.computed, self.outputs, self.in_batch = 0, 0, False
        greedy = self.params.temperature == 0.0
        self.expected = {
            "temperature": -1.0 if greedy else self.params.temperature,
            "top_p": 1.0 if greedy else self.params.top_p,
            "top_k": VOCAB if greedy or self.params.top_k < 1 else self.params.top_k,
            "frequency": self.params.frequency_penalty,
            "presence": self.params.presence_penalty,
            "repetition": self.params.repetition_penalty,
            "allowed": sorted(self.params.allowed_token_ids or range(VOCAB)),
            "prompt": prompt,
            "words": words,
        }

    @property
    def left(self):
        """Tokens that it has and that are not computed."""
        return len(self.prompt) + self.outputs - self.computed


def given_to(metadata, row):
    """What the sampler reads for a row of this call; what it does not read is left out."""
    found = {}
    if not metadata.all_greedy:
        found["temperature"] = metadata.temperature[row].item()
    for name, values in (("top_p", metadata.top_p), ("top_k", metadata.top_k)):
        if values is not None:
            found[name] = values[row].item()
    if not metadata.no_penalties:
        found["frequency"] = metadata.frequency_penalties[row].item()
        found["presence"] = metadata.presence_penalties[row].item()
        found["repetition"] = metadata.repetition_penalties[row].item()
        ids = metadata.prompt_token_ids[row].tolist()
        found["prompt"] = [token for token in ids if token < VOCAB]
    if metadata.allowed_token_ids_mask is not None:
        found["allowed"] = (~metadata.allowed_token_ids_mask[row]).nonzero().flatten().tolist()
    found["words"] = metadata.bad_words_token_ids.get(row, [])
    return found


class Simulation:
    """A scheduler that does what it likes, and the runner's own methods after each of its steps."""

    def __init__(self, monkeypatch):
        self.runner = bare_runner.runner(rows=5, vocabulary=VOCAB)
        self.requests = {}
        self.serial = 0
        self.copies, self.swaps, self.sampled, self.quiet = [], 0, 0, 0
        self.wrong_rows, self.quiet_copies, self.swaps_sampled = [], [], 0
        module = bare_runner.module()
        from vllm_gaudi.v1.worker import hpu_input_batch as batches

        monkeypatch.setattr(module, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
        for name in ("async_h2d_copy", "async_h2d_update"):
            monkeypatch.setattr(batches, name, self.counted(name, getattr(batches, name)))
        tokens = module.InputBatch._make_prompt_token_ids_cpu_tensor
        monkeypatch.setattr(
            module.InputBatch,
            "_make_prompt_token_ids_cpu_tensor",
            self.counted("prompt tokens", tokens),
        )
        swap = module.InputBatch.swap_states

        def swapped(batch, first, second):
            self.swaps += 1
            swap(batch, first, second)

        monkeypatch.setattr(module.InputBatch, "swap_states", swapped)

    def counted(self, name, stock):
        def copy(*args, **kwargs):
            self.copies.append(name)
            return stock(*args, **kwargs)

        return copy

    def step(self, draw):
        """One step: who takes part, and with how many tokens, is drawn."""
        finished = {r for r in self.requests if draw(st.integers(0, 5)) == 0}
        for name in finished:
            del self.requests[name]
        new = []
        while len(self.requests) < 5 and draw(st.integers(0, 2)) == 0:
            name = f"r{self.serial}"
            self.serial += 1
            length = draw(st.integers(1, 9))
            prompt = [(self.serial + 3 * n) % VOCAB for n in range(length)]
            self.requests[name] = Alone(name, prompt, draw(PARAMS))
            new.append(name)
        taking_part = [r for r in self.requests if r in new or draw(st.integers(0, 7)) > 0]
        scheduled = {}
        for name in draw(st.permutations(taking_part)):
            request = self.requests[name]
            if draw(st.integers(0, 9)) == 0 and not request.in_batch and name not in new:
                request.computed = 0  # preempted, not just skipped
            if not request.in_batch:
                # The runner takes what a preempted request has said for a part of its prompt.
                said = 0 if request.computed else request.outputs
                request.expected["prompt"] = request.prompt + [OUTPUT] * said
            scheduled[name] = draw(st.integers(1, request.left))
        output = self.scheduler_output(scheduled, finished, new)
        for name, request in self.requests.items():
            request.in_batch = name in scheduled
        if not scheduled:
            self.runner._update_states(output)
            return
        self.sample(draw, scheduled, output)

    def scheduler_output(self, scheduled, finished, new):
        cached = [name for name in scheduled if name not in new]
        requests = [self.requests[name] for name in cached]
        return bare_runner.step(
            scheduled,
            finished_req_ids=finished,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name,
                    prompt_token_ids=self.requests[name].prompt,
                    mm_features=[],
                    sampling_params=self.requests[name].params,
                    pooling_params=None,
                    block_ids=(self.requests[name].blocks,),
                    num_computed_tokens=0,
                    lora_request=None,
                )
                for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached,
                num_computed_tokens=[request.computed for request in requests],
                new_block_ids=[([],) for _ in requests],
                num_output_tokens=[request.outputs for request in requests],
                resumed_req_ids=set(),
                all_token_ids={},
            ),
        )

    def sample(self, draw, scheduled, output):
        """The sampling calls of the step, as `sample_tokens` makes them, each row looked at."""
        runner = self.runner
        changed = runner._update_states(output)
        info = bare_runner.arrange(runner, output)
        # Rows that moved in a step that sampled nothing are copied in the next one that does.
        quiet = not changed and self.swaps == self.swaps_sampled
        done = [r for r in info.prompt_req_ids if scheduled[r] == self.requests[r].left]
        if draw(st.booleans()):
            calls = [[name] for name in done] + [info.decode_req_ids]
        else:
            calls = [info.decode_req_ids + done]
        self.copies.clear()
        for call in filter(None, calls):
            rows = len(call) + draw(st.integers(0, 2))
            metadata = runner._prepare_sampling(changed, call, rows)
            for row, name in enumerate(call):
                found = given_to(metadata, row)
                own = {key: self.requests[name].expected[key] for key in found}
                if found != own:
                    self.wrong_rows.append(f"{name} is sampled with {found}, its own are {own}")
                self.sampled += 1
            self.quiet += quiet
            self.swaps_sampled = self.swaps
        if quiet:
            self.quiet_copies += self.copies
        for name, tokens in scheduled.items():
            request = self.requests[name]
            request.computed += tokens
            if request.left == 0:  # one more token was sampled
                runner.requests[name].output_token_ids.append(OUTPUT)
                request.outputs += 1


@pytest.mark.parametrize(
    "promise",
    [
        pytest.param("wrong_rows", marks=pytest.mark.red(r"AssertionError: r\d+ is sampled with")),
        pytest.param("quiet_copies", marks=pytest.mark.red(r"AssertionError: (async|prompt)")),
    ],
)
def test_every_row_is_sampled_as_its_request_alone(monkeypatch, promise):
    """No row has another request's values, and a step without change copies nothing."""
    seen = {"swaps": 0, "sampled": 0, "quiet": 0}

    @PROPERTY
    @given(st.data())
    def any_schedule(data):
        with monkeypatch.context() as patch:
            simulation = Simulation(patch)
            for _ in range(data.draw(st.integers(1, 12))):
                simulation.step(data.draw)
        broken = getattr(simulation, promise)
        assert not broken, broken[0]
        for key in seen:
            seen[key] += getattr(simulation, key)

    any_schedule()
    assert min(seen.values()) > 30, f"too little happened to show anything: {seen}"

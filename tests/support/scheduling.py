"""vLLM's real schedulers, driven as its engine core drives them, on a clock that the steps move.

No model runs: a step takes the seconds that a cost model says, and a request's tokens are made up.
Import this where vLLM is importable; nothing of it is imported before an :class:`Engine` is made.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

SCHED = "vllm.v1.core.sched"

# What the recipes measured for a model of 397 B on eight cards: 8 streams of 16.75 tokens/s, and
# 60 s for 250,000 tokens of prompt.
DECODE_SECONDS = 1 / 16.75
TOKEN_SECONDS = 0.95e-4
CONTEXT_SECONDS = 1.07e-9  # for a token of prompt and a token before it


@dataclass(frozen=True)
class Work:
    """A request's part of a step."""

    tokens: int
    context: int
    """Tokens computed before."""
    prefill: bool
    """These are tokens of its prompt, or ones it computes again."""


def recipe_cost(step: dict[str, Work]) -> float:
    """Seconds of a step: one pass for all that decode, and each chunk by its length and context."""
    chunks = [work for work in step.values() if work.prefill]
    seconds = DECODE_SECONDS if len(chunks) < len(step) else 0.0
    return seconds + sum(
        work.tokens * (TOKEN_SECONDS + CONTEXT_SECONDS * work.context) for work in chunks
    )


@dataclass(frozen=True)
class Setup:
    """An engine's knobs; the defaults are those of the recipe."""

    asynchronous: bool = False
    blocks: int = 3392
    block_size: int = 640
    budget: int = 4096
    """Tokens of a step."""
    sequences: int = 16
    length: int = 262_144
    aligned: bool = True
    """Whether chunks end at block boundaries, as those of hybrid models do."""
    policy: str = "fcfs"


@dataclass
class Stream:
    """What a client sees of its request."""

    arrival: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.arrival

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second in an interval."""
        return sum(begin < time <= end for time in self.times) / (end - begin)


@dataclass
class Step:
    """A step of the engine, in the order of execution."""

    begin: float
    end: float
    work: dict[str, Work]

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end - self.begin

    def chunk_of(self, name: str) -> int:
        """How many tokens of a request's prompt it computes."""
        work = self.work.get(name)
        return work.tokens if work and work.prefill else 0


class Engine:
    """A scheduler, an executor that runs one step after the other, and clients."""

    def __init__(
        self,
        folder: Path,
        setup: Setup | None = None,
        *,
        scheduler_class: Any = None,
        cost: Callable[[dict[str, Work]], float] = recipe_cost,
    ) -> None:
        self.setup = setup or Setup()
        self.cost = cost
        self.now = 0.0
        self.steps: list[Step] = []
        self.streams: dict[str, Stream] = {}
        self.scheduler = make_scheduler(folder, self.setup, scheduler_class)
        if account := getattr(self.scheduler, "long_prefills", None):
            account.clock = lambda: self.now
        self._arrivals: list[tuple[float, str, dict[str, int]]] = []
        self._queue: deque[tuple[Any, Any, Step]] = deque()
        self._busy_until = 0.0

    def add(
        self, name: str, prompt: int, *, tokens: int, at: float | None = None, **more: int
    ) -> None:
        """A request of so many prompt and answer tokens, that arrives now or later."""
        time = self.now if at is None else at
        self._arrivals.append((time, name, {"prompt": prompt, "tokens": tokens, **more}))
        self._arrivals.sort(key=lambda arrival: arrival[0])

    def abort(self, name: str) -> None:
        """As when a client hangs up."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self, until: Callable[[], bool] = lambda: False, limit: int = 100_000) -> None:
        """Step until the condition holds, or nothing is left to do."""
        for _ in range(limit):
            if until() or not self.step():
                return
        raise AssertionError(f"not done after {limit} steps")

    def step(self) -> bool:
        """What the engine core does at a time: schedule if it may, take a result if it must."""
        busy = self._queue or self.scheduler.has_requests()
        if not busy and not self._arrivals:
            return False
        if not busy:
            self.now = max(self.now, self._arrivals[0][0])
        while self._arrivals and self._arrivals[0][0] <= self.now:
            self._submit(*self._arrivals.pop(0))
        if self.scheduler.has_requests():
            self._schedule()
            if len(self._queue) < 1 + self.setup.asynchronous:
                return True
        output, result, step = self._queue.popleft()
        self.now = max(self.now, step.end)
        self._deliver(self.scheduler.update_from_output(output, result))
        return True

    def _submit(self, time: float, name: str, about: dict[str, int]) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.streams[name] = Stream(time)
        prompt = [1] * about["prompt"]
        params = SamplingParams(max_tokens=about["tokens"], ignore_eos=True)
        request = Request(
            name, prompt, params, None, arrival_time=time, priority=about.get("priority", 0)
        )
        self.scheduler.add_request(request)

    def _schedule(self) -> None:
        output = self.scheduler.schedule()
        step = Step(max(self.now, self._busy_until), 0.0, {})
        sampled = []
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            prefill = request.is_prefill_chunk or tokens > 1
            step.work[name] = Work(tokens, end - tokens, prefill)
            # A token is what its request and place make it, however the steps were cut.
            sampled.append([] if request.is_prefill_chunk else [2 + hash((name, end)) % 1000])
        # An empty step: the engine core sleeps a millisecond.
        self._busy_until = step.end = step.begin + (self.cost(step.work) if step.work else 0.001)
        self.steps.append(step)
        self._queue.append((output, _result(list(step.work), sampled), step))

    def _deliver(self, outputs: dict[int, Any]) -> None:
        for output in (one for each in outputs.values() for one in each.outputs):
            stream = self.streams[output.request_id]
            stream.tokens += output.new_token_ids
            stream.times += [self.now] * len(output.new_token_ids)


def _result(names: list[str], sampled: list[list[int]]) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    places = {name: place for place, name in enumerate(names)}
    return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)


def make_scheduler(folder: Path, setup: Setup, scheduler_class: Any = None) -> Any:
    """A scheduler of a class, or of vLLM's own for this set-up, with a cache but no model."""
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    model = ModelConfig(
        model=_checkpoint(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=setup.length,
    )
    scheduling = SchedulerConfig(
        max_num_seqs=setup.sequences,
        max_num_batched_tokens=setup.budget,
        max_model_len=setup.length,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=setup.asynchronous,
        policy=setup.policy,
    )
    cache = CacheConfig(block_size=setup.block_size, enable_prefix_caching=False)
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduling,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = setup.blocks
    layer = FullAttentionSpec(
        block_size=setup.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    made = (scheduler_class or scheduler_classes()[setup.asynchronous])(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=setup.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=setup.block_size,
        log_stats=False,
    )
    made.need_mamba_block_aligned_split = setup.aligned
    return made


def scheduler_classes(files: dict[str, Path] | None = None) -> tuple[Any, Any]:
    """The synchronous and the asynchronous class: the installed ones, or those of other files.

    ``files`` has a path each for ``scheduler`` and ``async_scheduler``. Their modules live beside
    the installed ones.
    """
    if files is None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        return Scheduler, AsyncScheduler
    installed = importlib.import_module(f"{SCHED}.scheduler")
    try:
        base = _load("scheduler", files["scheduler"])
        sys.modules[f"{SCHED}.scheduler"] = base  # what the other one imports
        return base.Scheduler, _load("async_scheduler", files["async_scheduler"]).AsyncScheduler
    finally:
        sys.modules[f"{SCHED}.scheduler"] = installed


def _load(name: str, path: Path) -> ModuleType:
    module = ModuleType(f"{SCHED}.other_{name}")
    sys.modules[module.__name__] = module
    exec(compile(path.read_text("utf-8"), path, "exec"), vars(module))
    return module


def pristine_files(tree: Path) -> dict[str, Path]:
    """Where the schedulers of a tree are as the release has them, whatever fixes were applied."""
    state = tree / "vllm" / ".gaudi-fix-pack"
    manifest = state / "manifest.json"
    rewritten = json.loads(manifest.read_text())["files"] if manifest.exists() else {}
    files = {}
    for name in ("scheduler", "async_scheduler"):
        path = f"{SCHED.replace('.', '/')}/{name}.py"
        entry = rewritten.get(path)
        files[name] = state / "objects" / entry["pristine"]["sha256"] if entry else tree / path
    return files


def _checkpoint(folder: Path) -> str:
    """A model's configuration on disk, for vLLM's own; there are no weights."""
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 8,
        "ffn_dim": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "max_position_embeddings": 1 << 20,
        "vocab_size": 2048,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)

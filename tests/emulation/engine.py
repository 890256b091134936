"""The real engine on the emulated device: ``vllm.LLM`` with the knobs that the tests turn.

One engine at a time lives in a process: vllm_gaudi keeps its configuration, and vLLM its process
groups, in globals. Importing vLLM takes about 15 s, a further engine about 2.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.emulation import gaudi, models

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

_ENVIRONMENT = {
    "VLLM_SKIP_WARMUP": "true",  # warm-up compiles graphs; there are none
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Knobs:
    """How an engine is set up. The defaults are the simplest one: synchronous, no caching."""

    model: str = "dense"
    asynchronous: bool = False
    """Asynchronous scheduling: a step is scheduled before the one before it has its tokens."""
    lazy: bool = False
    """PT_HPU_LAZY_MODE. Modules read it as they are imported, too: see docs/testing.md."""
    prefix_caching: bool = False
    blocks: int = 64
    """Blocks of the key-value cache; few make the scheduler preempt."""
    block_size: int | None = None
    """Tokens of a block; None is the platform's own choice (128, or what a hybrid model needs)."""
    length: int = 1024
    """Longest prompt and answer."""
    sequences: int = 4
    """Requests in flight."""
    chunk: int | None = None
    """Tokens of a step; shorter than a prompt it makes the prompt come in chunks."""
    compact_gdn: bool | None = None
    """VLLM_COMPACT_GDN; None leaves it unset."""
    ranks: int = 1
    """Tensor parallel ranks, each in a process of its own when there is more than one."""
    own_process: bool = False
    """Whether the engine core has its own process, as under ``vllm serve``."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables, for the life of this engine."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Further arguments of ``vllm.LLM``."""

    def variables(self) -> dict[str, str]:
        """The environment this engine is made and run in."""
        variables = {
            **_ENVIRONMENT,
            "PT_HPU_LAZY_MODE": "1" if self.lazy else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if self.own_process else "0",
        }
        if self.compact_gdn is not None:
            variables["VLLM_COMPACT_GDN"] = "1" if self.compact_gdn else "0"
        return variables | dict(self.environment)

    def llm_arguments(self, folder: Path) -> dict[str, Any]:
        """What ``vllm.LLM`` is called with."""
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": "bfloat16",
            "seed": 0,
            "max_model_len": self.length,
            "max_num_seqs": self.sequences,
            "max_num_batched_tokens": self.chunk or self.length,
            "num_gpu_blocks_override": self.blocks,
            "enable_prefix_caching": self.prefix_caching,
            "async_scheduling": self.asynchronous,
            "tensor_parallel_size": self.ranks,
            "disable_log_stats": True,
        }
        if self.block_size is not None:
            arguments["block_size"] = self.block_size
        if self.model.startswith("hybrid"):
            arguments["language_model_only"] = True
        if self.ranks > 1:
            arguments["distributed_executor_backend"] = "mp"
        return arguments | dict(self.arguments)


class Engine:
    """A living ``vllm.LLM``."""

    def __init__(self, knobs: Knobs, llm: LLM, checkpoint: Path) -> None:
        self.knobs = knobs
        self.llm = llm
        self.checkpoint = checkpoint
        self.broken = False

    def generate(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Submit prompts (lists of token ids, or what vLLM takes) together and wait for all."""
        wrapped = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in prompts]
        try:
            return self.llm.generate(wrapped, params, use_tqdm=False)
        except BaseException:
            self.broken = True
            raise

    def tokens(
        self, prompts: Sequence[Any], *, length: int = 16, **sampling: Any
    ) -> list[list[int]]:
        """The new token ids of each prompt; greedy unless told otherwise."""
        from vllm import SamplingParams

        options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": length} | sampling
        return [
            list(o.outputs[0].token_ids) for o in self.generate(prompts, SamplingParams(**options))
        ]

    @property
    def core(self) -> Any:
        """The engine core (of an engine in this process)."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """The scheduler (of an engine in this process)."""
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        """The plugin's model runner (of an engine in this process with one rank)."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def reset(self) -> None:
        """As if new: no cached prefix. Requests have all ended, or this engine is broken."""
        if self.llm.llm_engine.has_unfinished_requests() or (
            self.knobs.prefix_caching and not self.llm.reset_prefix_cache()
        ):
            self.broken = True

    def close(self) -> None:
        """End processes and forget globals, so that the next engine starts from nothing."""
        with contextlib.suppress(Exception):  # an engine that died has less to shut down
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        _forget_globals()


def _forget_globals() -> None:
    gc.collect()
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers import rotary_embedding
    from vllm_gaudi.extension.runtime import clear_config

    with contextlib.suppress(Exception):
        cleanup_dist_env_and_memory()
    clear_config()
    rotary_embedding._ROPE_DICT.clear()  # may hold a table that a skipped part left without data


class Engines:
    """Hands out engines; keeps the last one for whoever asks for the same knobs next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._current: Engine | None = None
        self._variables = contextlib.ExitStack()

    def __call__(self, **knobs: Any) -> Engine:
        """An engine with these knobs, new or as new."""
        wanted = Knobs(**knobs)
        if self._current is not None and self._current.knobs == wanted:
            self._current.reset()
        if self._current is None or self._current.broken or self._current.knobs != wanted:
            self.close()
            self._current = self._make(wanted)
        return self._current

    def _make(self, knobs: Knobs) -> Engine:
        gaudi.install()
        self._variables.enter_context(_environment(knobs.variables()))
        checkpoint = models.build(knobs.model, self.folder)
        from vllm import LLM

        # vllm_gaudi collects garbage a dozen times as it starts, half a second each on a heap
        # this big: let it look only at what the engine makes. Closing an engine undoes this.
        gc.freeze()
        try:
            return Engine(knobs, LLM(**knobs.llm_arguments(checkpoint)), checkpoint)
        except BaseException:
            _forget_globals()
            raise

    def close(self) -> None:
        """End the current engine, if any."""
        if self._current is not None:
            self._current.close()
            self._current = None
        self._variables.close()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

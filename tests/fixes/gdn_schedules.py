"""Random schedules on vLLM's real scheduler and KV-cache manager, with a model that is a hash.

The model has three groups of recurrent layers and one of attention, as Qwen3.5 has. A request's
state is a hash of all tokens it has seen; each token leaves a hash of itself in the KV cache; the
next token is a hash of the state and of all that attention sees. So one wrong word of a state, or
of a page that a living request relies on, changes the answer.

The worker does what the Gaudi runner does with requests, slots and block tables. ``repaired`` says
whether it calls gdn-prefix-cache; without it, it is stock: slots are kept over a preemption and a
hit goes on with what is in the slot.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

BLOCK = 4  # tokens of a block
GROUPS = 3  # of recurrent layers
ATTENTION = GROUPS  # the number of the attention group
VOCABULARY = 50
WORDS = np.arange(1, 7, dtype=np.uint32)  # of a state: two tensors of 2 and 4 words

# One request's tokens are attended to with these weights, so that no two can change places.
_WEIGHTS = (np.arange(4096, dtype=np.uint64) * 2654435761 + 1).astype(np.uint32)


def advance(state: np.ndarray, token: int) -> np.ndarray:
    """The state after one more token; [..., 6] words."""
    mixed = (state ^ (WORDS * np.uint32(token + 1))) * np.uint32(0x9E3779B1) + WORDS
    return mixed ^ (mixed >> np.uint32(15))


def begin() -> np.ndarray:
    """The states before the first token, [groups, 6]: zero, as a slot is."""
    return np.zeros((GROUPS, len(WORDS)), np.uint32)


def entry(token: int) -> tuple[int, int]:
    """What a token leaves in the keys and in the values."""
    return (token + 1) * 0x01000193 % 2**32, (token + 3) * 0x85EBCA6B % 2**32


def choose(state: np.ndarray, keys: np.ndarray, values: np.ndarray) -> int:
    """The next token, from the states and the KV cache of all tokens so far."""
    weights = _WEIGHTS[: len(keys)]
    seen = int(((keys ^ (values * np.uint32(3))) * weights).sum(dtype=np.uint32))
    whole = int((state * _WEIGHTS[: state.size].reshape(state.shape)).sum(dtype=np.uint32))
    return (seen * 31 + whole * 17 + (whole >> 13)) % 2**32 % VOCABULARY


def answer(prompt: list[int], length: int) -> list[int]:
    """What the model says, computed with no cache at all."""
    tokens = list(prompt)
    state = begin()
    cached = np.zeros((len(prompt) + length, 2), np.uint32)
    for place in range(len(prompt) + length - 1):
        state = advance(state, tokens[place])
        cached[place] = entry(tokens[place])
        if place + 1 == len(tokens):
            tokens.append(choose(state, cached[: place + 1, 0], cached[: place + 1, 1]))
    return tokens[len(prompt) :]


@dataclass
class Worker:
    """Runs steps of a scheduler as the Gaudi runner does."""

    blocks: int
    sequences: int
    module: Any  # the support module of gdn-prefix-cache, or None: stock
    requests: dict[str, Any] = field(default_factory=dict)
    slots_in_use: dict[str, int] = field(default_factory=dict)
    no_slot: int = 0

    def __post_init__(self) -> None:
        rows = self.sequences * GROUPS + 2
        self.slots = (torch.full((rows, 1, 2), 7.0), torch.full((rows, 2, 2), 7.0))
        shape = ((self.blocks + 1) * BLOCK, 1, 2)
        self.keys, self.values = (torch.full(shape, 5.0, dtype=torch.bfloat16) for _ in range(2))
        # The same memory, as words.
        self._states = [slot.view(rows, -1).numpy().view(np.uint32) for slot in self.slots]
        self._cache = [
            half.view(-1).view(torch.int32).numpy().view(np.uint32)
            for half in (self.keys, self.values)
        ]
        self.runner = SimpleNamespace(
            requests=self.requests,
            _gdn_req_to_base_slot=self.slots_in_use,
            _gdn_slot_free_list=list(range(self.sequences)),
            _gdn_max_reqs=self.sequences,
            _num_gdn_groups=GROUPS,
            _compact_gdn_group_offset={group: group for group in range(GROUPS)},
        )
        self.prefix_cache = None
        if self.module is not None:
            layer = self.module.Layer(self.keys, self.values, self.slots)
            pages = self.module.StatePages([layer], BLOCK, self.blocks)
            self.prefix_cache = self.module.PrefixCache(
                self.runner, pages, ATTENTION, range(GROUPS)
            )

    def step(self, scheduled: Any) -> Any:
        """What the runner returns for a ``SchedulerOutput``."""
        from vllm.v1.outputs import ModelRunnerOutput

        if self.prefix_cache is not None:
            self.prefix_cache.release_preempted(scheduled)
        self._update(scheduled)
        if self.prefix_cache is not None:
            self.prefix_cache.begin_step(scheduled)
        sampled = [self._forward(*item) for item in scheduled.num_scheduled_tokens.items()]
        if self.prefix_cache is not None:
            self.prefix_cache.end_step(scheduled)
        ids = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request: n for n, request in enumerate(ids)},
            sampled_token_ids=sampled,
        )

    def _update(self, scheduled: Any) -> None:
        free = self.runner._gdn_slot_free_list
        for request in sorted(scheduled.finished_req_ids):
            self.requests.pop(request, None)
            if request in self.slots_in_use:
                free.append(self.slots_in_use.pop(request))
        for new in scheduled.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(
                tokens=list(new.prompt_token_ids),
                block_ids=new.block_ids,
                num_computed_tokens=new.num_computed_tokens,
            )
        cached = scheduled.scheduled_cached_reqs
        for n, request in enumerate(cached.req_ids):
            state = self.requests[request]
            state.num_computed_tokens = cached.num_computed_tokens[n]
            blocks = cached.new_block_ids[n]
            if request in cached.resumed_req_ids:
                state.block_ids = blocks
                state.tokens = list(cached.all_token_ids[request])
            elif blocks is not None:
                for mine, more in zip(state.block_ids, blocks, strict=True):
                    mine.extend(more)
        for request in scheduled.num_scheduled_tokens:
            if request not in self.slots_in_use:
                self.slots_in_use[request] = free.pop()

    def _forward(self, request: str, count: int) -> list[int]:
        """Compute ``count`` tokens; the next one, where it is not known yet."""
        state = self.requests[request]
        row = self.slots_in_use[request] * GROUPS + 1
        rows = slice(row, row + GROUPS)
        states = np.concatenate([words[rows] for words in self._states], axis=1)
        start = state.num_computed_tokens
        if start == 0 and self.prefix_cache is None:
            states = begin()  # the layers take no initial state then, whatever is in the slot
        end = start + count
        table = np.array(state.block_ids[ATTENTION], np.int64)
        places = np.arange(end)
        cells = table[places // BLOCK] * BLOCK + places % BLOCK
        for place in range(start, end):
            token = state.tokens[place]
            states = advance(states, token)
            for half, word in zip(self._cache, entry(token), strict=True):
                half[cells[place]] = word
        for words, part in zip(self._states, np.split(states, [2], axis=1), strict=True):
            words[rows] = part
        if end < len(state.tokens):
            return []
        keys, values = (half[cells] for half in self._cache)
        state.tokens.append(choose(states, keys, values))
        return state.tokens[-1:]


def _vllm_config(blocks: int, budget: int, sequences: int, asynchronous: bool) -> Any:
    """What a scheduler reads of a VllmConfig: the real parts where they need no model."""
    from vllm.config import CacheConfig, ObservabilityConfig, ParallelConfig, SchedulerConfig

    length = 512
    cache = CacheConfig(block_size=16, enable_prefix_caching=True, mamba_cache_mode="align")
    cache.block_size = BLOCK
    cache.num_gpu_blocks = blocks
    return SimpleNamespace(
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=sequences,
            max_model_len=length,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
        ),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        observability_config=ObservabilityConfig(),
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            is_diffusion=False,
            is_multimodal_model=False,
            supports_multimodal_inputs=False,
            max_model_len=length,
            enable_return_routed_experts=False,
            return_sampling_mask=False,
            uses_mrope=False,
        ),
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        speculative_config=None,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        max_concurrent_batches=2 if asynchronous else 1,
        max_in_flight_tokens=2 * budget if asynchronous else budget,
        use_v2_model_runner=False,
        is_mm_encoder_only=False,
    )


def make_scheduler(blocks: int, budget: int, sequences: int, asynchronous: bool) -> Any:
    """vLLM's own scheduler over three recurrent groups and one of attention."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    recurrent = MambaSpec(
        block_size=BLOCK,
        shapes=((1, 2), (2, 2)),
        dtypes=(torch.float32, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode="align",
    )
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=2, dtype=torch.bfloat16
    )
    groups = [KVCacheGroupSpec([f"gdn{n}"], recurrent) for n in range(GROUPS)]
    groups.append(KVCacheGroupSpec(["attention"], attention))
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=_vllm_config(blocks, budget, sequences, asynchronous),
        kv_cache_config=config,
        structured_output_manager=SimpleNamespace(
            should_advance=lambda request: False, accept_tokens=lambda request, tokens: True
        ),
        block_size=BLOCK,
        mm_registry=SimpleNamespace(
            supports_multimodal_inputs=lambda model: False,
            __class__=type(MULTIMODAL_REGISTRY),
        ),
        log_stats=False,
    )


class Schedule:
    """One random schedule: requests that begin alike, arrive at any time and may be aborted."""

    def __init__(self, seed: int, module: Any) -> None:
        self.random = random.Random(seed)
        self.asynchronous = self.random.random() < 0.5
        sequences = self.random.randint(2, 4)
        blocks = self.random.choice([16, 24, 40, 90])
        budget = self.random.randint(BLOCK, 8 * BLOCK)
        self.scheduler = make_scheduler(blocks, budget, sequences, self.asynchronous)
        self.worker = Worker(blocks, sequences, module)
        self.texts: list[list[int]] = [[]]
        self.waiting_for: dict[str, tuple[list[int], int]] = {}
        self.seen = Counter()  # type: ignore[var-annotated]

    def run(self) -> Counter[str]:
        """Counts of what has happened: answers, wrong ones, hits, preemptions, ..."""
        to_come = 10
        in_flight: list[tuple[Any, Any]] = []
        requests: dict[str, Any] = {}
        while to_come or self.waiting_for:
            arrive = 0
            if not self.waiting_for or self.random.random() < 0.3:
                arrive = min(to_come, self.random.randint(1, 3))
            for _ in range(arrive):
                to_come -= 1
                request = self._request(str(to_come))
                requests[request.request_id] = request
                self.scheduler.add_request(request)
            self._disturb()
            scheduled = self.scheduler.schedule()
            self._count(scheduled, requests)
            in_flight.append((scheduled, self.worker.step(scheduled)))
            if len(in_flight) > int(self.asynchronous):
                self.scheduler.update_from_output(*in_flight.pop(0))
            self._collect(requests)
        return self.seen

    def _request(self, name: str) -> Any:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        prompt = list(self.random.choice(self.texts))
        if self.random.random() < 0.4:  # another continuation; else the next turn
            prompt = prompt[: self.random.randint(0, len(prompt))]
        prompt += [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 12))]
        length = self.random.randint(1, 12)
        self.waiting_for[name] = (prompt, length)
        return Request(
            name,
            prompt,
            SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0),
            None,
            cache_salt=self.random.choice([None, None, None, "salt"]),
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )

    def _disturb(self) -> None:
        """Now and then a request is aborted, or the cache is reset under running requests."""
        from vllm.v1.request import RequestStatus

        if self.waiting_for and self.random.random() < 0.02:
            name = self.random.choice(sorted(self.waiting_for))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            del self.waiting_for[name]
            self.seen["aborted"] += 1
        if self.random.random() < 0.01:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
            self.seen["reset"] += 1

    def _count(self, scheduled: Any, requests: dict[str, Any]) -> None:
        cached = scheduled.scheduled_cached_reqs
        begun = [new.num_computed_tokens for new in scheduled.scheduled_new_reqs]
        begun += [
            computed
            for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if request in cached.resumed_req_ids
        ]
        hits = [computed for computed in begun if computed]
        self.seen["hits"] += len(hits)
        self.seen["several hits in a step"] += len(hits) > 1
        self.seen["resumed"] += len(cached.resumed_req_ids)
        self.seen["chunks over several blocks"] += sum(
            count > BLOCK for count in scheduled.num_scheduled_tokens.values()
        )

    def _collect(self, requests: dict[str, Any]) -> None:
        for name in [name for name in self.waiting_for if requests[name].is_finished()]:
            prompt, length = self.waiting_for.pop(name)
            said = list(requests[name].output_token_ids)
            self.seen["answers"] += 1
            self.seen["wrong"] += said != answer(prompt, length)
            self.texts.append(prompt + said)


def run(seeds: range, module: Any) -> Counter[str]:
    """All schedules of these seeds."""
    total: Counter[str] = Counter()
    for seed in seeds:
        schedule = Schedule(seed, module)
        total += schedule.run()
        if schedule.worker.prefix_cache is not None:
            total["stored"] += schedule.worker.prefix_cache.counts.stored
            total["restored"] += schedule.worker.prefix_cache.counts.restored
    return total

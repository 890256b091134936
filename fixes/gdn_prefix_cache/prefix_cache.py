"""Keeps the states of Gated DeltaNet layers with the prefix cache (fix: gdn-prefix-cache).

The KV-cache manager gives every GDN layer blocks too, with a page of memory in each attention
layer behind them. The plugin leaves those pages unused: its GDN layers have one slot a request.
Here a page is the place for one state: the state after the last token of a full block is stored in
that block's own page, and whoever hits the block has it put into his slot. The manager decides what
is kept and for how long, for states as for keys and values.

Words: a *block* is the manager's (`block_size` tokens), a *page* is what one attention layer holds
for a block (half of it in the keys' tensor, half in the values'), a *row* is one group's part of a
request's slot: the place of one state in each GDN layer of that group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger

logger = init_logger(__name__)

NULL_BLOCK = 0  # the manager's filler for blocks that are not there; everybody's, so nobody's

GDN_TYPES = ("GDN_ATTN", "LINEAR")  # of vLLM's MambaAttentionBackendEnum, as the runner counts them

OFF = "or leave out --enable-prefix-caching"


class Refused(RuntimeError):
    """The engine must not start like this. The text says what to set."""


class StateNotStored(RuntimeError):
    """A block was hit whose state was never stored. Nothing else may take its place."""


# What it refuses to start with -------------------------------------------------------------------


def check_configuration(runner: Any) -> None:
    """Refuse settings that the design does not cover; before the model is loaded.

    ``runner`` is the ``HPUModelRunner`` of a GDN model with prefix caching on.
    """
    config = runner.vllm_config
    parallel = config.parallel_config
    wrong = [
        (config.kv_transfer_config is not None, "a KV connector", "leave out --kv-transfer-config"),
        (
            not runner._compact_gdn_enabled,
            "VLLM_COMPACT_GDN off (states would be written to the block they were read from)",
            "set VLLM_COMPACT_GDN=1",
        ),
        (not runner.use_hybrid_cache, "VLLM_USE_HYBRID_CACHE off", "set VLLM_USE_HYBRID_CACHE=1"),
        (
            config.speculative_config is not None,
            "speculative decoding",
            "leave out --speculative-config",
        ),
        (runner.use_contiguous_pa, "contiguous PA", "set VLLM_CONTIGUOUS_PA=0"),
        (runner.is_pooling_model, "a pooling model", "use a generating one"),
        (
            max(
                parallel.pipeline_parallel_size,
                parallel.decode_context_parallel_size,
                parallel.prefill_context_parallel_size,
            )
            > 1,
            "pipeline or context parallelism",
            "use --tensor-parallel-size alone",
        ),
        # A request that was scheduled in a step can be preempted in the same step; its blocks
        # then count as computed and are not.
        (
            config.scheduler_config.policy != "fcfs",
            "priority scheduling",
            "use --scheduling-policy fcfs",
        ),
        (
            config.cache_config.mamba_cache_mode != "align",
            f"mamba_cache_mode {config.cache_config.mamba_cache_mode!r}",
            "use --mamba-cache-mode align",
        ),
    ]
    for is_so, what, remedy in wrong:
        if is_so:
            raise Refused(
                f"gdn-prefix-cache: prefix caching on a Gated DeltaNet model does not work with"
                f" {what}; {remedy} {OFF}"
            )


def chunks_end_at_blocks(scheduler: Any) -> bool:
    """Whether a scheduler must end chunks where blocks end: states exist at ends of chunks only."""
    return bool(scheduler.vllm_config.cache_config.enable_prefix_caching) and any(
        getattr(spec.mamba_type, "name", "") in GDN_TYPES
        for group in scheduler.kv_cache_config.kv_cache_groups
        if hasattr(spec := group.kv_cache_spec, "mamba_type")
    )


def _need(condition: bool, what: str) -> None:
    """Refuse a layout of the caches that is not the one this module was written for."""
    if not condition:
        raise Refused(f"gdn-prefix-cache: {what}; take out the fix {OFF}")


def attach(runner: Any, config: Any, caches: dict[str, Any]) -> PrefixCache:
    """The prefix cache of a runner whose caches have just been allocated.

    ``config`` is vLLM's ``KVCacheConfig``, ``caches`` the tensors by layer name: ``(keys, values,
    None, None)`` of attention layers, ``(conv, ssm)`` of GDN layers. Raises :class:`Refused` for
    a layout that is not covered and for a device that does not give back what was written.
    """
    states = runner._compact_gdn_group_ids
    groups = config.kv_cache_groups
    attention = [n for n in range(len(groups)) if n not in states]
    kinds = [type(groups[n].kv_cache_spec).__name__ for n in attention]
    _need(
        kinds == ["FullAttentionSpec"],
        f"needs one group of full attention beside the compact GDN groups, found {kinds}",
    )
    sizes = {group.kv_cache_spec.block_size for group in groups}
    _need(len(sizes) == 1, f"needs one block size for all groups, found {sorted(sizes)} tokens")
    (block_size,) = sizes
    unit = runner.vllm_config.cache_config.prefix_match_unit
    _need(
        unit in (None, block_size),
        f"needs hits of whole blocks ({block_size} tokens), prefix_match_unit is {unit}",
    )
    layers = {len(group.layer_names) for group in groups}
    _need(len(layers) == 1, f"needs groups of as many layers each, found {sorted(layers)}")
    for number in states:
        spec = groups[number].kv_cache_spec
        checkpoints = getattr(spec, "num_prefill_checkpoint_blocks", 0)  # not in vLLM 0.26
        _need(
            spec.num_speculative_blocks == checkpoints == 0 and spec.mamba_cache_mode == "align",
            f"needs one block a state in mode 'align', found {spec}",
        )
    pad = runner._PAD_BLOCK_ID * runner.attn_block_size
    _need(
        pad >= config.num_blocks * block_size,
        f"the plugin's padding goes to token {pad} of the KV cache, inside the pool of"
        f" {config.num_blocks} blocks of {block_size}: apply the fix hybrid-decode-pad as well",
    )
    # Layer l of every GDN group shares its slots with the others, and uses the pages of layer l
    # of the attention group: three groups, three different blocks.
    pages = []
    for names in zip(*(groups[n].layer_names for n in [*attention, *sorted(states)]), strict=True):
        keys, values, *scales = caches[names[0]]
        shared = [caches[name] for name in names[1:]]
        _need(
            all(a is b for other in shared for a, b in zip(shared[0], other, strict=True)),
            f"needs slots shared by {', '.join(names[1:])}",
        )
        _need(all(scale is None for scale in scales), "the KV cache has scales: not covered")
        pages.append(Layer(keys, values, tuple(shared[0])))
    moved = StatePages(pages, block_size, config.num_blocks)
    moved.self_test()
    logger.info(
        "gdn-prefix-cache: states of %d bytes in pages of %d, %d layers, blocks of %d tokens",
        sum(moved.rows) * WORD.itemsize,
        2 * moved.half * WORD.itemsize,
        len(pages),
        block_size,
    )
    return PrefixCache(runner, moved, attention[0], sorted(states))


# Bytes: from slots into pages and back -----------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One attention layer's cache, and the slots of the GDN layers that use its pages.

    ``keys`` and ``values``: [tokens, heads, dim], ``block_size`` tokens a block and a few more
    behind the pool for padding. ``slots``: tensors whose first dimension is the row.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Stretch:
    """A part of a state that is contiguous in a row and in a page; in words."""

    slot: int  # index into Layer.slots
    half: int  # 0: keys, 1: values
    in_row: int
    in_half: int
    length: int


# Integers: no kernel that moves them has a reason to change the bits of a NaN.
WORD = torch.int32


class StatePages:
    """Moves states between slots and pages, in all layers, bit by bit.

    A page is one run of words, the keys' half first; the tensors of a state lie in it one after
    the other. Every copy is from one contiguous slice into another, and all copies have one of the
    few shapes of ``stretches``: no gathering, nothing in between, nothing new to compile.
    """

    def __init__(self, layers: Sequence[Layer], block_size: int, num_blocks: int) -> None:
        """``block_size`` in tokens; ``num_blocks`` of the pool, without the padding behind it."""
        first = layers[0]
        for layer in layers:
            for half in (layer.keys, layer.values):
                _need(
                    half.dtype.itemsize == 2,
                    f"needs a KV cache of 2 bytes an element, found {half.dtype}",
                )
                _need(
                    half.shape == first.keys.shape and half.shape[0] >= num_blocks * block_size,
                    f"needs keys and values of {num_blocks} blocks of {block_size} tokens or more"
                    f" in every layer, found {tuple(half.shape)}",
                )
            _need(
                [slot[0].nbytes for slot in layer.slots]
                == [slot[0].nbytes for slot in first.slots],
                "needs states of the same size in every layer",
            )
        self.layers = list(layers)
        self.block_size = block_size
        self.half = self._in_words(block_size * first.keys[0].nbytes)
        self.rows = [self._in_words(slot[0].nbytes) for slot in first.slots]
        _need(
            sum(self.rows) <= 2 * self.half,
            f"a state of {sum(self.rows)} words of {WORD.itemsize} bytes does not fit into a page"
            f" of {2 * self.half}",
        )
        self.stretches = list(self._stretches())
        # Per layer: (keys, values) and slots, each as one run of words.
        self._halves = [[self._words(half) for half in (each.keys, each.values)] for each in layers]
        self._slots = [[self._words(slot) for slot in layer.slots] for layer in layers]

    @staticmethod
    def _in_words(size: int) -> int:
        _need(size % WORD.itemsize == 0, f"{size} bytes are no whole number of words")
        return size // int(WORD.itemsize)

    @staticmethod
    def _words(tensor: torch.Tensor) -> torch.Tensor:
        _need(tensor.is_contiguous(), "needs contiguous caches")
        return tensor.view(-1).view(WORD)

    def _stretches(self) -> Iterator[_Stretch]:
        start = 0  # where in the page the tensor begins
        for slot, size in enumerate(self.rows):
            for half in (0, 1):
                low = max(start, half * self.half)
                high = min(start + size, (half + 1) * self.half)
                if low < high:
                    yield _Stretch(slot, half, low - start, low - half * self.half, high - low)
            start += size

    def _pairs(
        self, rows: Sequence[int], blocks: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The slices of slots and of pages that belong together, layer by layer."""
        for halves, slots in zip(self._halves, self._slots, strict=True):
            for row, block in zip(rows, blocks, strict=True):
                for part in self.stretches:
                    in_slots = row * self.rows[part.slot] + part.in_row
                    in_pages = block * self.half + part.in_half
                    yield (
                        slots[part.slot][in_slots : in_slots + part.length],
                        halves[part.half][in_pages : in_pages + part.length],
                    )

    def store(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy the states in ``rows`` into the pages of as many ``blocks``."""
        for state, page in self._pairs(rows, blocks):
            page.copy_(state)

    def load(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy the states in the pages of ``blocks`` into as many ``rows``."""
        for state, page in self._pairs(rows, blocks):
            state.copy_(page)

    def clear_rows(self, rows: Iterable[int]) -> None:
        """Zero the states in ``rows``."""
        for row in rows:
            for slots in self._slots:
                for words, size in zip(slots, self.rows, strict=True):
                    words[row * size : (row + 1) * size].zero_()

    def clear_pages(self, blocks: Iterable[int]) -> None:
        """Zero the pages of ``blocks``."""
        for block in blocks:
            for halves in self._halves:
                for words in halves:
                    words[block * self.half : (block + 1) * self.half].zero_()

    def self_test(self) -> None:
        """Refuse a device on which a state in a page is not bit for bit the one that was stored.

        Uses row 1 and the null block, which nobody relies on, and leaves zeros in both.
        """
        generator = torch.Generator().manual_seed(0)
        row = 1
        written = []
        for slots in self._slots:
            for words, size in zip(slots, self.rows, strict=True):
                # All kinds of NaN are among them, whatever type the words stand for.
                bits = torch.randint(-(2**31), 2**31, (size,), generator=generator).to(WORD)
                words[row * size : (row + 1) * size].copy_(bits)
                written.append(bits)
        self.store([row], [NULL_BLOCK])
        self.clear_rows([row])
        self.load([row], [NULL_BLOCK])
        read = [
            words[row * size : (row + 1) * size].cpu()
            for slots in self._slots
            for words, size in zip(slots, self.rows, strict=True)
        ]
        same = all(map(torch.equal, written, read))
        self.clear_rows([row])
        self.clear_pages([NULL_BLOCK])
        _need(
            same,
            "this device does not give back a state bit for bit that was stored in a page of the"
            " KV cache",
        )


# Steps: what is stored, restored and zeroed when -------------------------------------------------


@dataclass
class Counts:
    """What has happened so far: states stored, restored and begun anew, pages zeroed."""

    stored: int = 0
    restored: int = 0
    zeroed: int = 0
    zeroed_pages: int = 0


class PrefixCache:
    """The three calls of a step. Nothing in them waits for the device."""

    def __init__(
        self, runner: Any, pages: StatePages, attention_group: int, gdn_groups: Sequence[int]
    ) -> None:
        """The group numbers are those of ``KVCacheConfig.kv_cache_groups``."""
        self.runner = runner
        self.pages = pages
        self.attention_group = attention_group
        self.gdn_groups = list(gdn_groups)
        self.block_size = pages.block_size
        self.tokens_stored: dict[int, int] = {}
        """The blocks whose page holds a state, and the number of tokens it is the state after."""
        self.counts = Counts()

    def release_preempted(self, step: Any) -> None:
        """Before the runner updates its requests: preempted ones give their slot back.

        They begin anew, so a slot they kept would only be missing (the plugin has as many slots as
        running requests). Sorted, so that all ranks hand out the same slots.
        """
        for request in sorted(step.preempted_req_ids or ()):
            if request not in step.num_scheduled_tokens:
                slot = self.runner._gdn_req_to_base_slot.pop(request, None)
                if slot is not None:
                    self.runner._gdn_slot_free_list.append(slot)

    def begin_step(self, step: Any) -> None:
        """After that and before the first forward: new blocks and slots are zeroed, hits restored.

        ``step`` is vLLM's ``SchedulerOutput``. A request begins when it is new or resumes after a
        preemption; one that was merely left out for a step still has its state in its slot.
        """
        begun = [
            (new.req_id, new.block_ids, new.num_computed_tokens) for new in step.scheduled_new_reqs
        ]
        taken: list[int] = []  # blocks that the attention layers will write
        cached = step.scheduled_cached_reqs
        for request, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request in cached.resumed_req_ids:
                begun.append((request, blocks, computed))
            elif blocks is not None:
                taken += self._allocated(blocks, 0)
        for _, blocks, computed in begun:
            taken += self._allocated(blocks, computed // self.block_size)
        # What a page held before is no key or value: a NaN there would reach the output although
        # the token is masked.
        self.pages.clear_pages(taken)
        self.counts.zeroed_pages += len(taken)

        fresh: list[int] = []
        rows: list[int] = []
        sources: list[int] = []
        for request, blocks, computed in begun:
            if computed:
                rows += self._rows(request)
                sources += self._sources(request, blocks, computed)
            else:
                fresh += self._rows(request)
        self.pages.clear_rows(fresh)
        self.counts.zeroed += len(fresh)
        self.pages.load(rows, sources)
        self.counts.restored += len(rows)

    def end_step(self, step: Any) -> None:
        """After the last forward: the states of requests that have filled a block are stored."""
        rows: list[int] = []
        targets: list[int] = []
        for request, scheduled in step.num_scheduled_tokens.items():
            state = self.runner.requests[request]
            tokens = state.num_computed_tokens + scheduled
            if tokens % self.block_size == 0:
                index = tokens // self.block_size - 1
                blocks = [state.block_ids[group][index] for group in self.gdn_groups]
                if NULL_BLOCK not in blocks:
                    rows += self._rows(request)
                    targets += blocks
                    self.tokens_stored.update(dict.fromkeys(blocks, tokens))
        self.pages.store(rows, targets)
        self.counts.stored += len(rows)

    def _rows(self, request: str) -> list[int]:
        """The rows of a request's slot, by group: as in the runner's prepare_mamba_state_idxs."""
        slot = self.runner._gdn_req_to_base_slot[request]
        offsets = self.runner._compact_gdn_group_offset
        return [
            slot * self.runner._num_gdn_groups + offsets[group] + 1 for group in self.gdn_groups
        ]

    def _allocated(self, blocks: Sequence[Sequence[int]], hits: int) -> list[int]:
        """Take note of newly allocated blocks, all but the first ``hits`` of each group.

        A state that such a page held is gone. Returns those of the attention group.
        """
        for group in blocks:
            for block in group[hits:]:
                self.tokens_stored.pop(block, None)
        return list(blocks[self.attention_group][hits:])

    def _sources(self, request: str, blocks: Sequence[Sequence[int]], computed: int) -> list[int]:
        """The blocks with the state after ``computed`` tokens, one a group."""
        index, rest = divmod(computed, self.block_size)
        found = [blocks[group][index - 1] for group in self.gdn_groups] if rest == 0 else []
        if not found or any(self.tokens_stored.get(block) != computed for block in found):
            stored = {block: self.tokens_stored.get(block) for block in found}
            raise StateNotStored(
                f"gdn-prefix-cache: request {request} has a prefix-cache hit of {computed} tokens,"
                f" but no state was stored after them (blocks of {self.block_size} tokens; states"
                f" by block: {stored}). Please report this; leave out --enable-prefix-caching"
                " until it is found"
            )
        return found

"""hybrid-decode-pad: padded decode rows write outside the pool, also where KV blocks are split.

What a user sees: a model with recurrent layers (Qwen3.5, Qwen3-Next and their kind) answers
differently, and worse, when it is busy: text that derails for no reason, never when a request is
alone in a step whose size needs no padding. With prefix caching the damaged block is served again.

Why: a decode step is padded to a bucket's batch size, and each padding row writes its key and
value to a block that exists for nothing else, one after those of the pool. The runner takes
`num_blocks` for its number. Where recurrent layers share the pool, the platform makes a KV block
as large as their state (896 tokens for a 27B, 640 for a 397B) while the kernels go on in blocks of
128: attention tensors and block tables then count kernel blocks, 7 or 5 of them a KV block. Kernel
block `num_blocks` is one in KV block `num_blocks // 7`, which belongs to some request. Each padded
decode step overwrites one slot a padding row in it. (What is read for a padding row is masked.)

What is changed: `_PAD_BLOCK_ID` is `num_blocks` times the kernel blocks of a KV block of the
attention layers that decode addresses, `_PAD_SLOT_ID` follows it. Every branch of
`initialize_kv_cache` allocates one KV block or one kernel block more than the pool, so the block
exists in each; in the hybrid one it is the last. A line at start-up says whether the block was
moved, from where to where. Nothing else is counted in kernel blocks: see below.

Reference: none. Blocks came to be split with vllm-gaudi commit 57b36899; related: #951 (the pad of
the recurrent states), #898 and #1007 (the padding of block lists), #1317, #1319, #1327 (slots of
hybrids). Releases: v0.26.0 and v0.30.0, same code.

Other places with the pattern:
* `get_habana_paged_attn_buffers` pads block lists with the same number, and on v0.30.0 caps a
  bucket of contiguous attention at one more, which was too few and is right now; `hpu_eagle` has
  both numbers for draft steps: all of them read the two attributes.
* `_MAMBA_PAD_BLOCK_ID`: left. Recurrent states have a row a KV block and one more.
* `_dummy_num_blocks` is the length of a row of zeros: left.
* `bucketing_manager.num_hpu_blocks` bounds the buckets that are warmed up; decode buckets count
  kernel blocks, so it is low for split blocks. Left: a step above it still runs, and another bound
  would change which graphs are compiled.
* The defragmenter maps KV block ids, while decode asks it for kernel block ids. It is on with
  contiguous attention only, and leaves an id beyond those it has seen as it is, as this one: left.

Known limit: attention groups whose kernel blocks differ in size are addressed by the size of the
first one; vllm-gaudi logs a warning there and this fix follows it.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="padded decode rows write outside the pool, also where KV blocks are split",
    symptom="a hybrid model's answers derail under load: padding overwrites a request's block",
    references=(
        "https://github.com/vllm-project/vllm-gaudi/pull/951",
        "https://github.com/vllm-project/vllm-gaudi/pull/1327",
    ),
    drop_when="vllm-gaudi counts _PAD_BLOCK_ID in kernel blocks",
)


@site("vllm_gaudi/v1/worker/hpu_model_runner.py", "HPUModelRunner.initialize_kv_cache")
def pad_block_beyond_the_pool(code: Definition) -> None:
    """Count the padding block in the blocks that decode addresses."""
    code.replace_statement(
        "self._PAD_BLOCK_ID = num_blocks",
        """
        # Block tables and attention tensors count kernel blocks, the pool counts KV blocks.
        kernel_blocks_per_kv_block = next(
            (group.kv_cache_spec.block_size // self.attn_block_size
             for group in kv_cache_config.kv_cache_groups
             if isinstance(group.kv_cache_spec, FullAttentionSpec)), 1)
        self._PAD_BLOCK_ID = num_blocks * kernel_blocks_per_kv_block
        if self._PAD_BLOCK_ID == num_blocks:
            logger.info("Decode padding block %d not moved: KV blocks are not split", num_blocks)
        else:
            logger.info("Decode padding block moved from %d, inside the pool, to %d: "
                        "%d KV blocks of %d kernel blocks", num_blocks, self._PAD_BLOCK_ID,
                        num_blocks, kernel_blocks_per_kv_block)
        """,
    )
    code.replace_expression(
        "num_blocks * self.attn_block_size", "self._PAD_BLOCK_ID * self.attn_block_size"
    )

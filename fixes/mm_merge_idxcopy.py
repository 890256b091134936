"""mm-merge-idxcopy: image embeddings are merged by one index copy, and a wrong number says so.

What a user sees: with several images in a prompt, or in prompts of one step, the graph compiler
fails in the merge of their embeddings, or compiles it anew for each of them.

Why: the plugin's `_merge_multimodal_embeddings`, which it puts in the place of vLLM's, writes the
rows of a mask by `masked_scatter_`. The mask of one bool a token is broadcast over the hidden
size, and how many elements are written depends on the data: a dynamic shape over tokens times
hidden size. Models with M-RoPE (Qwen2.5-VL, Qwen3-VL, Qwen3.5) are given an index by the runner
and take another branch, unless they make a mask themselves; Gemma 3, Pixtral, InternVL, Llama 4
and Kimi are given the mask. The four branches also disagree about a wrong number of embeddings:
one raises the error that names both numbers, one a bare RuntimeError, two an IndexError, and with
a mask that has fewer places than there are rows the rest is dropped in silence. And one branch
does not convert embeddings to the type of the rows they go into, which raises.

What is changed: all branches are one. A mask becomes an index on the host, where its number of
rows is no dynamic shape of the device's; the number is compared; one `index_copy_` writes the
converted rows in place.

A mask on the device is copied to the host for that: one byte a token, in steps that have
multimodal embeddings only (an index, and every decode step, costs nothing).

Reference: vLLM #22105 put `masked_scatter_` there, #16229 is the merge by index; vllm-gaudi #1235
makes the runner pass an index for M-RoPE. Releases: v0.26.0 and v0.30.0, same code.

Other places with the pattern:
* `HPUModelRunner._gather_mm_embeddings`, which has the mask on the host and passes it on the
  device: left. Models whose image token is outside their vocabulary need the mask as such
  (`SupportsMultiModal._embed_text_input_ids` fills by it).
* vLLM's own `_merge_multimodal_embeddings`: left, the plugin replaces it.
* `vllm_gaudi/models/interfaces.py` has the word in a string and is not installed: left.

Known limit: that the device compiles the index copy is what the M-RoPE branch shows on it; it
could not be run here.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="embeddings of images are merged by one index copy; a wrong number is a clear error",
    symptom="several images in a step do not compile, or a wrong number of embeddings is dropped"
    " in silence",
    references=(
        "https://github.com/vllm-project/vllm/pull/22105",
        "https://github.com/vllm-project/vllm/pull/16229",
        "https://github.com/vllm-project/vllm-gaudi/pull/1235",
    ),
    drop_when="vllm-gaudi's _merge_multimodal_embeddings has no masked_scatter_",
)


@site("vllm_gaudi/models/utils.py", "_merge_multimodal_embeddings")
def one_index_copy(code: Definition) -> None:
    """Everything after the embeddings are one tensor."""
    code.replace_statement(
        """
        input_dtype = ...
        if inputs_embeds.ndim == 3 and mm_embeds_flat.ndim == 2: ...
        if is_multimodal.dtype != torch.bool: ...
        try: ...
        except RuntimeError as e: ...
        return inputs_embeds
        """,
        """
        if is_multimodal.dtype == torch.bool:
            # How many rows it names is known on the host only without a dynamic shape.
            rows = is_multimodal.cpu().flatten().nonzero().flatten().to(inputs_embeds.device)
        else:
            rows = is_multimodal
        if len(mm_embeds_flat) != len(rows):
            expr = _embedding_count_expression(multimodal_embeddings)
            raise ValueError(
                f"Attempted to assign {expr} = {len(mm_embeds_flat)} "
                f"multimodal tokens to {len(rows)} placeholders"
            )
        # A view: the given tensor itself is written, [T, H] or [B, S, H].
        by_token = inputs_embeds.view(-1, inputs_embeds.shape[-1])
        by_token.index_copy_(0, rows, mm_embeds_flat.to(inputs_embeds.dtype))
        return inputs_embeds
        """,
    )

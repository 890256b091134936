"""mm-encoder-budget: a call of the vision encoder holds a limited number of patches (opt-in).

What a user sees: a prompt with many large images, or several such prompts in one step, ends the
engine out of memory in the encoder, although the same images one at a time are fine.

Why: `HPUModelRunner._execute_mm_encoder` encodes every item of the step's requests that is not
cached, whatever part of it the scheduler asked for, and hands each run of items of one modality
to the model in one call. The budget of the scheduler (`encoder_compute_budget`) is not looked at:
sixteen images of 2048 x 2048 are one call with 262,144 patches.

What is changed: with `VLLM_HPU_MM_ENCODER_MAX_PATCHES` set, the items are cut into consecutive
calls with at most so many patches; an item that is larger comes alone. Which items are encoded,
their order, the grouping by modality, and what is in the cache stay as they are. Each call's
inputs are released before those of the next are put on the device, and in lazy mode each call is
a graph of its own, without which the peak would not drop. Warm-up calls are held to it too. Unset
is stock. A value that is no positive integer stops the start with a message that says so.

The patches of an item are the product of its grid (`image_grid_thw`, `video_grid_thw`,
`grid_thws`, `image_grid_hws`). With patches of 16 pixels, 65,536 are an image of 4096 x 4096,
16,384 tokens after the merge of four.

Reference: none found upstream. Related: vllm-gaudi #1636, #1651 and #1744 (the warm-up of
encoders). Releases: v0.26.0 and v0.30.0; the function that groups items has another name there,
which does not matter here.

Other places with the pattern:
* `_get_mm_dummy_batch` makes the calls of the warm-up: changed.
* `_extract_mm_kwargs` hands all items of a step to models that take raw inputs: left. There the
  inputs are those of the forward pass itself.
* Items that the scheduler did not ask for, and items that were consumed, evicted and are encoded
  again with every further chunk of their prompt: left. That changes what is encoded, not how much
  at a time.

Known limit: an item without a grid (Gemma 3, Pixtral, audio) counts as many patches as it becomes
embeddings, which is less than its patches where they are merged. The outputs of all items of a
step are alive together, as before. What the peak is on a card could not be measured here.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

RUNNER = "vllm_gaudi/v1/worker/hpu_model_runner.py"

FIX = Fix(
    summary="a call of the vision encoder holds a limited number of patches",
    symptom="a prompt with many large images ends the engine out of memory in the encoder",
    references=(),
    drop_when="vllm-gaudi limits what one call of embed_multimodal is given",
    environment={
        "VLLM_HPU_MM_ENCODER_MAX_PATCHES": "patches a call of the encoder may hold (65536 is one"
        " image of 4096 x 4096 with patches of 16 pixels); unset is no limit"
    },
    support={"vllm_gaudi/v1/worker/gaudi_fix_mm_encoder_budget.py": "encoder_budget.py"},
)


@site(RUNNER, "HPUModelRunner.__init__")
def budget(code: Definition) -> None:
    """Read at the start, so that a bad value stops it."""
    code.insert_first(
        """
        from vllm_gaudi.v1.worker.gaudi_fix_mm_encoder_budget import EncoderBudget
        self.mm_encoder_budget = EncoderBudget.from_environment()
        """
    )


@site(RUNNER, "HPUModelRunner._execute_mm_encoder")
def several_calls(code: Definition) -> None:
    """The loop over groups runs once a cut; it reads the cut by the name the items had."""
    code.insert_after(
        "for output in curr_group_outputs: ...", "self.mm_encoder_budget.release(mm_kwargs_group)"
    )
    code.wrap(
        "for _, num_items, mm_kwargs_group in ...: ...",
        "for mm_kwargs in self.mm_encoder_budget.cuts(mm_kwargs, mm_hashes_pos):",
    )


@site(RUNNER, "HPUModelRunner._get_mm_dummy_batch")
def warm_up(code: Definition) -> None:
    """As many dummies as a call may hold."""
    code.replace_expression(
        "[(modality, dummy_mm_item)] * batch",
        "self.mm_encoder_budget.dummies((modality, dummy_mm_item), batch)",
    )

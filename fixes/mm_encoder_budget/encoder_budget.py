"""How many patches one call of the multimodal encoder may hold (fix: mm-encoder-budget)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import habana_frameworks.torch as htorch

VARIABLE = "VLLM_HPU_MM_ENCODER_MAX_PATCHES"

# What models call the tensor with the grid of an item: image_grid_thw, grid_thws, image_grid_hws.
_GRIDS = ("grid_thw", "grid_thws", "grid_hws")

# As vLLM has them: the modality and the tensors of an item by name, None where they are elsewhere.
Item = tuple[str, Any]


class EncoderBudget:
    """Cuts the items of a step into the calls that the budget allows; without one, a single cut."""

    def __init__(self, max_patches: int | None) -> None:
        self.max_patches = max_patches

    @classmethod
    def from_environment(cls) -> EncoderBudget:
        """The budget that the variable sets. ValueError where it is no positive integer."""
        value = os.environ.get(VARIABLE)
        if value is None:
            return cls(None)
        if not (value.isascii() and value.isdigit()) or int(value) == 0:
            raise ValueError(
                f"{VARIABLE} must be a positive integer, the number of image patches that one"
                f" call of the encoder may hold, and not {value!r}; unset it for no limit."
            )
        return cls(int(value))

    def cuts(self, items: list[Item], places: Sequence[tuple[str, Any]]) -> Iterator[list[Item]]:
        """Consecutive items that fit into the budget together; one that is larger comes alone.

        ``places`` are the items' (hash, placeholder range).
        """
        if self.max_patches is None:
            yield items
            return
        cut: list[Item] = []
        room = self.max_patches
        for item, (_, place) in zip(items, places, strict=True):
            patches = _patches(item[1], place)
            if cut and patches > room:
                yield cut
                cut, room = [], self.max_patches
            cut.append(item)
            room -= patches
        if cut:
            yield cut

    def release(self, inputs: dict[str, Any]) -> None:
        """Let go of a call's inputs on the device, before those of the next are put there.

        The generator that made the dictionary holds it too, so it is emptied. In lazy mode what
        was called so far is a graph of its own.
        """
        if self.max_patches is not None:
            inputs.clear()
            htorch.core.mark_step()

    def dummies(self, item: Item, count: int) -> list[Item]:
        """The warm-up's call: the item ``count`` times, or as often as the budget allows."""
        patches = _patches_of_grid(item[1])
        if self.max_patches is not None and patches:
            count = min(count, max(1, self.max_patches // patches))
        return [item] * count


def _patches(tensors: Any, place: Any) -> int:
    """The patches of an item; of one without a grid the embeddings that it becomes."""
    patches = _patches_of_grid(tensors)
    return int(place.get_num_embeds()) if patches is None else patches


def _patches_of_grid(tensors: Any) -> int | None:
    for name, element in (tensors or {}).items():
        if name.endswith(_GRIDS):
            return int(element.data.prod())
    return None

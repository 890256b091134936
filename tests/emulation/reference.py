"""What a model should say: the same weights in transformers, in float32."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# The engine computes in bfloat16 (8 bits of mantissa) through a few layers: two tokens whose
# logits are this near are a tie.
TIE = 0.06


@lru_cache(maxsize=4)
def _load(checkpoint: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    both = hasattr(AutoConfig.from_pretrained(checkpoint), "vision_config")
    auto = AutoModelForImageTextToText if both else AutoModelForCausalLM
    return auto.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.no_grad()
def logits(checkpoint: Path, prompt: list[int], answer: list[int], **inputs: Any) -> torch.Tensor:
    """[len(answer), vocabulary]: the logits that each token of the answer was chosen from."""
    ids = torch.tensor([prompt + answer])
    if inputs:  # transformers finds the images' places by the type of each token
        from tests.emulation.models import IMAGE

        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    out = _load(checkpoint)(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
    return out.logits[0, len(prompt) - 1 : -1]


def regrets(checkpoint: Path, prompt: list[int], answer: list[int], **inputs: Any) -> list[float]:
    """How far below the best token each token of a greedy answer is: 0 where it is the best one."""
    scores = logits(checkpoint, prompt, answer, **inputs)
    chosen = scores.gather(-1, torch.tensor(answer).unsqueeze(-1)).squeeze(-1)
    return (scores.amax(-1) - chosen).tolist()


def is_greedy(checkpoint: Path, prompt: list[int], answer: list[int], **inputs: Any) -> bool:
    """Whether an answer is the model's own greedy one, up to ties."""
    return max(regrets(checkpoint, prompt, answer, **inputs)) <= TIE


def same_up_to_ties(checkpoint: Path, prompt: list[int], left: list[int], right: list[int]) -> bool:
    """Whether two answers agree until the first place where both tokens are as good."""
    for n, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b:
            scores = logits(checkpoint, prompt, left[: n + 1])[-1]
            return bool((scores[a] - scores[b]).abs() <= TIE)
    return True

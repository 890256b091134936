"""Images for the tiny vision model."""

from __future__ import annotations

from typing import Any

from tests.emulation.models import IMAGE, VISION_END, VISION_START


def pictures(count: int) -> list[Any]:
    """Random images of different sizes."""
    import numpy as np
    from PIL import Image

    source = np.random.default_rng(5)
    return [
        Image.fromarray(source.integers(0, 256, (32 * (n + 1), 64, 3), dtype=np.uint8))
        for n in range(count)
    ]


def prompt_with_images(
    engine: Any, text: list[int], count: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A prompt for the engine, and what transformers' model takes for the same images."""
    from transformers import AutoImageProcessor

    images = pictures(count)
    ids = [token for _ in images for token in (VISION_START, IMAGE, VISION_END)] + text
    processed = AutoImageProcessor.from_pretrained(engine.checkpoint)(images, return_tensors="pt")
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}, dict(processed)

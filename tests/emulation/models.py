"""Tiny random models, made on the spot: real architectures, real checkpoints on disk.

Random weights of the usual size (0.02) give a model that repeats itself and forgets everything,
on which most faults are invisible. Here every matrix keeps the scale of its input, so that each
token depends on all before it, and the recurrent layers decay slowly, so that a wrong state is
still wrong many tokens later.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 256
EOS = 1
IMAGE, VIDEO, VISION_START, VISION_END = 2, 3, 4, 5
FIRST_WORD = 8  # ids from here on are plain words: "w8", "w9", ...

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def dense() -> Any:
    """Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_TEXT, num_hidden_layers=2))


def moe() -> Any:
    """Qwen3-MoE, two of eight experts a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**_TEXT, **experts, num_hidden_layers=2, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(config)


_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": _TEXT["hidden_size"],
    "num_position_embeddings": 64,
}
_VISION_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def hybrid_wide() -> Any:
    """The same with larger states: KV blocks of 256 tokens, two of the blocks that kernels use."""
    return hybrid(key_dim=32, value_dim=64, mamba_ssm_dtype="float32")


def hybrid(key_dim: int = 16, value_dim: int = 16, **options: Any) -> Any:
    """Qwen3.5: three Gated DeltaNet layers, then one of full attention; M-RoPE."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    linear = {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    config = Qwen3_5Config(
        text_config={
            **_TEXT,
            **linear,
            **options,
            "num_hidden_layers": 4,
            "rope_parameters": rope,
        },
        vision_config={**_VISION},
        tie_word_embeddings=False,
        **_VISION_TOKENS,
    )
    return Qwen3_5ForConditionalGeneration(config)


def vision() -> Any:
    """Qwen3-VL: an image becomes a quarter of its patches in tokens; one deepstack level."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    config = Qwen3VLConfig(
        text_config={**_TEXT, "num_hidden_layers": 2, "rope_parameters": rope},
        vision_config={**_VISION, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
        **_VISION_TOKENS,
    )
    return Qwen3VLForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "dense": dense,
    "hybrid": hybrid,
    "hybrid_wide": hybrid_wide,
    "moe": moe,
    "vision": vision,
}


def _fill(model: Any) -> None:
    """Weights that keep the scale; see the module's docstring."""
    import torch

    generator = torch.Generator().manual_seed(20260923)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if last == "A_log":
                weight.fill_(-6.0)
            elif last == "dt_bias":
                weight.fill_(-1.0)
            elif weight.dim() >= 2:
                fan_in = 1 if "embed" in name else weight[0].numel()
                if last in ("gate_up_proj", "down_proj"):  # experts, stacked in one tensor
                    fan_in = weight.shape[-1]
                weight.normal_(0.0, fan_in**-0.5, generator=generator)


def tokenizer(folder: Path) -> None:
    """One word a token, so that text and ids are easily compared: ``w8 w9`` is [8, 9]."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = [
        "<pad>",
        "<eos>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<unk>",
    ]
    words = special + [f"w{n}" for n in range(len(special), VOCABULARY)]
    raw = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=special[2:6],
        model_max_length=4096,
    )
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    wrapped.save_pretrained(folder)


def _processor(folder: Path) -> None:
    """What the vision model's processor reads: image settings as small as the model."""
    vision = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}
    common = {**vision, "size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    image = {**common, "image_processor_type": "Qwen2VLImageProcessorFast"}
    video = {**common, "video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def build(kind: str, folder: Path) -> Path:
    """The checkpoint of a model of MODELS, made in folder when it is not there yet."""
    target = folder / kind
    if not (target / "config.json").exists():
        import torch

        torch.manual_seed(0)
        model = MODELS[kind]().to(torch.bfloat16)
        _fill(model)
        target.mkdir(parents=True, exist_ok=True)
        tokenizer(target)
        if kind in ("hybrid", "hybrid_wide", "vision"):
            _processor(target)
        model.save_pretrained(target)
    return target

"""Tiny composite models: a text part and a tower for images."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig

from tests.mixtures import SIZES, save_model

_VISION: dict[str, Any] = {"num_attention_heads": 2, "intermediate_size": 24, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16,
    "num_position_embeddings": 16,
}  # fmt: skip
_LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_COMPOSITES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": SIZES | _LINEAR | _KINDS | {"head_dim": 8}, "vision_config": _QWEN_VISION},
    "gemma3": {
        "text_config": SIZES | {"head_dim": 8, "sliding_window": 32},
        "vision_config": _VISION | {"hidden_size": 16, "num_hidden_layers": 1},
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": SIZES
        | {"model_type": "mistral", "head_dim": 8, "sliding_window": None, "max_position_embeddings": 256},
        "vision_config": _VISION | {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8},
    },
}
COMPOSITES = tuple(_COMPOSITES)


def composite_config(model_type: str) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **_COMPOSITES[model_type])


def save_composite(model_type: str, tokenizer: Path, folder: Path) -> Path:
    """Write a random composite to ``folder``, with a file of an image processor beside it, and return the folder."""
    save_model(composite_config(model_type), tokenizer, folder)
    if model_type == "mistral3":  # as published: its files hold the head that its class ties
        weights = load_file(folder / "model.safetensors")
        embedding = weights["language_model.model.embed_tokens.weight"]
        weights["language_model.lm_head.weight"] = embedding.flip(0).contiguous()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
    return folder

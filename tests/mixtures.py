"""Tiny mixtures of experts of every family that the tests train and merge."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from shardmake.run.text_part import composite_class

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_SMALL_EXPERTS = {"moe_intermediate_size": 8}
_DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}  # fmt: skip


def mixture_configs() -> dict[str, PreTrainedConfig]:
    """Return a tiny config of each family by its model type, with four experts a layer."""
    configs: list[PreTrainedConfig] = [
        transformers.MixtralConfig(**SIZES, num_local_experts=4),
        transformers.Qwen2MoeConfig(**SIZES, **_SMALL_EXPERTS, num_experts=4, shared_expert_intermediate_size=8),
        transformers.Qwen3MoeConfig(**SIZES, **_SMALL_EXPERTS, num_experts=4, head_dim=8),
        transformers.DeepseekV3Config(**(SIZES | _SMALL_EXPERTS | _DEEPSEEK)),
        transformers.OlmoeConfig(**SIZES, num_experts=4),
        transformers.GptOssConfig(**SIZES, num_local_experts=4, head_dim=8),
    ]
    return {config.model_type: config for config in configs}


def save_mixture(family: str, tokenizer: Path, folder: Path, **changes: Any) -> Path:
    """Call `save_model` for the mixture ``family`` with ``changes`` in its config."""
    config = mixture_configs()[family]
    config.update(changes)
    return save_model(config, tokenizer, folder)


def save_llama(tokenizer: Path, folder: Path) -> Path:
    """Call `save_model` for a Llama with eight heads and four key-value heads."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return save_model(config, tokenizer, folder)


def save_model(config: PreTrainedConfig, tokenizer: Path, folder: Path) -> Path:
    """Write a random model to ``folder`` and return it; it has tokenizer and vocabulary of the model ``tokenizer``."""
    config.get_text_config().update({"vocab_size": json.loads((tokenizer / "config.json").read_text())["vocab_size"]})
    torch.manual_seed(0)
    composite = composite_class(config)
    kind = getattr(transformers, composite)._from_config if composite else AutoModelForCausalLM.from_config
    kind(config, dtype=torch.float32).save_pretrained(folder)
    for path in tokenizer.iterdir():
        if path.name not in ("config.json", "generation_config.json") and path.suffix != ".safetensors":
            shutil.copy(path, folder)
    return folder

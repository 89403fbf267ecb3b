"""Tiny mixtures of experts of every family that the tests train and merge."""

from typing import Any

from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SMALL_EXPERTS = {"moe_intermediate_size": 8}
_DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}  # fmt: skip


def mixture_configs() -> dict[str, PreTrainedConfig]:
    """Return a tiny config of each family by its model type, with four experts a layer."""
    configs: list[PreTrainedConfig] = [
        MixtralConfig(**_SIZES, num_local_experts=4),
        Qwen2MoeConfig(**_SIZES, **_SMALL_EXPERTS, num_experts=4, shared_expert_intermediate_size=8),
        Qwen3MoeConfig(**_SIZES, **_SMALL_EXPERTS, num_experts=4, head_dim=8),
        DeepseekV3Config(**(_SIZES | _SMALL_EXPERTS | _DEEPSEEK)),
        OlmoeConfig(**_SIZES, num_experts=4),
        GptOssConfig(**_SIZES, num_local_experts=4, head_dim=8),
    ]
    return {config.model_type: config for config in configs}

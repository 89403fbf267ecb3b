from dataclasses import replace
from typing import Any

import pytest

from shardmake.core.errors import ModelError
from shardmake.memory import parameter_inventory
from shardmake.memory.buckets import Buckets
from shardmake.memory.composites import COMPOSITES
from shardmake.memory.estimate import gpu_memory
from shardmake.memory.families import FAMILIES, as_classifier, family_of
from shardmake.memory.model import count_rates, find_frozen, find_rates, fused_experts, split
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import Scenario
from tests.unit.memory.test_parameter_inventory import SIZES

NO_INPUTS = {"hidden_size_per_layer_input": 0}
SAVED = {"layer_types": ["sliding_attention", "full_attention"]}
WIDE, FEW = {"1": {"head_dim": 24}}, {"1": {"head_dim": 24, "num_key_value_heads": 1}}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
OF_CLASS = ("intermediate_size", "num_attention_heads")
"""Sizes that a config of these types may leave to the defaults of its class (``...``)."""
HYBRID = {"num_hidden_layers": 5, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 16}
VARIANTS = [
    {"model_type": "llama"},
    {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "head_dim": 48},
    {"model_type": "mistral"},
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
    {"model_type": "gemma"},
    {"model_type": "gemma", "head_dim": 16, "attention_bias": True},
    {"model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 6},
    {"model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, **NO_INPUTS, "num_hidden_layers": 7},
    {"model_type": "gemma4_text", "num_global_key_value_heads": 1, "attention_k_eq_v": True, **NO_INPUTS},
    {"model_type": "gemma4_text", "attention_k_eq_v": True, **NO_INPUTS, **SAVED, "per_layer_config": WIDE | FEW},
    {"model_type": "gemma4_text", **NO_INPUTS, **SAVED, "per_layer_config": WIDE},
    {"model_type": "gemma4_text", **NO_INPUTS, **SAVED, "per_layer_config": {}, "attention_k_eq_v": True},
    {"model_type": "granite", "attention_bias": True, "mlp_bias": True},
    {"model_type": "ministral", "head_dim": 16},
    {"model_type": "olmo2", "attention_bias": True},
    {"model_type": "olmo3", "num_hidden_layers": 5},
    {"model_type": "exaone4", "num_hidden_layers": 4},
    {"model_type": "smollm3", "num_hidden_layers": 5, "pad_token_id": 0, "attention_bias": True},
    {"model_type": "gemma2", "attention_bias": True},
    {"model_type": "phi3", "pad_token_id": 0, "partial_rotary_factor": 0.5},
    {"model_type": "glm4", "pad_token_id": 0},
    {"model_type": "ernie4_5", "use_bias": True},
    {"model_type": "seed_oss", "attention_out_bias": True},
    {"model_type": "mixtral", "num_local_experts": 4},
    {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32},
    {"model_type": "glm4_moe", "n_routed_experts": 4, "moe_intermediate_size": 32, "use_qk_norm": True},
    {"model_type": "gpt_oss", "num_local_experts": 4},
    {"model_type": "gpt_oss", "num_local_experts": 4, **dict.fromkeys(OF_CLASS, ...)},
    {"model_type": "dots1", "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "attention_bias": True},
    {"model_type": "deepseek_v3", **LATENT, "attention_bias": True, "first_k_dense_replace": 1},
    {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": None, "n_shared_experts": 2, "head_dim": 48},
    {"model_type": "deepseek_v3", **LATENT, "first_k_dense_replace": 1, **dict.fromkeys(OF_CLASS, ...)},
    {"model_type": "glm4_moe_lite", **LATENT, "hidden_size": 66},
    {"model_type": "glm4_moe_lite", **LATENT, "first_k_dense_replace": 0},
    {"model_type": "glm4_moe_lite", **LATENT, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "dense", "sparse"]},
    {"model_type": "glm4_moe_lite", **LATENT, "mlp_layer_types": ["sparse", "sparse"]},
    {"model_type": "youtu", **LATENT, "attention_bias": True},
    {"model_type": "youtu", "num_key_value_heads": 4, "q_lora_rank": None, "tie_word_embeddings": False},
    {"model_type": "qwen3_5_text", **HYBRID, "attention_bias": True},
    {"model_type": "qwen3_5_moe_text", **HYBRID, **HYBRID_EXPERTS},
    {"model_type": "qwen3_next", **HYBRID, **HYBRID_EXPERTS, "full_attention_interval": 2},
    {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **SIZES, **HYBRID}},
    {"model_type": "qwen3_5_moe", "tie_word_embeddings": True}
    | {"text_config": {"model_type": "qwen3_5_moe_text", **SIZES, **HYBRID, **HYBRID_EXPERTS}},
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **SIZES}},
    {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", **SIZES, **NO_INPUTS}},
    {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", **SIZES, **LATENT}},
    {"model_type": "mistral3", "text_config": {"model_type": "mistral", **SIZES}, "tie_word_embeddings": False},
]


OF_SOME = {"attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 1}
"""Keys that some classes read, and others ignore."""


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("classifier", "more"), [(False, {}), (True, {}), (False, OF_SOME)], ids=str)
def test_families_match_what_transformers_builds(variant: dict, classifier: bool, more: dict) -> None:
    text = {"text_config": {**more, **variant["text_config"]}} if "text_config" in variant else {}
    causal = from_config({k: v for k, v in {**SIZES, **more, **variant, **text}.items() if v is not ...})
    if classifier and not causal.has_all_levers:
        return
    written = as_classifier(causal) if classifier else causal
    built = parameter_inventory.inventory(parameter_inventory.build(written.config, "test"))
    assert written.decoder is not None
    assert sorted((t.name, list(t.shape), t.kind, t.block) for t in written.tensors) == sorted(
        (t["name"], list(t["shape"]), t["kind"], t["block"]) for t in built["tensors"]
    )
    for field in ("architecture", "tied", "buffer_bytes", "hidden_size", "vocab_size"):
        assert getattr(written, field) == built[field], field
    assert list(written.block_classes) == built["block_classes"] and (written.key != causal.key) is classifier


def test_published_sizes() -> None:
    llama = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
    eight = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    seventy = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    assert from_config({**llama, **eight}).parameters == 8_030_261_248
    assert from_config({**llama, **seventy}).parameters == 70_553_706_496
    deepseek = {"model_type": "deepseek_v3", "vocab_size": 129280, "num_attention_heads": 128, "num_hidden_layers": 61}
    assert from_config({**deepseek, "hidden_size": 7168, "intermediate_size": 18432}).parameters == 671_026_404_352


@pytest.mark.parametrize("more", [
    {"mlp_layer_types": ["sparse", "dense"]}, {"mlp_layer_types": ["dense"]}, {"mlp_layer_types": 1},
    {"output_router_logits": True}, {"n_shared_experts": 0}, {"v_head_dim": "10"}, {"per_layer_config": WIDE},
    {"model_type": "dots1", "sliding_window": 64}, {"head_dim": None, "model_type": "seed_oss"}, {"n_shared_experts": None},
], ids=str)  # fmt: skip
def test_a_model_that_its_family_does_not_describe_is_traced(more: dict) -> None:
    config = {**SIZES, **LATENT, "model_type": "glm4_moe_lite", **more}
    assert family_of(config) is None


@pytest.mark.parametrize("change", [
    {"hidden_size_per_layer_input": None}, {"num_kv_shared_layers": 1}, {"enable_moe_block": True},
    {"use_bidirectional_attention": "all"}, {"sliding_window_pattern": 2}, {"global_head_dim": 0},
    {"per_layer_config": {"0": {"head_dim": 8}}}, {**SAVED, "per_layer_config": FEW},
], ids=str)  # fmt: skip
def test_a_gemma4_of_another_kind_is_built(change: dict) -> None:
    config = {**SIZES, "model_type": "gemma4_text", "use_bidirectional_attention": "vision", **NO_INPUTS}
    assert family_of(config) is not None and family_of({**config, **change}) is None


def test_of_a_hybrid_some_layers_attend_to_all_tokens() -> None:
    """Defaults and the sizes below are those of Qwen3-Next-80B-A3B."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "vocab_size": 151_936}
    model = from_config({"model_type": "qwen3_next", **sizes})
    assert model.parameters == 79_674_391_296 and model.attention_width == 12 * 16 * 256


@pytest.mark.parametrize("values", [
    {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"output_router_logits": True}, {"layer_types": ["other"]},
], ids=str)  # fmt: skip
def test_what_a_record_does_not_describe_is_traced(values: dict) -> None:
    config = {**SIZES, "model_type": "qwen3_next"}
    assert family_of(config) is not None and family_of({**config, **values}) is None


def test_every_family_has_a_variant_here() -> None:
    assert {variant["model_type"] for variant in VARIANTS} == {*FAMILIES, *COMPOSITES}


def test_adapters_match_peft() -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    config = {**SIZES, "model_type": "llama"}
    model = parameter_inventory.build(config, "test")
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        with torch.device("meta"):
            adapted = get_peft_model(parameter_inventory.build(config, "test"), LoraConfig(r=4, target_modules=targets))
        trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert split(from_config(config), "lora", 4, targets).trainable == trainable
    assert split(from_config(config), "lora").frozen == sum(p.numel() for p in model.parameters())


NAMES = [*(f"model.layers.{n}.{part}.weight" for n in (0, 1, 10) for part in ("mlp.up", "norm")), "lm_head.weight"]


@pytest.mark.parametrize(("patterns", "trained"), [
    ([], NAMES), (["model.layers.1"], [*NAMES[:2], *NAMES[4:]]), (["*.mlp", "lm_head.weight"], NAMES[1:-1:2]),
    (["*", "!*.norm", "model.layers.10"], [NAMES[1], NAMES[3]]),
])  # fmt: skip
def test_patterns_freeze_parameters_and_modules(patterns: list[str], trained: list[str]) -> None:
    assert sorted(trained) == sorted({*NAMES} - find_frozen(NAMES, patterns))


def test_the_last_pattern_that_names_a_weight_gives_its_rate() -> None:
    found = find_rates(NAMES, {"*.mlp": 1e-3, "model.layers.1": 1e-4, "lm_head": 1e-3})
    assert [found.get(name) for name in NAMES] == [
        *("*.mlp", None, "model.layers.1", "model.layers.1", "*.mlp", None, "lm_head")
    ]
    model = from_config({**SIZES, "model_type": "llama"})
    whole, adapters = split(model, "full", freeze=["model.layers.0"]), split(model, "lora", 4)
    embedding = model.tensors[0].numel
    assert count_rates(model, whole, {"model.embed_tokens": 1e-5}) == {"model.embed_tokens": embedding}
    elements = sum(tensor.numel for tensor in adapters.adapters if ".lora_B." in tensor.name)
    assert count_rates(model, adapters, {"*.lora_B": 1e-3}) == {"*.lora_B": elements}
    with pytest.raises(ModelError, match=r"not found: 'model\.layers\.0'"):
        count_rates(model, whole, {"model.layers.0": 1e-3})


@pytest.mark.parametrize(("find", "patterns", "words"), [
    *((find_frozen, one, "freeze") for one in (["model.layer.1"], ["mlp"], ["*"], ["*.mlp", "!model.embed_tokens"])),
    (find_rates, ["mlp"], "Weights of learning_rates not found: 'mlp'"),
    (find_rates, ["lm_head.weight", "lm_head"], r"patterns after 'lm_head\.weight' name all its weights"),
    (find_rates, ["model", "lm_head"], "names every trained weight"),
])  # fmt: skip
def test_patterns_of_no_or_every_weight_are_refused(find: Any, patterns: list[str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        find(NAMES, dict.fromkeys(patterns, 1e-3))


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_frozen_weights_have_no_gradients_and_no_states(strategy: str) -> None:
    model = from_config({**SIZES, "model_type": "llama"})
    part = split(model, "full", freeze=["model.embed_tokens", "*.mlp"])
    assert part.total == model.parameters == split(model, "full").trainable and part.frozen == sum(
        tensor.numel for tensor in model.tensors if ".mlp." in tensor.name or "embed" in tensor.name
    )
    whole = Scenario(model, split(model, "full"), strategy, 1, 2, 1, 64)
    terms = [gpu_memory(replace(whole, split=one), Buckets()).terms for one in (whole.split, part)]
    assert 0 < terms[1]["optimizer states"] < 0.9 * terms[0]["optimizer states"]
    assert terms[1]["frozen weights"] > 0 and sum(terms[1].values()) < sum(terms[0].values())


def test_experts_and_routers_get_the_adapters_of_peft() -> None:
    """Rank 8 for each of 4 experts, twice that for gate and up in one weight; the router is adapted too."""
    model = from_config({"model_type": "mixtral", **SIZES, "num_local_experts": 4})
    shapes = {tensor.name: tensor.shape for tensor in split(model, "lora", 8).adapters if tensor.block == 1}
    prefix = "model.layers.1.mlp"
    assert shapes[f"{prefix}.experts.base_layer.lora_A.weight"] == (2 * 8 * 4, 64)
    assert shapes[f"{prefix}.experts.lora_B.weight"] == (64, 8 * 4) and f"{prefix}.gate.lora_A.weight" in shapes
    named = split(model, "lora", 8, ["q_proj", "experts.down_proj"]).adapters
    assert {t.name.rpartition(".lora")[0] for t in named if t.block == 1} == {
        "model.layers.1.self_attn.q_proj", f"{prefix}.experts",
    }  # fmt: skip
    elements, adapters = fused_experts(model, split(model, "lora", 8))
    assert elements == sum(t.numel for t in model.tensors if ".experts." in t.name)
    assert {t.name.rpartition(".lora")[0] for t in adapters if t.block == 1} == {
        f"{prefix}.experts", f"{prefix}.experts.base_layer",
    }  # fmt: skip

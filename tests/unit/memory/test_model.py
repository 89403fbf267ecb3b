import json
from pathlib import Path

import pytest

from shardmake.core.errors import ShardmakeError
from shardmake.memory import parameter_inventory
from shardmake.memory.families import FAMILIES
from shardmake.memory.model import split
from shardmake.memory.read_config import from_config, read_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
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
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_families_match_what_transformers_builds(variant: dict) -> None:
    config = {**SIZES, **variant}
    written = from_config(config)
    built = parameter_inventory.inventory(parameter_inventory.build(config, "test"))
    assert written.decoder is not None
    assert [(t.name, list(t.shape), t.kind, t.block) for t in written.tensors] == [
        (t["name"], list(t["shape"]), t["kind"], t["block"]) for t in built["tensors"]
    ]
    for field in ("architecture", "tied", "buffer_bytes", "hidden_size", "vocab_size"):
        assert getattr(written, field) == built[field], field
    assert list(written.block_classes) == built["block_classes"]


OTHERS = [
    ({"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 320}, 3),
    ({"model_type": "mixtral", **SIZES, "num_local_experts": 4}, 2),
    ({"model_type": "qwen3_moe", **SIZES, "num_experts": 4, "num_experts_per_tok": 2,
      "moe_intermediate_size": 32, "head_dim": 32}, 2),
    ({"model_type": "bert", **SIZES, "architectures": ["BertForSequenceClassification"]}, 2),
    ({"model_type": "t5", "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 320,
      "architectures": ["T5ForConditionalGeneration"]}, 4),
    ({"model_type": "gpt_neox", **SIZES}, 2),
    ({"model_type": "phi3", **SIZES, "pad_token_id": 0}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("config", "blocks"), OTHERS, ids=lambda value: str(value)[:24])
def test_inventory_of_other_architectures(config: dict, blocks: int) -> None:
    built = parameter_inventory.build(config, "test")
    values = parameter_inventory.inventory(built)
    assert sum(_numel(t["shape"]) for t in values["tensors"]) == sum(p.numel() for p in built.parameters())
    assert sorted({t["block"] for t in values["tensors"]} - {None}) == list(range(blocks))


def _numel(shape: list[int]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


def test_published_sizes() -> None:
    llama = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
    eight = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    seventy = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    assert from_config({**llama, **eight}).parameters == 8_030_261_248
    assert from_config({**llama, **seventy}).parameters == 70_553_706_496


def test_every_family_has_a_variant_here() -> None:
    assert {variant["model_type"] for variant in VARIANTS} == set(FAMILIES)


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


BAD = [
    ({}, "no model_type"),
    ({**SIZES, "model_type": "llama", "hidden_size": 0}, "hidden_size is 0"),
    ({**SIZES, "model_type": "llama", "vocab_size": -5}, "vocab_size is -5"),
    ({**SIZES, "model_type": "llama", "num_hidden_layers": 1 << 40}, "num_hidden_layers is"),
    ({**SIZES, "model_type": "llamma"}, "has no model type 'llamma'"),
    ({**SIZES, "model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}, "needs its own Python code"),
]


@pytest.mark.parametrize(("config", "sentence"), BAD, ids=lambda value: str(value)[:30])
def test_bad_configs_are_rejected(config: dict, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ShardmakeError, match=sentence):
        read_model(str(path))


def test_missing_models_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ShardmakeError, match=r"no config\.json"):
        read_model(str(tmp_path))
    with pytest.raises(ShardmakeError, match="no model at"):
        read_model("./nowhere")
    with pytest.raises(ShardmakeError, match="Adapter target not found"):
        split(from_config({**SIZES, "model_type": "llama"}), "lora", 8, ["q_prjo"])


def test_experts_and_routers_get_the_adapters_of_peft() -> None:
    """Rank 8 for each of 4 experts, twice that for gate and up in one weight; the router is adapted too."""
    model = from_config({"model_type": "mixtral", **SIZES, "num_local_experts": 4})
    shapes = {tensor.name: tensor.shape for tensor in split(model, "lora", 8).adapters if tensor.block == 1}
    prefix = "model.layers.1.mlp"
    assert shapes[f"{prefix}.experts.base_layer.lora_A.weight"] == (2 * 8 * 4, 64)
    assert shapes[f"{prefix}.experts.lora_B.weight"] == (64, 8 * 4)
    assert f"{prefix}.gate.lora_A.weight" in shapes


BAD_SIZES = [
    ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size is not a multiple of 7"),
    ({"num_key_value_heads": 3}, "4 num_attention_heads cannot share 3"),
    ({"model_type": "olmo2", "vocab_size": None}, "vocab_size is missing"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_SIZES, ids=str)
def test_missing_or_contradictory_sizes_are_rejected(change: dict, sentence: str) -> None:
    with pytest.raises(ShardmakeError, match=sentence):
        from_config({"model_type": "llama", **SIZES, **change}, source="config.json")

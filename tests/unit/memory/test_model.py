import pytest

from shardmake.memory import parameter_inventory
from shardmake.memory.families import FAMILIES, as_classifier
from shardmake.memory.model import fused_experts, split
from shardmake.memory.read_config import from_config
from tests.unit.memory.test_parameter_inventory import SIZES

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
@pytest.mark.parametrize("classifier", [False, True])
def test_families_match_what_transformers_builds(variant: dict, classifier: bool) -> None:
    causal = from_config({**SIZES, **variant})
    written = as_classifier(causal) if classifier else causal
    built = parameter_inventory.inventory(parameter_inventory.build(written.config, "test"))
    assert written.decoder is not None
    assert [(t.name, list(t.shape), t.kind, t.block) for t in written.tensors] == [
        (t["name"], list(t["shape"]), t["kind"], t["block"]) for t in built["tensors"]
    ]
    for field in ("architecture", "tied", "buffer_bytes", "hidden_size", "vocab_size"):
        assert getattr(written, field) == built[field], field
    assert list(written.block_classes) == built["block_classes"]
    assert (written.key != causal.key) is classifier


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


def test_experts_and_routers_get_the_adapters_of_peft() -> None:
    """Rank 8 for each of 4 experts, twice that for gate and up in one weight; the router is adapted too."""
    model = from_config({"model_type": "mixtral", **SIZES, "num_local_experts": 4})
    shapes = {tensor.name: tensor.shape for tensor in split(model, "lora", 8).adapters if tensor.block == 1}
    prefix = "model.layers.1.mlp"
    assert shapes[f"{prefix}.experts.base_layer.lora_A.weight"] == (2 * 8 * 4, 64)
    assert shapes[f"{prefix}.experts.lora_B.weight"] == (64, 8 * 4)
    assert f"{prefix}.gate.lora_A.weight" in shapes
    named = split(model, "lora", 8, ["q_proj", "experts.down_proj"]).adapters
    assert {t.name.rpartition(".lora")[0] for t in named if t.block == 1} == {
        "model.layers.1.self_attn.q_proj", f"{prefix}.experts",
    }  # fmt: skip
    elements, adapters = fused_experts(model, split(model, "lora", 8))
    assert elements == sum(t.numel for t in model.tensors if ".experts." in t.name)
    assert {t.name.rpartition(".lora")[0] for t in adapters if t.block == 1} == {
        f"{prefix}.experts", f"{prefix}.experts.base_layer",
    }  # fmt: skip

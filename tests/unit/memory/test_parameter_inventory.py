"""The inventory of parameters of architectures outside the families."""

from math import prod

import pytest
import torch

from shardmake.memory import parameter_inventory

SIZES = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
OTHERS = [
    ({"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 320}, 3),
    ({"model_type": "qwen2_moe", **SIZES, "num_experts": 4, "moe_intermediate_size": 32}, 2),
    ({"model_type": "bert", **SIZES, "architectures": ["BertForSequenceClassification"]}, 2),
    ({"model_type": "t5", "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 320,
      "architectures": ["T5ForConditionalGeneration"]}, 4),
    ({"model_type": "gpt_neox", **SIZES}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("config", "blocks"), OTHERS, ids=lambda value: str(value)[:24])
def test_inventory_of_other_architectures(config: dict, blocks: int) -> None:
    built = parameter_inventory.build(config, "test")
    values = parameter_inventory.inventory(built)
    assert sum(prod(t["shape"]) for t in values["tensors"]) == sum(p.numel() for p in built.parameters())
    assert sorted({t["block"] for t in values["tensors"]} - {None}) == list(range(blocks))


class Experts(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(count))


def test_what_runs_other_modules_for_other_experts_is_a_leaf() -> None:
    fused = parameter_inventory.build({"model_type": "mixtral", **SIZES, "num_local_experts": 4}, "test")
    assert parameter_inventory.leaf_classes(fused) == []
    assert parameter_inventory.leaf_classes(torch.nn.Sequential(Experts(2), Experts(4))) == ["Experts"]
    assert parameter_inventory.leaf_classes(Experts(1)) == []
    looped = torch.nn.ModuleDict({"experts": torch.nn.Sequential(torch.nn.SiLU())})
    assert parameter_inventory.leaf_classes(looped) == ["Sequential"]

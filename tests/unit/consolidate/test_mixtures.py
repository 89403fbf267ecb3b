"""Merges of mixtures of experts and of a composite: names and bytes of save_pretrained, in the layout of the base's files."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardmake.checkpoint.formats.contents import Change, Read, StoredTensor
from shardmake.checkpoint.formats.lora import LoraUpdate
from shardmake.config.methods import METHODS
from shardmake.consolidate import peft_check
from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.verify import verify
from shardmake.core.errors import CheckpointError
from shardmake.run.model_class import ModelClass
from tests.mixtures import mixture_configs
from tests.workflow.consolidate_checkpoints import check_loading_in_process

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss")


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    check_loading_in_process(monkeypatch)
    yield


def random_model(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(mixture_configs()[family], dtype=torch.float32)
    for tensor in model.state_dict().values():  # transformers leaves biases and sinks zero
        tensor.normal_()
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
def test_a_merge_has_the_names_and_bytes_of_save_pretrained(family: str, fused: bool, tmp_path: Path) -> None:
    """A base whose files hold one tensor per expert is merged so; one that is published fused stays fused."""
    base, checkpoint, expected = tmp_path / "base", tmp_path / "checkpoint", tmp_path / "expected"
    random_model(family, seed=0).save_pretrained(base, save_original_format=not fused)
    trained = AutoModelForCausalLM.from_pretrained(base)
    trained.load_state_dict(random_model(family, seed=1).state_dict())
    trained.save_pretrained(checkpoint, save_original_format=False)
    trained.save_pretrained(expected)
    consolidate(checkpoint, tmp_path / "model", base=base)
    assert_same_weights(tmp_path / "model", expected)
    assert load_file(tmp_path / "model/model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    assert verify(tmp_path / "model", checkpoint).compared_with == str(checkpoint)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_without_a_base_the_layout_is_that_of_save_pretrained(family: str, tmp_path: Path) -> None:
    model = random_model(family, seed=1)
    model.save_pretrained(tmp_path / "checkpoint", save_original_format=False)
    model.save_pretrained(tmp_path / "expected")
    consolidate(tmp_path / "checkpoint", tmp_path / "model")
    assert_same_weights(tmp_path / "model", tmp_path / "expected")
    consolidate(tmp_path / "expected", tmp_path / "again")  # a checkpoint that has this layout already
    assert_same_weights(tmp_path / "again", tmp_path / "expected")


def test_weights_that_the_class_does_not_load_are_copied_from_the_base(tmp_path: Path) -> None:
    """DeepSeek-V3 has a layer for multi-token prediction behind its last one, which transformers ignores."""
    base, name = tmp_path / "base", "model.layers.61.eh_proj.weight"
    random_model("deepseek_v3", seed=0).save_pretrained(base)
    extra = torch.rand(4, 4)
    save_file({**load_file(base / "model.safetensors"), name: extra}, base / "model.safetensors", {"format": "pt"})
    random_model("deepseek_v3", seed=1).save_pretrained(tmp_path / "checkpoint", save_original_format=False)
    consolidate(tmp_path / "checkpoint", tmp_path / "model", base=base)
    merged = load_file(tmp_path / "model/model.safetensors")
    assert merged.keys() == load_file(base / "model.safetensors").keys() and torch.equal(merged[name], extra)
    assert verify(tmp_path / "model", tmp_path / "checkpoint").tensors == len(merged)


GATE_UP_DOWN = ["gate_up_proj", "down_proj"]
ADAPTERS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    ("deepseek_v3", {"target_modules": ["o_proj"]}),
    *((family, {"target_modules": "all-linear"}) for family in FAMILIES),
    ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": GATE_UP_DOWN}),
    ("gpt_oss", {"target_modules": [], "target_parameters": ["experts.down_proj"], "use_rslora": True}),
    ("gpt_oss", {"target_modules": [], "target_parameters": ["gate_up_proj_bias", *GATE_UP_DOWN, "router.weight"]}),
    ("mixtral", {"target_modules": [], "target_parameters": ["gate_up_proj"], "rank_pattern": {".*up_proj": 3}}),
    ("qwen3_moe", {"target_modules": ["down_proj"], "alpha_pattern": {r".*1\.mlp\.experts\.down_proj": 5}}),
]


@pytest.mark.parametrize(("family", "settings"), ADAPTERS, ids=[f"{f}-{[*s.values()]}" for f, s in ADAPTERS])
@pytest.mark.parametrize("saved", ["per expert", "fused", "states"])
def test_an_adapter_merges_as_by_peft(family: str, settings: dict[str, Any], saved: str, tmp_path: Path) -> None:
    """The base's files hold one tensor per expert, or the checkpoint holds the states of the whole model."""
    base, adapter, model = (tmp_path / name for name in ("base", "adapter", "model"))
    random_model(family, seed=0).save_pretrained(base, save_original_format=saved != "fused")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, **settings))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(adapter)
    if saved == "states":
        (adapter / "adapter_model.safetensors").unlink()
        torch.save({n: t.contiguous() for n, t in adapted.state_dict().items()}, adapter / "pytorch_model_fsdp.bin")
    receipt = consolidate(adapter, model, base=base)
    kinds = {
        re.sub(r"\.\d+\.", ".", n.partition(".lora_A")[0]) for n, _ in adapted.named_parameters() if ".lora_A" in n
    }
    assert receipt is not None and receipt.peft_modules is not None and receipt.peft_modules >= len(kinds)
    verify(model, adapter, base=base)
    before = load_file(base / "model.safetensors")
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected", save_original_format=saved != "fused")
    found, expected = load_file(model / "model.safetensors"), load_file(tmp_path / "expected/model.safetensors")
    assert found.keys() == expected.keys() == before.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    experts = {name for name in expected if ".experts." in name and not torch.equal(before[name], expected[name])}
    assert bool(experts) == any(".experts" in kind for kind in kinds)


@pytest.mark.parametrize("elements", [1 << 22, 500], ids=["all rows", "some rows"])
@pytest.mark.parametrize(("family", "fused"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_a_lost_change_of_one_expert_is_found(
    family: str, fused: bool, elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT merges rows of every expert, at both ends: gate and up are separate weights in most files."""
    random_model(family, seed=0).save_pretrained(tmp_path / "base", save_original_format=not fused)
    settings = LoraConfig(r=2, target_modules=[], target_parameters=GATE_UP_DOWN, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings).save_pretrained(tmp_path / "a")
    monkeypatch.setattr(peft_check, "_ELEMENTS", elements)
    consolidate(tmp_path / "a", tmp_path / "model", base=tmp_path / "base")
    load = LoraUpdate.load

    def lose(update: LoraUpdate, read: Read, weight: StoredTensor) -> Change:
        change, last = load(update, read, weight), update.shape[-2] * update.shape[-1] * 3
        return lambda values, first: np.where(np.arange(values.size) + first < last, change(values, first), values)

    monkeypatch.setattr(LoraUpdate, "load", lose)
    with pytest.raises(CheckpointError, match=r"The merged \S*experts\S* is not PEFT's"):
        consolidate(tmp_path / "a", tmp_path / "other", base=tmp_path / "base")


def assert_same_weights(model: Path, expected: Path) -> None:
    found, wanted = load_file(model / "model.safetensors"), load_file(expected / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.fixture
def whole(tmp_path: Path) -> ModelClass:
    """Write a Step 3.7 in a small size, and return its text part's class."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = vision | {
        "intermediate_size": 24, "vocab_size": 64, "num_key_value_heads": 1, "num_sliding_attention_heads": 2,
        "head_dim": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "sliding_window": 4,
        "layer_types": ["full_attention"],
    }  # fmt: skip
    config = AutoConfig.for_model("step3p7", text_config=text, vision_config=vision)
    kind = ModelClass(name="Step3p7ForConditionalGeneration", text_part=True)
    torch.manual_seed(0)
    kind.whole.build(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    return kind


def test_an_adapter_of_the_text_is_merged_and_the_model_verified(whole: ModelClass, tmp_path: Path) -> None:
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "model"))
    part = whole.load(str(base), dtype=torch.float32)
    adapted = get_peft_model(part, METHODS["lora"].peft_config("CAUSAL_LM", part, rank=2, targets=["o_proj"]))
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value)
    adapted.save_pretrained(adapter)
    consolidate(adapter, out, base=base, model_class=whole, workers=1)
    verify(base)
    verify(out, adapter, base=base)
    found, wanted = whole.load(str(out), dtype=torch.float32).state_dict(), adapted.merge_and_unload().state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)

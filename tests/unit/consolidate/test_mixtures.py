"""Merges of mixtures of experts: names and bytes of save_pretrained, in the layout of the base model's files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardmake.checkpoint.formats.hub_layout import check_all_loaded
from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.verify import verify
from shardmake.core.errors import ModelError
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
    assert merged.keys() == load_file(base / "model.safetensors").keys()
    assert torch.equal(merged[name], extra)
    assert verify(tmp_path / "model", tmp_path / "checkpoint").tensors == len(merged)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_zero3_leaves_out_silently_are_found(family: str, tmp_path: Path) -> None:
    model = random_model(family, seed=0)
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    save_file({**held, "model.layers.61.x": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    if family == "deepseek_v3":  # the class declares that it does not load this layer
        check_all_loaded(model, str(tmp_path))
        return
    with pytest.raises(ModelError, match=r"completely: unexpected keys: model\.layers\.61\.x \(1 in all\)"):
        check_all_loaded(model, str(tmp_path))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_an_adapter_of_the_attention_merges_beside_the_experts(family: str, tmp_path: Path) -> None:
    random_model(family, seed=0).save_pretrained(tmp_path / "base")
    targets = ["o_proj"] if family == "deepseek_v3" else ["q_proj", "v_proj"]
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(r=2, target_modules=targets)
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    consolidate(tmp_path / "adapter", tmp_path / "model", base=tmp_path / "base")
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected")
    found = load_file(tmp_path / "model/model.safetensors")
    expected = load_file(tmp_path / "expected/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def assert_same_weights(model: Path, expected: Path) -> None:
    found, wanted = load_file(model / "model.safetensors"), load_file(expected / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []

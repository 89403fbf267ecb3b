"""LoRA adapters, merged into the base model as PEFT merges them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from shardmake.checkpoint.formats.dtypes import Target
from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.verify import verify
from shardmake.core.errors import ShardmakeError
from tests.workflow.consolidate_checkpoints import SHAPE, expected_weights, load_weights

LLAMA = LlamaConfig(**SHAPE)
pytestmark = pytest.mark.usefixtures("loading_in_process")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A base model and an adapter for it with random factors."""
    return save_adapter(LlamaForCausalLM(LLAMA), tmp_path, alpha_pattern={"q_proj": 3}, modules_to_save=["lm_head"])


def save_adapter(model: PreTrainedModel, tmp_path: Path, **settings: Any) -> tuple[Path, Path]:
    """Save ``model`` in bf16 and an adapter for it with random factors; return their folders."""
    torch.manual_seed(0)
    model = model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **settings))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = torch.rand_like(parameter, dtype=torch.float32) / 8
    adapted.save_pretrained(tmp_path / "checkpoint-7")
    return tmp_path / "base", tmp_path / "checkpoint-7"


def test_merge_of_a_peft_folder_equals_pefts(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    receipt = consolidate(adapter, tmp_path / "model", base=base, dtype="bf16")
    assert receipt.step == 7
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    assert_close(load_weights(tmp_path / "model"), expected, torch.bfloat16)
    assert verify(tmp_path / "model", adapter, base=base).compared_with == str(adapter)


def test_merge_into_transposed_weights_equals_pefts(tmp_path: Path) -> None:
    """The Conv1D layers of GPT-2 hold their weights as [in, out]; one of them is square."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=24, n_layer=2, n_head=4, n_positions=32))
    base, adapter = save_adapter(model, tmp_path)
    assert json.loads((adapter / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    consolidate(adapter, tmp_path / "model", base=base, dtype="fp32")
    again = GPT2LMHeadModel.from_pretrained(base, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in again.state_dict().items()}
    merged = PeftModel.from_pretrained(again, adapter).merge_and_unload().state_dict()
    expected = {name: tensor for name, tensor in merged.items() if name != "lm_head.weight"}  # tied
    assert not torch.equal(expected["transformer.h.0.attn.c_proj.weight"], before["transformer.h.0.attn.c_proj.weight"])
    assert_close(load_weights(tmp_path / "model"), expected, torch.float32)
    assert verify(tmp_path / "model", adapter, base=base).compared_with == str(adapter)


@pytest.mark.training
@pytest.mark.parametrize(("dtype", "kind"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize(("world", "name"), [(1, "zero2-bf16-lora-nobase"), (2, "zero3-lora")])
def test_deepspeed_checkpoint_of_an_adapter(
    world: int, name: str, dtype: Target, kind: torch.dtype, tmp_path: Path,
    variant_of: Callable[[str, int, str], Path],
) -> None:  # fmt: skip
    """In each type, the factors are the fp32 weights of the optimizer."""
    variant = variant_of("zero", world, name)
    consolidate(variant / "checkpoint-2", tmp_path / "model", base=variant / "base", dtype=dtype)
    verify(tmp_path / "model", variant / "checkpoint-2", base=variant / "base")
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(variant / "base", dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"),
    )
    factors = {name: tensor for name, tensor in expected_weights(variant, "fp32").items() if ".lora_" in name}
    assert not adapted.load_state_dict(factors, strict=False).unexpected_keys
    assert_close(load_weights(tmp_path / "model"), adapted.merge_and_unload().state_dict(), kind)


def test_of_several_adapters_only_trls_reference_is_left_out(tmp_path: Path) -> None:
    """A state of the whole model, as `accelerator.save_state` writes it, has each adapter under its name."""
    base, adapter = save_adapter(LlamaForCausalLM(LLAMA), tmp_path)
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    for number, name in enumerate(("ref", "other")):
        model.add_adapter(name, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
        state = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
        save_file(state, adapter / "model.safetensors")
        (adapter / "adapter_model.safetensors").unlink(missing_ok=True)
        if number == 0:
            consolidate(adapter, tmp_path / "model", base=base, dtype="fp32")
    with pytest.raises(ShardmakeError, match=r"It holds several adapters \(default, other\)"):
        consolidate(adapter, tmp_path / "again", base=base, dtype="fp32")
    assert_close(load_weights(tmp_path / "model"), model.merge_and_unload().state_dict(), torch.float32)


def test_adapter_of_another_model_is_an_error(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, adapter = folders
    for name, size in (("hidden_size", 32), ("num_hidden_layers", 1)):
        LlamaForCausalLM(LlamaConfig(**SHAPE | {name: size})).save_pretrained(tmp_path / name)
        with pytest.raises(ShardmakeError, match="was trained on another model"):
            consolidate(adapter, tmp_path / "model", base=tmp_path / name)
    with pytest.raises(ShardmakeError, match="--base"):
        consolidate(adapter, tmp_path / "model")


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Compare up to the summation order of a matrix product and rounding to ``dtype``."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == dtype
        tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=tolerance, atol=1e-6)

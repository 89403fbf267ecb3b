"""Quantized models in bf16, compared with what transformers makes of them when it loads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardmake.checkpoint.formats.huggingface import shard_names, weight_names
from shardmake.core.errors import ConfigError, ModelError
from shardmake.fetch import copied_base
from shardmake.fetch import dequantize as module
from shardmake.fetch.dequantize import dequantize
from tests.mixtures import mixture_configs

BLOCK = 8
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
Tensors = dict[str, torch.Tensor]


def save(folder: Path, family: str, quantization: dict[str, Any]) -> Tensors:
    """Write a tiny model and return its weights."""
    config = mixture_configs()[family]
    if family == "gpt_oss":
        config.update({"hidden_size": 64, "intermediate_size": 32})  # MXFP4 has blocks of 32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": quantization}))
    (folder / "tokenizer.json").write_text("{}")
    return load_file(folder / "model.safetensors")


def fp8(weights: Tensors, scale: str) -> Tensors:
    """Return the weights with the linear layers in FP8, and a random scale for each block."""
    found = dict(weights)
    for name, weight in weights.items():
        if weight.dim() == 2 and name.endswith("proj.weight"):
            rows, columns = (length // BLOCK for length in weight.shape)
            found[name] = (weight.float() * 50).to(torch.float8_e4m3fn)
            found[name.removesuffix(".weight") + scale] = torch.rand(max(rows, 1), max(columns, 1)) + 0.1
    return found


def mxfp4(weights: Tensors) -> Tensors:
    found = {}
    for name, weight in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = weight.shape
            found[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            found[f"{name}_scales"] = torch.randint(120, 130, (experts, rows, columns // 32), dtype=torch.uint8)
        else:
            found[name] = weight
    return found


@pytest.mark.parametrize(("family", "settings", "quantized"), [
    ("deepseek_v3", FP8, lambda weights: fp8(weights, ".weight_scale_inv")),
    ("deepseek_v3", FP8, lambda weights: fp8(weights, ".scale")),
    ("qwen3_moe", FP8, lambda weights: fp8(weights, ".weight_scale_inv")),
    ("gpt_oss", {"quant_method": "mxfp4"}, mxfp4),
], ids=["fp8", "fp8-scale", "fp8-experts", "mxfp4"])  # fmt: skip
def test_the_model_is_the_one_that_transformers_dequantizes(  # type: ignore[no-untyped-def]
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, settings: dict[str, Any], quantized
) -> None:
    monkeypatch.setattr(copied_base, "_FILE_SIZE", 5_000)
    base, out = tmp_path / "base", tmp_path / "out"
    weights = save(base, family, settings)
    save_file(quantized(weights), base / "model.safetensors", {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    dequantize(base, out)
    found, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values())
    theirs, ours = expected.state_dict(), found.state_dict()
    assert ours.keys() == theirs.keys() and [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert weight_names(out) == weights.keys() and len(shard_names(out)) > 1
    assert not hasattr(AutoConfig.from_pretrained(out), "quantization_config") and (out / "tokenizer.json").is_file()


def test_blocks_are_cut_at_the_edges() -> None:
    """DeepSeek-V3 has a projection of 576 rows in blocks of 128; transformers 5.23 refuses it."""
    weight, scales = torch.randn(20, 9).to(torch.float8_e4m3fn), torch.rand(3, 2)
    found = module._convert_scaled(weight, scales, [8, 8])
    for row in range(20):
        for column in range(9):
            expected = weight[row, column].float() * scales[row // 8, column // 8]
            assert found[row, column] == expected.bfloat16()


REFUSED: list[tuple[dict[str, Any], Tensors, str]] = [
    ({}, {}, "declares no quantized weights"),
    ({"quant_method": "gptq"}, {}, "method 'gptq' is not known. Known are fp8, mxfp4, compressed-tensors"),
    ({"quant_method": "compressed-tensors"}, {"q.weight_packed": torch.zeros(2, dtype=torch.int32)}, "no weight of it"),
    (FP8, {"a.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "b.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
           "b.weight_scale_inv": torch.ones(1, 1)}, "a.weight has no scales"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "tensors", "sentence"), REFUSED, ids=[row[2][:12] for row in REFUSED])
def test_what_cannot_be_dequantized(tmp_path: Path, settings: dict[str, Any], tensors: Tensors, sentence: str) -> None:
    save(tmp_path / "base", "qwen3_moe", settings)
    save_file(tensors or {"a": torch.ones(1)}, tmp_path / "base/model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=sentence):
        dequantize(tmp_path / "base", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="exists"):
        dequantize(tmp_path / "base", tmp_path)

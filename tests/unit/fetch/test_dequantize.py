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


@pytest.mark.parametrize(("rows", "settings"), [(20, FP8), (192, {}), (192, {"weight_block_size": None})])
def test_blocks_are_cut_at_the_edges(rows: int, settings: dict[str, Any]) -> None:
    """DeepSeek-V3 has a projection of 576 rows in blocks of 128; transformers 5.23 refuses it, and halves 192 rows."""
    size = (settings.get("weight_block_size", [128]) or [rows // 2])[0]
    weight, scales = torch.randn(rows, 9).to(torch.float8_e4m3fn), torch.rand(-(-rows // size), -(-9 // size))
    numbers = module._numbers({"quant_method": "fp8", **settings})
    found = module._convert(module.METHODS["fp8"][0], {"weight": weight, "scales": scales}, numbers)
    for row in range(rows):
        for column in range(9):
            expected = weight[row, column].float() * scales[row // size, column // size]
            assert found[row, column] == expected.bfloat16()


def packed(values: torch.Tensor) -> torch.Tensor:
    """Return int32 words of eight integers of four bits each, of which the first has the lowest bits."""
    words = [[sum((int(v) + 8) << 4 * i for i, v in enumerate(row[at : at + 8])) for at in range(0, len(row), 8)]
             for row in values]  # fmt: skip
    return torch.tensor(words).to(torch.int32)


def of_integers(rows: int, columns: int, bits: int) -> tuple[Tensors, torch.Tensor]:
    """Return a weight of integers with scales and zero points of groups of eight columns, as stored, and its values."""
    half = 2 ** (bits - 1)
    values, zeros = (torch.randint(-half, half, (rows, width)) for width in (columns, columns // 8))
    scales = (torch.rand(rows, columns // 8) + 0.5).bfloat16()
    expected = (values - zeros.repeat_interleave(8, 1)) * scales.float().repeat_interleave(8, 1)
    if bits == 8:
        return {"": values.to(torch.int8), "_scale": scales, "_zero_point": zeros.to(torch.int8)}, expected
    words = {"_packed": packed(values), "_zero_point": packed(zeros.T).T.contiguous()}
    return {**words, "_scale": scales, "_shape": torch.tensor([rows, columns])}, expected


def of_fp4(rows: int, columns: int, bits: int) -> tuple[Tensors, torch.Tensor]:
    """Return a weight in NVFP4, or in MXFP4 for 0 bits, as stored, and its values."""
    codes = torch.randint(0, 16, (rows, columns))
    table = torch.tensor([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
    held = {"_packed": (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)}
    if not bits:
        powers = torch.randint(120, 130, (rows, columns // 8)).to(torch.uint8)
        factors = 2.0 ** (powers.float() - 127)
        held["_scale"] = powers
    else:
        held["_scale"] = (torch.rand(rows, columns // 8) * 100).to(torch.float8_e4m3fn)
        held["_global_scale"] = torch.tensor([700.0])
        factors = held["_scale"].float() / 700
    return held, table[codes] * factors.repeat_interleave(8, 1)


@pytest.mark.parametrize(("made", "bits"), [(of_integers, 4), (of_integers, 8), (of_fp4, 4), (of_fp4, 0)])
def test_formats_of_compressed_tensors(tmp_path: Path, made: Any, bits: int) -> None:
    """Its own package, compared once in version 0.20, gives the same bytes for each format.

    transformers 5.23 cannot load experts with zero points, and ignores the global scale of experts in NVFP4.
    """
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "group_size": 8}}}
    base, out = tmp_path / "base", tmp_path / "out"
    weights = save(base, "qwen3_moe", {"quant_method": "compressed-tensors", "config_groups": groups})
    stored, expected = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.endswith("proj.weight"):
            held, values = made(*weight.shape, bits)
            expected[name] = values.bfloat16()
            del stored[name]
            stored.update({name + end: tensor for end, tensor in held.items()})
    stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    dequantize(base, out)
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


MXFP6 = {
    "quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 6, "type": "float", "group_size": 32}}},
}  # fmt: skip
REFUSED: list[tuple[dict[str, Any], Tensors, str]] = [
    ({}, {}, "declares no quantized weights"),
    ({"quant_method": "gptq"}, {}, "method 'gptq' is not known. Known are fp8, mxfp4, compressed-tensors"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, {}, "method 'modelopt' is not known"),
    ({"quant_method": "fbgemm_fp8"}, {}, "method 'fbgemm_fp8' is not known"),
    ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, {},
     "its transform_config rotates weights"),
    ({"quant_method": "compressed-tensors"}, {"q.weight_packed": torch.zeros(2, dtype=torch.int32)}, "no weight of it"),
    ({"quant_method": "compressed-tensors"}, {
        "q.weight_packed": torch.zeros(8, 3, dtype=torch.int32), "q.weight_scale": torch.ones(8, 1),
        "q.weight_shape": torch.tensor([8, 32])}, "32 columns in 3 words"),
    ({"quant_method": "compressed-tensors"}, {
        "q.weight": torch.zeros(8, 8, dtype=torch.int8), "q.weight_scale": torch.ones(8, 1),
        "q.weight_g_idx": torch.zeros(8, dtype=torch.int32)}, "q.weight_g_idx reorders columns"),
    (MXFP6, {"q.weight_packed": torch.zeros(8, 48, dtype=torch.uint8), "q.weight_scale": torch.ones(8, 2, dtype=torch.uint8)},
     "no size of blocks that fits"),
    (FP8, {"a.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "b.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
           "b.weight_scale_inv": torch.ones(1, 1)}, "a.weight has no scales"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "tensors", "sentence"), REFUSED, ids=[row[2][:16] for row in REFUSED])
def test_what_cannot_be_dequantized(tmp_path: Path, settings: dict[str, Any], tensors: Tensors, sentence: str) -> None:
    save(tmp_path / "base", "qwen3_moe", settings)
    save_file(tensors or {"a": torch.ones(1)}, tmp_path / "base/model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=sentence):
        dequantize(tmp_path / "base", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="exists"):
        dequantize(tmp_path / "base", tmp_path)

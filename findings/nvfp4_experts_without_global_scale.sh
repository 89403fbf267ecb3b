#!/usr/bin/env bash
# transformers 5.23.0: dequantize=True leaves the global scale of NVFP4 out of the experts of a mixture.
#
# A weight in NVFP4 of compressed-tensors is its FP4 numbers times a scale for each 16 of them, divided by one global scale.
# Loading with CompressedTensorsConfig(dequantize=True) applies all of it to attention, dense layers and the router. The
# experts become one fused weight, and the step that reads them takes their numbers and scales only. The loading report is
# clean, and a model that is saved from it holds experts that are thousands of times too large.
#
# Seen (one layer, quantized by compressed-tensors itself):
#   attention: loaded / dequantized by compressed-tensors = 1.0
#   experts:   loaded / dequantized by compressed-tensors = 21509.3, the global scale is 21504.0
#   missing, unexpected or mismatched: 0
#
# Why one would guess otherwise: the same call is right for every dense model in this format and for mixtures in INT4.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0
"$where/env/bin/pip" install -q transformers==5.23.0 accelerate==1.15.0 compressed-tensors==0.20.1
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1
"$where/env/bin/python" -W ignore - "$where/model" <<'END'
import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
folder = Path(sys.argv[1])
FORMAT = "nvfp4-pack-quantized"
weights = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=FORMAT)
compressor = BaseCompressor.get_value_from_registry(FORMAT)
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_experts=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts_per_tok=1,
)  # fmt: skip
Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
stored, dense = {}, {}
GLOBAL = torch.tensor([21504.0])
for name, weight in load_file(folder / "model.safetensors").items():
    if not name.endswith("_proj.weight"):
        stored[name] = weight
        continue
    largest = weight.float().unflatten(1, (-1, 16)).abs().amax(-1)
    scale = (largest / 6 * GLOBAL).to(torch.float8_e4m3fn).float()
    parts = compressor.compress({"weight": weight, "weight_scale": scale, "weight_global_scale": GLOBAL}, scheme)
    stored.update({f"{name.removesuffix('.weight')}.{part}": held.clone() for part, held in parts.items()})
    dense[name] = compressor.decompress(parts, scheme)["weight"].bfloat16()
save_file(stored, folder / "model.safetensors", {"format": "pt"})
declared = {"quant_method": "compressed-tensors", "format": FORMAT, "quantization_status": "compressed"}
declared |= {"ignore": ["lm_head"], "config_groups": {"group_0": scheme.model_dump(mode="json")}}
values = json.loads((folder / "config.json").read_text())
(folder / "config.json").write_text(json.dumps(values | {"quantization_config": declared}))

loaded, report = Qwen3MoeForCausalLM.from_pretrained(
    folder, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True), output_loading_info=True
)
layer = loaded.model.layers[0]


def ratio(found, name):
    expected = dense[f"model.layers.0.{name}.weight"]
    held = expected != 0
    return (found[held].float() / expected[held].float()).median().item()


attention = ratio(layer.self_attn.q_proj.weight, "self_attn.q_proj")
experts = ratio(layer.mlp.experts.down_proj[0], "mlp.experts.0.down_proj")
problems = sum(len(found) for found in report.values())
print(f"attention: loaded / dequantized by compressed-tensors = {attention:.1f}")
print(f"experts:   loaded / dequantized by compressed-tensors = {experts:.1f}, the global scale is {GLOBAL.item():.1f}")
print(f"missing, unexpected or mismatched: {problems}")
same = attention == 1 and abs(experts / GLOBAL.item() - 1) < 0.01 and problems == 0
print("as described" if same else "CHANGED")
sys.exit(not same)
END

#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.23.0: what target_modules="all-linear" adapts in a mixture of experts depends on the model type.
#
# The experts of a mixture are one stacked parameter each in transformers 5, not linear layers. For some types PEFT adds them
# through target_parameters, with another rank for the fused gate and up projection, and adapts the router too. For other types
# with the same kind of experts it adds neither, and the shared expert of a third type is the only one that gets an adapter.
#
# Seen (one decoder layer, four experts, r=8; "rank" is that of one expert's adapter):
#   qwen3_moe: attention, router, experts.gate_up_proj with rank 16, experts.down_proj with rank 8
#   mixtral: attention, router, experts.gate_up_proj with rank 16, experts.down_proj with rank 8
#   gpt_oss: attention
#   granitemoe: attention
#   qwen2_moe: attention, shared expert
#
# Why one would guess otherwise: QLoRA's "all linear layers" is one recipe for all models, and nothing is printed about experts
# that are left out. Two mixtures fine-tuned by the same line differ by most of their trainable weights, and a router that is
# adapted changes which experts a token passes.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0
"$where/env/bin/pip" install -q transformers==5.23.0 peft==0.21.2
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1
"$where/env/bin/python" -W ignore - <<'END'
import sys

import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS = 4
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
OWN = {
    "qwen3_moe": dict(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    "mixtral": dict(num_local_experts=EXPERTS, num_experts_per_tok=2),
    "gpt_oss": dict(num_local_experts=EXPERTS, num_experts_per_tok=2, head_dim=8),
    "granitemoe": dict(num_local_experts=EXPERTS, num_experts_per_tok=2),
    "qwen2_moe": dict(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16),
}
SEEN = {
    "qwen3_moe": "attention, router, experts.gate_up_proj with rank 16, experts.down_proj with rank 8",
    "mixtral": "attention, router, experts.gate_up_proj with rank 16, experts.down_proj with rank 8",
    "gpt_oss": "attention",
    "granitemoe": "attention",
    "qwen2_moe": "attention, shared expert",
}


def adapted(kind):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **OWN[kind]))
    stacked = sorted({name.rpartition("experts.")[2] for name, value in model.named_parameters() if value.dim() == 3})
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    found = {}
    for name, value in model.named_parameters():
        if ".lora_A." not in name:
            continue
        if ".experts." in name:
            part = "gate_up_proj" if "base_layer" in name else "down_proj"
            assert part in stacked
            found[f"experts.{part} with rank {value.shape[0] // EXPERTS}"] = 2 - ("gate" in part)
        else:
            found["attention" if "self_attn" in name else "shared expert" if "shared" in name else "router"] = 0
    order = ["attention", "router", "shared expert"]
    return ", ".join(sorted(found, key=lambda name: (order.index(name) if name in order else 3, found[name])))


result = {kind: adapted(kind) for kind in OWN}
print("\n".join(f"{kind}: {parts}" for kind, parts in result.items()))
print("as described" if result == SEEN else "CHANGED")
sys.exit(result != SEEN)
END

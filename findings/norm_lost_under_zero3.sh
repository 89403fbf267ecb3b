#!/usr/bin/env bash
# transformers 5.23.0 with DeepSpeed 0.19.8: ZeRO-3 loads a DeepSeek V4 that transformers saved without its last norm.
#
# transformers renames the tensors of a checkpoint while it loads them. Under ZeRO-3 it does so in another function, which takes
# the published file's rule for `.norm.` (a norm of the attention) also for `model.norm.weight`, and then leaves it out.
#
# Seen (a tiny model whose last norm is 2 everywhere, saved by `save_pretrained`; one process on a CPU):
#   in the file: model.norm.weight
#   plain: missing none, last norm 2.0
#   ZeRO-3: missing model.norm.weight, last norm 1.0
#
# Why one would guess otherwise: the same call on the same folder is right without DeepSpeed. Under ZeRO-3 it ends well too, with
# a line in a report that ranks rarely show, and a training starts from another model. Compare a tensor after loading.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0 setuptools wheel numpy==2.4.6
DS_BUILD_OPS=0 "$where/env/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
"$where/env/bin/pip" install -q transformers==5.23.0 accelerate==1.15.0
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1 DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
MASTER_PORT=$("$where/env/bin/python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
export MASTER_PORT
"$where/env/bin/python" -W ignore - "$where/model" 2>"$where/log" <<'END' || { status=$?; cat "$where/log"; exit $status; }
import sys

import deepspeed
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DeepseekV4Config
from transformers.integrations import HfDeepSpeedConfig

NORM, folder = "model.norm.weight", sys.argv[1]


def loaded():
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    weight = model.get_parameter(NORM)
    with deepspeed.zero.GatheredParameters([weight]):
        return sorted(report["missing_keys"]), weight.mean().item()


config = DeepseekV4Config(
    vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=1, n_routed_experts=4, num_experts_per_tok=2,
)
model = AutoModelForCausalLM.from_config(config)
torch.nn.init.constant_(model.get_parameter(NORM), 2.0)
model.save_pretrained(folder)
with safe_open(f"{folder}/model.safetensors", "pt") as file:
    saved = NORM in file.keys()
print(f"\nin the file: {NORM if saved else 'no last norm'}")
plain = loaded()
deepspeed.init_distributed("gloo")
zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
sharded = loaded()
for name, (missing, value) in {"plain": plain, "ZeRO-3": sharded}.items():
    print(f"{name}: missing {', '.join(missing) or 'none'}, last norm {value}")
same = saved and plain == ([], 2.0) and sharded == ([NORM], 1.0)
print("as described" if same else "CHANGED")
sys.exit(not same)
END

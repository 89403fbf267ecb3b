#!/usr/bin/env bash
# DeepSpeed 0.19.8 with torch 2.13.0: the memory estimators count a model on the meta device as its last parameter alone.
#
# estimate_zero2_model_states_mem_needs_all_live and the one of ZeRO-3 count shared parameters once, which they find by the
# address of the data. On the meta device every address is 0, so all parameters are "shared", and the size of the last one is
# the total. The largest layer is counted otherwise and is right, so it can be larger than the whole model. No error.
#
# Seen (36 blocks of two linear layers, 302 million parameters, 1 node with 8 GPUs, without offload):
#   ZeRO-3 on the CPU: 302M total params, 4M largest layer params, 0.65 GB per GPU
#   ZeRO-3 on meta:    0M total params, 4M largest layer params, 0.02 GB per GPU
#   ZeRO-2 on the CPU: 302M total params, 1.2 GB per GPU
#   ZeRO-2 on meta:    0M total params, 0.0 GB per GPU
#
# Why one would guess otherwise: the estimate needs shapes only, and a model that is too large to build here is the one
# whose memory has to be estimated, so the meta device is the obvious way. It keeps sizes, and sum(p.numel()) is right on it.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$where/env/bin/pip" install -q deepspeed==0.19.8
export DS_ACCELERATOR=cpu HOME="$where"
"$where/env/bin/python" -W ignore - <<'END'
import contextlib
import io
import re
import sys

import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live as estimate3
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live as estimate2


def model():
    parts = [torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)) for _ in range(36)]
    return torch.nn.Sequential(*parts, torch.nn.LayerNorm(1024))


def estimate(function, model):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        function(model, num_gpus_per_node=8, num_nodes=1)
    text = text.getvalue()
    total = re.search(r"Model with .*", text).group()
    none = next(line for line in text.splitlines() if "offload_optimizer=none" in line)
    return total, float(re.findall(r"([\d.]+)GB", none)[1])


same = True
real = model()
with torch.device("meta"):
    meta = model()
count = sum(p.numel() for p in meta.parameters())
print("parameters:", sum(p.numel() for p in real.parameters()), "on meta:", count)
for name, function in (("ZeRO-2", estimate2), ("ZeRO-3", estimate3)):
    of_real, gpu_real = estimate(function, real)
    of_meta, gpu_meta = estimate(function, meta)
    print(f"{name} on the CPU: {of_real} {gpu_real} GB per GPU")
    print(f"{name} on meta:    {of_meta} {gpu_meta} GB per GPU")
    same &= f" {round(count / 1e6)}M total" in of_real and " 0M total" in of_meta and gpu_meta < gpu_real / 10
print("as described" if same else "CHANGED")
sys.exit(not same)
END

#!/usr/bin/env bash
# DeepSpeed 0.19.8 with transformers 5.23.0: under ZeRO, Adafactor keeps four bytes per weight and makes other steps.
#
# Adafactor saves memory by keeping the sums of the rows and columns of a matrix instead of a number per weight. ZeRO gives the
# optimizer flat vectors of many weights in place of the matrices. A vector has no rows, so Adafactor keeps a number per weight,
# and its clipping by the root mean square goes over the whole vector instead of one matrix. Nothing says so.
#
# Seen (a linear layer of 256 x 128 weights, one step on the same gradient, one process on a CPU):
#   plain: 384 numbers of state for 32768 weights
#   ZeRO-1: 32768 numbers of state for 32768 weights
#   largest difference of the two updates over the learning rate: more than 1: True
#   AdamW, which is element by element: largest difference below 0.1: True
#
# Why one would guess otherwise: Adafactor is chosen for its small state, ZeRO for a smaller one still, and Trainer sets
# zero_allow_untested_optimizer by itself, so that the pair trains without a warning. Estimates that count Adafactor's factors are
# too low by the size of a moment of Adam.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0 setuptools wheel numpy==2.4.6
DS_BUILD_OPS=0 "$where/env/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
"$where/env/bin/pip" install -q transformers==5.23.0
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1 DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
MASTER_PORT=$("$where/env/bin/python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
export MASTER_PORT
"$where/env/bin/python" -W ignore - 2>"$where/log" <<'END' || { status=$?; cat "$where/log"; exit $status; }
import sys

import deepspeed
import torch
from transformers.optimization import Adafactor

RATE = 1e-2
made = {
    "Adafactor": lambda weights: Adafactor(weights, lr=RATE, scale_parameter=False, relative_step=False),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0),
}
torch.manual_seed(0)
start, gradient = torch.randn(256, 128), torch.randn(256, 128)


def numbers(optimizer):
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(value.numel() for value in tensors if value.numel() > 1)


def step(name, zero):
    layer = torch.nn.Linear(128, 256, bias=False)
    layer.weight.data.copy_(start)
    if not zero:
        optimizer = made[name](layer.parameters())
        layer.weight.grad = gradient.clone()
        optimizer.step()
        return layer.weight.data, numbers(optimizer)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    engine, optimizer, *_ = deepspeed.initialize(model=layer, optimizer=made[name](layer.parameters()), config=config)
    engine.backward((engine.module.weight * gradient).sum())
    engine.step()
    return engine.module.weight.data, numbers(optimizer.optimizer)


deepspeed.init_distributed("gloo")
print()
same = True
for name in made:
    (plain, few), (under, many) = step(name, False), step(name, True)
    difference = ((plain - under).abs().max() / RATE).item()
    if name == "Adafactor":
        print(f"plain: {few} numbers of state for {plain.numel()} weights")
        print(f"ZeRO-1: {many} numbers of state for {plain.numel()} weights")
        print(f"largest difference of the two updates over the learning rate: more than 1: {difference > 1}")
        same &= few == 256 + 128 and many == plain.numel() and difference > 1
    else:
        print(f"AdamW, which is element by element: largest difference below 0.1: {difference < 0.1}")
        same &= difference < 0.1
print("as described" if same else "CHANGED")
sys.exit(not same)
END

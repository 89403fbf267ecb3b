#!/usr/bin/env bash
# DeepSpeed 0.19.8: with Muon under ZeRO, `gradient_clipping` shrinks the update itself and not the gradient.
#
# Muon makes the momentum of a matrix orthogonal, so that an update has the same length however long the gradient was: clipping
# the gradient of a single step changes nothing. Under ZeRO the orthogonal update takes the place of the gradient before the norm
# is computed, and its norm is about the root of the matrix' smaller side. A usual limit of 1.0 is always exceeded then.
#
# Seen (a linear layer of 96 x 48 weights, one step at rate 0.02, one process on a CPU; length of the step):
#   by itself: clipping changes the step: False
#   ZeRO-2 without clipping: as by itself: True
#   ZeRO-2, gradient_clipping 1.0: less than a third of it: True
#
# Why one would guess otherwise: 1.0 is Trainer's default and fills an "auto" in the DeepSpeed file. The training runs without a
# warning at a fraction of its learning rate, which depends on the sizes of the matrices.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0 setuptools wheel numpy==2.4.6
DS_BUILD_OPS=0 "$where/env/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
export DS_ACCELERATOR=cpu TORCHDYNAMO_DISABLE=1 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
MASTER_PORT=$("$where/env/bin/python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
export MASTER_PORT
"$where/env/bin/python" -W ignore - 2>"$where/log" <<'END' || { status=$?; cat "$where/log"; exit $status; }
import sys

import deepspeed
import torch
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

torch.manual_seed(0)
start, gradient = torch.randn(96, 48), torch.randn(96, 48)


def step(clipping, zero):
    layer = torch.nn.Linear(48, 96, bias=False)
    layer.weight.data.copy_(start)
    layer.weight.use_muon = True
    groups = [{"params": [layer.weight], "use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}]
    optimizer = MuonWithAuxAdam(groups)
    if zero:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": clipping,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=config)
        engine.backward((engine.module.weight * gradient).sum())
        engine.step()
        return (engine.module.weight.data - start).norm().item()
    layer.weight.grad = gradient.clone()
    if clipping:
        torch.nn.utils.clip_grad_norm_(layer.parameters(), clipping)
    optimizer.step()
    return (layer.weight.data - start).norm().item()


deepspeed.init_distributed("gloo")
plain, plain_clipped, zero, zero_clipped = (step(clipping, under) for under in (False, True) for clipping in (0.0, 1.0))
seen = [
    f"by itself: clipping changes the step: {abs(plain_clipped / plain - 1) > 0.05}",
    f"ZeRO-2 without clipping: as by itself: {abs(zero / plain - 1) < 0.05}",
    f"ZeRO-2, gradient_clipping 1.0: less than a third of it: {zero_clipped < plain / 3}",
]
print(*seen, sep="\n")
print(f"({plain:.4f}, {plain_clipped:.4f}; {zero:.4f}, {zero_clipped:.4f})")
same = [line.endswith(end) for line, end in zip(seen, ("False", "True", "True"))]
print("as described" if all(same) else "no longer as described")
sys.exit(not all(same))
END

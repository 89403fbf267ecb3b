#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint: a new optimizer loads its learning rate and none of its moments, without an error.
#
# dcp.load reads what the given state dict has. The state dict of an optimizer that made no step has its parameter groups and
# an empty "state", so the moments in the checkpoint are not asked for. The strict planner complains of what is asked for and
# absent, never of what is there and not asked for.
#
# Seen (AdamW at lr 0.5, three steps, saved; a new AdamW at lr 0.1, loaded):
#   new optimizer: lr 0.5, moments of 0 parameters
#   after one step: lr 0.5, moments of 2 parameters, those of the checkpoint: True
#   a weight more than the checkpoint has: CheckpointException, names the missing key: True, is an Exception: False
#   torch.load into a new optimizer: moments of 2 parameters
#   get_state_dict of a new optimizer asks for the moments of 2 parameters
#
# Why one would guess otherwise: optimizer.load_state_dict of the same content from torch.load into the same new
# optimizer brings the moments. The load is strict, a missing name ends it, and the learning rate that arrives
# looks like proof that the optimizer was resumed. The helper get_state_dict makes the states first. And a fallback to an
# older checkpoint with "except Exception" does not catch the error that the load does raise: it is a BaseException.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$where/env/bin/python" -W ignore - "$where" <<'END'
import io
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

folder = sys.argv[1] + "/checkpoint"


def pair(lr):
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def step(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def load(model, optimizer, state=None):
    state = state or {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return state["optimizer"]


old, old_optimizer = pair(0.5)
for _ in range(3):
    step(old, old_optimizer)
saved = old_optimizer.state_dict()
dcp.save({"model": old.state_dict(), "optimizer": saved}, checkpoint_id=folder)

model, optimizer = pair(0.1)
optimizer.load_state_dict(load(model, optimizer))
new = optimizer.state_dict()
print(f"new optimizer: lr {new['param_groups'][0]['lr']}, moments of {len(new['state'])} parameters")

model, optimizer = pair(0.1)
step(model, optimizer)
optimizer.load_state_dict(load(model, optimizer))
stepped = optimizer.state_dict()
equal = all(torch.equal(stepped["state"][i][k], saved["state"][i][k]) for i in saved["state"] for k in saved["state"][i])
print(f"after one step: lr {stepped['param_groups'][0]['lr']}, moments of {len(stepped['state'])} parameters, "
      f"those of the checkpoint: {equal}")

model, optimizer = pair(0.1)
try:
    more = {**model.state_dict(), "more": torch.zeros(2)}
    load(model, optimizer, {"model": more, "optimizer": optimizer.state_dict()})
    strict, ordinary = False, True
except dcp.CheckpointException as error:
    strict = "Missing key" in str(error)
    ordinary = isinstance(error, Exception)
    print(f"a weight more than the checkpoint has: {type(error).__name__}, names the missing key: {strict}, "
          f"is an Exception: {ordinary}")

file = io.BytesIO()
torch.save(saved, file)
file.seek(0)
model, optimizer = pair(0.1)
optimizer.load_state_dict(torch.load(file))
plain = len(optimizer.state_dict()["state"])
print(f"torch.load into a new optimizer: moments of {plain} parameters")

model, optimizer = pair(0.1)
helped = len(get_state_dict(model, optimizer)[1]["state"])
print(f"get_state_dict of a new optimizer asks for the moments of {helped} parameters")

seen = (new["param_groups"][0]["lr"], len(new["state"]), equal, strict, ordinary, plain, helped)
same = seen == (0.5, 0, True, True, False, 2, 2)
print("as described" if same else "CHANGED")
sys.exit(not same)
END

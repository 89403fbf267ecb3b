#!/usr/bin/env bash
# torch 2.13.0: under FSDP2, `torch.optim.Muon` has another update on each number of ranks, and stops at a matrix of one row.
#
# Muon's update of a matrix does not depend on how FSDP2 divides it: DTensor computes the products of the shards. But the
# iteration runs in bf16, and products over the divided dimension are added between the ranks in bf16, eleven times a matrix.
#
# Seen (two ranks on a CPU, a weight in rows on both, one step without weight decay; difference of the steps):
#   96 x 48: at least 1 % of the step of the whole matrix: True
#   1 x 50: RuntimeError at the step: True
#
# Why one would guess otherwise: AdamW has the same update, bit for bit, under DDP and FSDP2. Gather the momentum of a matrix
# first (`full_tensor`), and it is the same for Muon.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$where/seen.py" <<'END'
import sys

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes


def step(shape, mesh=None):
    torch.manual_seed(0)
    tensors = torch.randn(shape), torch.randn(shape)
    start, gradient = tensors if mesh is None else (distribute_tensor(one, mesh, [Shard(0)]) for one in tensors)
    weight = torch.nn.Parameter(start.clone())
    weight.grad = gradient
    torch.optim.Muon([weight], weight_decay=0.0).step()
    moved = weight.detach() - start
    return moved if mesh is None else moved.full_tensor()


def rank(number, folder):
    distributed.init_process_group("gloo", store=distributed.FileStore(f"{folder}/store", 2), rank=number, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = step((96, 48))
    difference = ((step((96, 48), mesh) - whole).norm() / whole.norm()).item()
    step((1, 50))
    try:
        step((1, 50), mesh)
        error = "none"
    except RuntimeError as found:
        error = str(found)
    seen = [difference >= 0.01, "placement" in error]
    if number == 0:
        print(f"96 x 48: at least 1 % of the step of the whole matrix: {seen[0]}")
        print(f"1 x 50: RuntimeError at the step: {seen[1]}")
        print(f"({difference:.4f}; {error[:120]})")
        print("as described" if all(seen) else "no longer as described")
    sys.exit(not all(seen))


if __name__ == "__main__":
    start_processes(rank, (sys.argv[1],), nprocs=2)
END
GLOO_SOCKET_IFNAME=lo "$where/env/bin/python" -W ignore "$where/seen.py" "$where" 2>"$where/log" ||
    { status=$?; cat "$where/log"; exit $status; }

"""Two ranks on one device over gloo: ``python -m benchmarks.gpu_kit.two_ranks CASE WORK``.

NCCL refuses two ranks on one GPU. Each collective that DDP, ZeRO and FSDP use is tried on tensors of the device, then a
step under DDP and under FSDP2; the last line says for each ``ok`` or the error.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardmake.run.turns import wait_for_turn

SIZE = 1 << 20


def _ddp(device: torch.device) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    model(torch.ones(2, 64, device=device)).sum().backward()


def _fsdp(device: torch.device) -> None:
    model = torch.nn.Linear(64, 64).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (2,)))
    model(torch.ones(2, 64, device=device)).sum().backward()


def attempts(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return what is tried, by name."""
    whole = torch.ones(SIZE, device=device)
    parts = [torch.empty(SIZE, device=device) for _ in range(2)]
    half = torch.empty(SIZE // 2, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    return {
        "all_reduce": lambda: dist.all_reduce(whole), "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.all_gather(parts, whole),
        "all_gather_single": lambda: gather(torch.empty(2 * SIZE, device=device), whole),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(half, whole),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "a step under DDP": lambda: _ddp(device), "a step under FSDP2": lambda: _fsdp(device),
    }  # fmt: skip


def rank(number: int, folder: str) -> None:
    """Try everything as rank ``number``; rank 0 writes the results."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = {}
    for name, work in attempts(device).items():
        try:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found[name] = "ok"
        except Exception as error:  # the answer is what the library says
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    if number == 0:
        Path(folder, "found.json").write_text(json.dumps({"device": device.type, **found}))
    dist.barrier()


def main(name: str, work: Path) -> None:
    """Start the ranks, and print what they found as the last line."""
    folder = work / name
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    wait_for_turn(name)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    mp.spawn(rank, (str(folder),), nprocs=2)
    print(json.dumps(json.loads((folder / "found.json").read_text())))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

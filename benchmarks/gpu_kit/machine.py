"""The machine that the cases run on: one GPU, or the CPU of a rehearsal."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import psutil

from shardmake.core.errors import ConfigError
from shardmake.core.units import GIB
from shardmake.launch.gpu_status import list_gpus
from shardmake.launch.gpus import accelerator_of

VARIABLE = "ACCELERATOR"
"""Names the catalogue's entry for a GPU that the catalogue does not recognize."""
_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_properties(device) for device in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
print(json.dumps({"gpus": [(gpu.name, gpu.total_memory) for gpu in gpus], "cuda": torch.version.cuda, "nccl": nccl}))
"""


@dataclass(frozen=True)
class Machine:
    """One GPU and the host beside it."""

    gpu: str
    """Name in the driver."""
    accelerator: str
    """Name in the catalogue."""
    memory: int
    """Bytes of the GPU."""
    host_gib: float
    cores: int
    driver: int | None = None
    cuda: str | None = None
    nccl: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Return whether the cases are only rehearsed."""
        return self.accelerator == "cpu"

    def cluster(self) -> dict[str, Any]:
        """Return the cluster file: one rank."""
        values: dict[str, Any] = {
            "executor": "local", "accelerator": self.accelerator, "processes_per_node": 1, "cpus_per_node": self.cores,
            "memory_gib_per_node": self.host_gib, "internet_on_compute_nodes": False,
        }  # fmt: skip
        return values if self.is_cpu else values | {"gpu_memory_gib": int(self.memory / GIB * 10) / 10}


H100 = Machine("NVIDIA H100 80GB HBM3", "h100", 85_017_493_504, host_gib=100, cores=16)
MACHINES = {
    "h100": H100,
    "h200": replace(H100, gpu="NVIDIA H200", accelerator="h200", memory=150_000_000_000),
    "cpu": Machine("CPU", "cpu", 4 << 30, host_gib=8, cores=2),
}
"""Machines for which cases are prepared elsewhere."""


def find_machine() -> Machine:
    """Return this machine with its first GPU.

    Raises:
        ConfigError: There is no GPU that torch can use, or its model is unknown.
    """
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"make gpu-check cannot use the GPU: {reason}. Run `shardmake doctor --node`.")
    found = json.loads(probe.stdout.splitlines()[-1])
    if not found["gpus"]:
        raise ConfigError(
            f"make gpu-check found no GPU. It needs one that torch (built for CUDA {found['cuda']}) can use. "
            "Run it on a node with GPUs; `shardmake doctor --node` reports what is missing."
        )
    name, memory = found["gpus"][0]
    accelerator = os.environ.get(VARIABLE) or accelerator_of(name, memory / GIB)
    if accelerator is None:
        raise ConfigError(
            f"make gpu-check does not know the GPU {name!r} with {memory / GIB:.1f} GiB. Name the most similar one of "
            f"`shardmake estimate --list-gpus`: make gpu-check {VARIABLE}=a100-80gb"
        )
    return Machine(
        gpu=name, accelerator=accelerator, memory=memory, host_gib=round(psutil.virtual_memory().available / GIB, 1),
        cores=len(os.sched_getaffinity(0)), driver=next((gpu.driver for gpu in list_gpus() or []), None),
        cuda=found["cuda"], nccl=found["nccl"],
    )  # fmt: skip

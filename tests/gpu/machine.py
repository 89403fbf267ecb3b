"""The machine that the checks run on: its GPUs, and the cluster file for them."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import psutil

from shardmake.config.accelerators import ACCELERATORS
from shardmake.config.models import Precision
from shardmake.config.strategies import STRATEGY_SPECS, StrategySpec
from shardmake.core.errors import ConfigError
from shardmake.core.units import GIB
from shardmake.launch.gpu_status import list_gpus
from shardmake.launch.gpus import accelerator_of

MOST_RANKS = 8
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
    """The GPUs of this machine, or its CPU in the tests of the checks."""

    gpu: str
    """Name in the driver."""
    accelerator: str
    """Name in the catalogue."""
    memory: int
    """Bytes of one GPU."""
    ranks: int
    driver: int | None = None
    cuda: str | None = None
    nccl: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Return whether the ranks run without GPUs."""
        return self.accelerator == "cpu"

    @property
    def precision(self) -> Precision:
        """Return the precision of the trainings: loss scaling in fp16 skips other steps in each library."""
        return "bf16" if not self.is_cpu and ACCELERATORS[self.accelerator].bf16 else "fp32"

    def cluster(self) -> dict[str, Any]:
        """Return the cluster file."""
        values: dict[str, Any] = {
            "executor": "local",
            "accelerator": self.accelerator,
            "processes_per_node": self.ranks,
            "cpus_per_node": len(os.sched_getaffinity(0)),
            "memory_gib_per_node": round(psutil.virtual_memory().available / GIB, 1),
        }
        return values if self.is_cpu else values | {"gpu_memory_gib": int(self.memory / GIB * 10) / 10}

    def why_not(self, strategy: str) -> str:
        """Return why the checks leave out ``strategy``; empty if they train it."""
        spec = STRATEGY_SPECS[strategy]
        if spec.uses_nvme:
            return "it needs a folder on NVMe"
        if spec.needs_several_nodes:
            return "it needs two nodes"
        if self.is_cpu and (not spec.cpu or spec.offload_optimizer):
            return "it needs a GPU"
        if self.ranks == 1 and _repeats(spec):
            return "one GPU trains a strategy that differs little from it"
        return ""


def _repeats(spec: StrategySpec) -> bool:
    """Return whether another strategy runs the same code on one rank, to end within ten minutes."""
    return not spec.reshard_after_forward or (spec.offload_optimizer is not None and spec.offload_param is None)


def find_machine() -> Machine:
    """Return this machine with as many ranks as its GPUs allow: 1, 2, 4 or 8.

    Raises:
        ConfigError: There is no GPU that torch can use, or its model is unknown.
    """
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"make gpu-check cannot use the GPUs: {reason}. Run `shardmake doctor --node`.")
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
    gpus = list_gpus() or []
    return Machine(
        gpu=name,
        accelerator=accelerator,
        memory=memory,
        ranks=max(ranks for ranks in (1, 2, 4, MOST_RANKS) if ranks <= len(found["gpus"])),
        driver=gpus[0].driver if gpus else None,
        cuda=found["cuda"],
        nccl=found["nccl"],
    )

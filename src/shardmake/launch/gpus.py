"""The GPUs of a node as nvidia-smi reports them, and whether the installed build of torch can use them."""

import runpy
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from shardmake.core.process import wait_for_output
from shardmake.core.units import GIB

GPU_IDLE_BYTES = 2 * GIB
"""Memory that the GPU driver, a display or a monitor may use on an idle GPU."""
_NVIDIA_SMI_SECONDS = 60.0
"""Without the persistence daemon, the driver needs many seconds to start eight GPUs."""
_FIELDS = "index,uuid,memory.used,ecc.errors.uncorrected.volatile.total,driver_version,compute_cap"

# https://docs.nvidia.com/deploy/cuda-compatibility: a driver serves all minor versions of its CUDA.
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Branch of the oldest driver for each major version of CUDA."""
# CUDA 13 dropped Maxwell, Pascal and Volta; Blackwell came with 12.8 (release notes of the toolkit).
_OLDEST_CAPABILITY = {12: 5.0, 13: 7.5}
_BLACKWELL, _CUDA_OF_BLACKWELL = 10.0, (12, 8)


class GpuStatus(NamedTuple):
    """One GPU as nvidia-smi lists it; None for a value that it does not report."""

    number: str
    uuid: str
    used: int | None
    """Bytes."""
    uncorrected_errors: int
    driver: int | None = None
    """Branch of the driver, such as 550."""
    capability: float | None = None


class TorchBuild(NamedTuple):
    """The platforms that torch was built for; None for the others."""

    cuda: str | None
    """Version, such as 13.0."""
    hip: str | None


def installed_build() -> TorchBuild:
    """Return the build of the installed torch, from the file that names it and without importing torch."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    values = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return TorchBuild(values.get("cuda"), values.get("hip"))


def list_gpus() -> list[GpuStatus] | None:
    """Return the GPUs of this node; None if nvidia-smi does not answer."""
    answer = _query(_FIELDS) or _query(_FIELDS.removesuffix(",compute_cap"))  # older drivers do not have this field
    return None if answer is None else parse_gpus(answer)


def _query(fields: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    answer = wait_for_output(process, _NVIDIA_SMI_SECONDS)
    return answer if process.returncode == 0 else None


def parse_gpus(text: str) -> list[GpuStatus]:
    """Parse the rows of nvidia-smi; memory is in MiB.

    Unavailable values are text: ``[N/A]``, ``[Insufficient Permissions]``.
    """
    rows = [[field.strip() for field in f"{line},,".split(",")] for line in text.splitlines() if line.strip()]
    return [
        GpuStatus(
            number=row[0],
            uuid=row[1],
            used=int(row[2]) << 20 if row[2].isdigit() else None,
            uncorrected_errors=int(row[3]) if row[3].isdigit() else 0,
            driver=int(branch) if (branch := row[4].partition(".")[0]).isdigit() else None,
            capability=float(row[5]) if row[5].replace(".", "").isdigit() else None,
        )
        for row in rows
    ]


def check_gpus(gpus: Sequence[GpuStatus] | None, visible: str | None, planned: int) -> list[str]:
    """Return findings about GPUs that are missing, in use or broken.

    Args:
        gpus: Every GPU of the node; None if nvidia-smi does not answer.
        visible: ``CUDA_VISIBLE_DEVICES``: indices, UUIDs or their prefixes, slices (MIG-...); None for all.
        planned: Number of ranks, one per GPU.
    """
    if gpus is None:
        return ["nvidia-smi does not answer"]
    named = [gpu.number for gpu in gpus] if visible is None else [name.strip() for name in visible.split(",")]
    mine = [gpu for gpu in gpus if any(_names(name, gpu) for name in named)]
    slices = sum(name.startswith("MIG-") for name in named)  # nvidia-smi does not list slices as GPUs
    count = len(mine) + slices
    findings = [f"{count} GPUs are visible, and the plan needs {planned}"] if count < planned else []
    if slices > 1 and planned > 1:
        findings.append(f"{slices} MIG slices are visible, but CUDA shows only the first: one rank per node works")
    for gpu in mine:
        if gpu.used is not None and gpu.used > GPU_IDLE_BYTES:
            findings.append(f"GPU {gpu.number} is in use: {gpu.used / GIB:.1f} GiB")
        if gpu.uncorrected_errors:
            findings.append(f"GPU {gpu.number} has {gpu.uncorrected_errors} uncorrected memory errors")
    return findings


def check_build(gpus: Sequence[GpuStatus], build: TorchBuild) -> list[str]:
    """Return findings about a torch that cannot use these GPUs; they hold for every node of this kind."""
    if build.cuda is None:
        return ["torch is a build without CUDA: install torch for the CUDA version of the nodes' driver"]
    version = tuple(int(part) for part in build.cuda.split(".")[:2])
    return sorted({finding for gpu in gpus for finding in _misfits(gpu, build.cuda, version)})


def _misfits(gpu: GpuStatus, cuda: str, version: tuple[int, ...]) -> Iterator[str]:
    driver = _OLDEST_DRIVER.get(version[0])
    if gpu.driver and driver and gpu.driver < driver:
        yield (
            f"the NVIDIA driver is {gpu.driver}, and this torch, built for CUDA {cuda}, needs {driver} or newer: "
            "install torch for an older CUDA"
        )
    if gpu.capability is None:
        return
    if gpu.capability < _OLDEST_CAPABILITY.get(version[0], 0):
        yield (
            f"a GPU has compute capability {gpu.capability}, and torch for CUDA {cuda} starts at "
            f"{_OLDEST_CAPABILITY[version[0]]}: install torch for CUDA 12.6"
        )
    if gpu.capability >= _BLACKWELL and version < _CUDA_OF_BLACKWELL:
        yield (
            f"a GPU has compute capability {gpu.capability}, and torch for CUDA {cuda} has no code for it: install "
            "torch for CUDA 12.8 or newer"
        )


def _names(name: str, gpu: GpuStatus) -> bool:
    """Return whether ``name`` from ``CUDA_VISIBLE_DEVICES`` identifies ``gpu``."""
    return name == gpu.number or (name.startswith("GPU-") and gpu.uuid.startswith(name))

"""The GPUs of a node as nvidia-smi lists them, and whether a build of torch can use them.

The installation runs this before any package is there: it imports the standard library and modules that do too.
"""

import runpy
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from shardmake.core.process import query_gpus
from shardmake.core.units import GIB

GPU_IDLE_BYTES = 2 * GIB
"""Memory that the GPU driver, a display or a monitor may use on an idle GPU."""
_FIELDS = "index,uuid,memory.used,ecc.errors.uncorrected.volatile.total,driver_version"
_CAPABILITY = f"{_FIELDS},compute_cap"
_LANES = "pcie.link.width.current,pcie.link.width.max"
_USE = "utilization.gpu,power.draw"
_ALL_FIELDS = f"{_CAPABILITY},compute_mode,clocks_throttle_reasons.hw_slowdown,{_LANES},memory.total,{_USE}"
_RELEASE_SECONDS = 60.0
"""The driver frees the memory of a killed process within this time."""
_RELEASE_POLL_SECONDS = 2.0

# https://docs.nvidia.com/deploy/cuda-compatibility: a driver serves all minor versions of its CUDA.
_OLDEST_DRIVER = {12: 525, 13: 580}
"""Branch of the oldest driver for each major version of CUDA."""
TORCH_BUILDS = {"cu130": "13.0", "cu126": "12.6"}
"""CUDA versions of the stable builds of torch 2.12 to 2.14, newest first (RELEASE.md of pytorch/pytorch)."""
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
    compute_mode: str = ""
    is_slowed: bool = False
    """The hardware reduces the clocks because of heat or power."""
    lanes: tuple[int, int] | None = None
    """PCIe lanes in use and of the GPU."""
    memory: int | None = None
    """Bytes; a few hundred MiB more than programs can allocate."""
    percent: float | None = None
    """Percent of the last second or less in which a kernel ran."""
    watts: float | None = None


def installed_cuda() -> str | None:
    """Return the CUDA version of the installed torch, such as 13.0; None for a build without CUDA.

    It is read from the file that names it, without importing torch.
    """
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    version: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    return version


def list_gpus() -> list[GpuStatus] | None:
    """Return the GPUs of this node; None if nvidia-smi does not answer."""
    for fields in (_ALL_FIELDS, _CAPABILITY, _FIELDS):  # older drivers refuse a query with a field that they lack
        answer = query_gpus(fields)
        if answer != "":
            break
    return parse_gpus(answer) if answer else None


def list_released_gpus(visible: str | None) -> list[GpuStatus] | None:
    """Return `list_gpus` once the ``visible`` GPUs are not in use, or after a minute.

    The ranks of a crashed attempt may still be releasing their memory.
    """
    deadline = time.monotonic() + _RELEASE_SECONDS
    while (gpus := list_gpus()) and any(map(is_used, visible_gpus(gpus, visible))) and time.monotonic() < deadline:
        time.sleep(_RELEASE_POLL_SECONDS)
    return gpus


def parse_gpus(text: str) -> list[GpuStatus]:
    """Parse the rows of nvidia-smi; memory is in MiB.

    Unavailable values are text: ``[N/A]``, ``[Insufficient Permissions]``.
    """
    rows = [[field.strip() for field in f"{line},,,,,,,,,".split(",")] for line in text.splitlines() if line.strip()]
    return [
        GpuStatus(
            number=row[0],
            uuid=row[1],
            used=int(row[2]) << 20 if row[2].isdigit() else None,
            uncorrected_errors=int(row[3]) if row[3].isdigit() else 0,
            driver=int(branch) if (branch := row[4].partition(".")[0]).isdigit() else None,
            capability=_number(row[5]),
            compute_mode=row[6],
            is_slowed=row[7] == "Active",
            lanes=(int(row[8]), int(row[9])) if row[8].isdigit() and row[9].isdigit() else None,
            memory=int(row[10]) << 20 if row[10].isdigit() else None,
            percent=_number(row[11]),
            watts=_number(row[12]),
        )
        for row in rows
    ]


def _number(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdigit() else None


def visible_gpus(gpus: Sequence[GpuStatus], visible: str | None) -> list[GpuStatus]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` names; all without it."""
    if visible is None:
        return list(gpus)
    named = [name.strip() for name in visible.split(",")]
    prefixes = tuple(name for name in named if name.startswith("GPU-"))
    return [gpu for gpu in gpus if gpu.number in named or gpu.uuid.startswith(prefixes)]


def is_used(gpu: GpuStatus) -> bool:
    """Return whether another program uses the GPU."""
    return gpu.used is not None and gpu.used > GPU_IDLE_BYTES


def newest_build(gpus: Sequence[GpuStatus]) -> str | None:
    """Return the newest of `TORCH_BUILDS` that all ``gpus`` and their driver can run; None if none can."""
    return next((name for name, cuda in TORCH_BUILDS.items() if not find_misfits(gpus, cuda)), None)


def oldest_driver(cuda: str) -> int:
    """Return the branch of the oldest driver that runs a program for the version ``cuda``."""
    return _OLDEST_DRIVER[int(cuda.partition(".")[0])]


def find_misfits(gpus: Sequence[GpuStatus], cuda: str) -> list[str]:
    """Return why these GPUs cannot run a torch that was built for the version ``cuda``."""
    return sorted({finding for gpu in gpus for finding in _misfits(gpu, cuda)})


def _misfits(gpu: GpuStatus, cuda: str) -> Iterator[str]:
    version = tuple(int(part) for part in cuda.split(".")[:2])
    driver = oldest_driver(cuda)
    if gpu.driver and gpu.driver < driver:
        yield f"the NVIDIA driver is {gpu.driver}, and torch for CUDA {cuda} needs {driver} or newer"
    if gpu.capability is None:
        return
    oldest = _OLDEST_CAPABILITY[version[0]]
    if gpu.capability < oldest:
        yield f"a GPU has compute capability {gpu.capability}, and torch for CUDA {cuda} starts at {oldest}"
    if gpu.capability >= _BLACKWELL and version < _CUDA_OF_BLACKWELL:
        yield f"a GPU has compute capability {gpu.capability}, and torch for CUDA {cuda} has no code for it"

"""The GPUs of a node as nvidia-smi reports them, and whether the installed build of torch can use them."""

import runpy
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from shardmake.config.attention import FLASH_CAPABILITY, FLASH_KERNELS, Attention
from shardmake.core.nvidia_smi import query_gpus
from shardmake.core.units import GIB

GPU_IDLE_BYTES = 2 * GIB
"""Memory that the GPU driver, a display or a monitor may use on an idle GPU."""
_FIELDS = "index,uuid,memory.used,ecc.errors.uncorrected.volatile.total,driver_version"
_CAPABILITY = f"{_FIELDS},compute_cap"
_ALL_FIELDS = (
    f"{_CAPABILITY},compute_mode,clocks_throttle_reasons.hw_slowdown,pcie.link.width.current,pcie.link.width.max"
)
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
    while (gpus := list_gpus()) and any(map(_is_used, visible_gpus(gpus, visible))) and time.monotonic() < deadline:
        time.sleep(_RELEASE_POLL_SECONDS)
    return gpus


def parse_gpus(text: str) -> list[GpuStatus]:
    """Parse the rows of nvidia-smi; memory is in MiB.

    Unavailable values are text: ``[N/A]``, ``[Insufficient Permissions]``.
    """
    rows = [[field.strip() for field in f"{line},,,,,,".split(",")] for line in text.splitlines() if line.strip()]
    return [
        GpuStatus(
            number=row[0],
            uuid=row[1],
            used=int(row[2]) << 20 if row[2].isdigit() else None,
            uncorrected_errors=int(row[3]) if row[3].isdigit() else 0,
            driver=int(branch) if (branch := row[4].partition(".")[0]).isdigit() else None,
            capability=float(row[5]) if row[5].replace(".", "").isdigit() else None,
            compute_mode=row[6],
            is_slowed=row[7] == "Active",
            lanes=(int(row[8]), int(row[9])) if row[8].isdigit() and row[9].isdigit() else None,
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
    mine = visible_gpus(gpus, visible)
    # nvidia-smi does not list slices as GPUs.
    slices = sum(name.strip().startswith("MIG-") for name in (visible or "").split(","))
    count = len(mine) + slices
    findings = [f"{count} GPUs are visible, and the plan needs {planned}"] if count < planned else []
    if slices > 1 and planned > 1:
        findings.append(f"{slices} MIG slices are visible, but CUDA shows only the first: one rank per node works")
    for gpu in mine:
        if _is_used(gpu):
            findings.append(f"GPU {gpu.number} is in use: {(gpu.used or 0) / GIB:.1f} GiB")
        if gpu.compute_mode == "Prohibited":
            findings.append(f"GPU {gpu.number} is in the compute mode Prohibited, in which no program can use it")
        if gpu.uncorrected_errors:
            findings.append(f"GPU {gpu.number} has {gpu.uncorrected_errors} uncorrected memory errors")
    return findings


def slow_gpus(gpus: Sequence[GpuStatus]) -> list[str]:
    """Return warnings about GPUs that work, but slowly."""
    slowed = [f"the hardware slows GPU {gpu.number} down because of heat or power" for gpu in gpus if gpu.is_slowed]
    narrow = [
        f"GPU {gpu.number} uses {gpu.lanes[0]} of its {gpu.lanes[1]} PCIe lanes"
        for gpu in gpus
        if gpu.lanes and gpu.lanes[0] < gpu.lanes[1]
    ]
    return slowed + narrow


def visible_gpus(gpus: Sequence[GpuStatus], visible: str | None) -> list[GpuStatus]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` names; all without it."""
    if visible is None:
        return list(gpus)
    named = [name.strip() for name in visible.split(",")]
    return [gpu for gpu in gpus if any(_names(name, gpu) for name in named)]


def _is_used(gpu: GpuStatus) -> bool:
    return gpu.used is not None and gpu.used > GPU_IDLE_BYTES


def check_build(gpus: Sequence[GpuStatus], build: TorchBuild) -> list[str]:
    """Return a finding if torch cannot use these GPUs; it holds for every node of this kind."""
    misfits = ["torch is a build without CUDA"] if build.cuda is None else find_misfits(gpus, build.cuda)
    if not misfits:
        return []
    usable = newest_build(gpus)
    remedy = (
        "update the driver, because no build of torch runs on it"
        if usable is None
        else f"run make install CUDA={usable}"
    )
    return [f"{', and '.join(misfits)}: {remedy}"]


def check_attention(gpus: Sequence[GpuStatus], attention: Attention) -> list[str]:
    """Return a finding if a GPU is too old for the planned attention kernel."""
    oldest = min((gpu.capability for gpu in gpus if gpu.capability is not None), default=FLASH_CAPABILITY)
    if attention not in FLASH_KERNELS or oldest >= FLASH_CAPABILITY:
        return []
    return [
        f"a GPU has compute capability {oldest}, and attention: {attention} needs {FLASH_CAPABILITY} or newer: set "
        "accelerator in the cluster file to the GPUs of the nodes, or set attention: sdpa"
    ]


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


def _names(name: str, gpu: GpuStatus) -> bool:
    """Return whether ``name`` from ``CUDA_VISIBLE_DEVICES`` identifies ``gpu``."""
    return name == gpu.number or (name.startswith("GPU-") and gpu.uuid.startswith(name))

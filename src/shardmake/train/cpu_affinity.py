"""Bind a rank that computes on the host to the cores near its GPU, whose memory the GPU reaches fastest.

Accelerate's ``--enable_cpu_affinity`` numbers GPUs without regard to ``CUDA_VISIBLE_DEVICES`` and ends the rank if the
job may not use those cores. torch's own binding is an option of torchrun and needs numactl.
"""

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

PCI_DEVICES = Path("/sys/bus/pci/devices")


def bind_to_gpu(device: torch.device) -> None:
    """Bind all threads of this process to the cores near ``device`` that the job may use.

    Without such cores, the process stays as it is, and the log says so.
    """
    found: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the address
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = cores_near(address) & allowed
    if not near:
        logger.warning("Not bound to the cores near GPU %s: the job may use none of them, or none is known.", address)
    elif near != allowed:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
                os.sched_setaffinity(int(thread.name), near)
        logger.info("Bound to the %d of %d cores near GPU %s.", len(near), len(allowed), address)


def cores_near(address: str) -> set[int]:
    """Return the cores on the NUMA node of the PCI device at ``address``; empty if the kernel does not know them."""
    try:
        return parse_cores((PCI_DEVICES / address / "local_cpulist").read_text())
    except OSError:
        return set()


def parse_cores(text: str) -> set[int]:
    """Return the cores of a list such as ``0-3,8,12-15``."""
    ranges = (part.split("-") for part in text.strip().split(",") if part)
    return {core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)}

"""The catalogue's name for a GPU, from its name in the driver."""

import re

from shardmake.config.accelerators import ACCELERATORS

# In this order: the first pattern that matches decides. The memory decides between two sizes of a GPU.
_PATTERNS = {
    r"V100.*": ("v100-16gb", "v100-32gb"),
    r"A100.*": ("a100-40gb", "a100-80gb"),
    r"H100 NVL": ("h100-nvl",),
    r"H100 PCIe": ("h100-pcie",),
    r"H100 80GB HBM3|H100 SXM\w*": ("h100",),
    r"GH200.*": ("gh200",),
    r"H200.*": ("h200",),
    r"B200": ("b200",),
    r"T4": ("t4",),
    r"A30": ("a30",),
    r"A10G?": ("a10",),
    r"A40": ("a40",),
    r"L40S": ("l40s",),
    r"L40": ("l40",),
    r"L4": ("l4",),
    r"RTX A6000": ("rtx-a6000",),
    r"RTX 6000 Ada Generation": ("rtx6000-ada",),
    r"GeForce RTX 2080 Ti": ("rtx2080ti",),
    r"GeForce RTX (3090|4090|5090)": ("rtx3090", "rtx4090", "rtx5090"),
}
MAX_DIFFERENCE = 0.25
"""Relative difference of memory above which a GPU is not the one in the catalogue, such as a MIG slice."""


def accelerator_of(name: str, memory_gib: float) -> str | None:
    """Return the catalogue's name for the GPU ``name`` with that memory; None if the catalogue does not have it."""
    bare = re.sub(r"^(NVIDIA|Tesla|Quadro)\s+", "", name.strip())
    for pattern, entries in _PATTERNS.items():
        if match := re.fullmatch(pattern, bare):
            named = [entry for entry in entries if match.groups() and entry.endswith(match[1])] or list(entries)
            nearest = min(named, key=lambda entry: abs(ACCELERATORS[entry].memory - memory_gib))
            memory = ACCELERATORS[nearest].memory
            return nearest if abs(memory - memory_gib) <= MAX_DIFFERENCE * memory else None
    return None

"""Compiled kernels: where they are kept, and one that is not worth compiling."""

import os
from importlib.metadata import version
from pathlib import Path


def kernel_caches(scratch: str) -> dict[str, str]:
    """Environment variables that point DeepSpeed, Triton and Inductor at ``scratch``.

    On a network file system their caches race between nodes, and a shared folder belongs to its first user.
    """
    folder = Path(scratch) / f"shardmake-{os.getuid()}"
    return {
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def hub_environment(cache: str | None, *, offline: bool) -> dict[str, str]:
    """Variables that the hub's libraries read when they are imported: their cache, and whether they may ask the hub."""
    place = {"HF_HOME": str(Path(cache).absolute())} if cache else {}
    return place | (OFFLINE if offline else {})


def leave_collectives_to_gloo() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives for the CPU.

    It does so at the first start on every node, which takes a C++ compiler and half a minute, for a kernel that
    serves inference on one node; without it, it uses gloo. Call before DeepSpeed's process group is made.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "shardmake")


def library_versions() -> dict[str, str]:
    """Versions that decide whether a checkpoint can be read again, and whether nodes can train together."""
    return {name: version(name) for name in LIBRARIES}

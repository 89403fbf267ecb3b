"""Where compiled kernels are kept: on the node, one folder a user."""

import os
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

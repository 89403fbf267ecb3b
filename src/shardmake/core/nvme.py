"""Swap files on node-local NVMe: where DeepSpeed keeps them, and their removal."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmake.core.atomic import digest


def remove_swapped(deepspeed: Mapping[str, Any]) -> None:
    """Remove what a training left on this node's NVMe; DeepSpeed does not. Only a folder from `swap_folder`."""
    sections = deepspeed.get("zero_optimization", {})
    for section in (sections.get("offload_optimizer", {}), sections.get("offload_param", {})):
        folder = Path(section.get("nvme_path", ""))
        if folder.parent.name == f"shardmake-{os.getuid()}":
            shutil.rmtree(folder, ignore_errors=True)


def swap_folder(nvme_path: str | None, run_name: str, folder: Path) -> str:
    """Folder of a run on the node-local NVMe, apart from other users' and other runs'; empty without NVMe.

    ``folder`` is one inside the run's, whose place tells runs of one name apart.
    """
    if not nvme_path:
        return ""
    run_folder = next((above for above in folder.absolute().parents if above.name == run_name), folder.absolute())
    name = f"{run_name}-{digest(str(run_folder))[:8]}"
    return str(Path(nvme_path, f"shardmake-{os.getuid()}", name))

"""Let torch.save copy storages as from a GPU, and write the additional memory of each rank's save; for tests only.

Import this into the process from which ranks are forked. torch.save copies a storage that is on a GPU to the host as a
whole; one that is on the host is written in place. Each rank writes the bytes to its file in ``SAVE_MEMORY``.
"""

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine


class CopyingWriter(torch._C.PyTorchFileWriter):
    """Writes copies of storages."""

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Write one record; a storage from its copy."""
        super().write_record(name, data.clone() if isinstance(data, torch.UntypedStorage) else data, size)


def _resident(field: str) -> int:
    """Return a line of this process's memory in bytes: "VmRSS" now, "VmHWM" the peak."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


_save = DeepSpeedEngine.save_checkpoint


def _measured_save(engine: Any, *args: Any, **kwargs: Any) -> Any:
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident("VmRSS")
    saved = _save(engine, *args, **kwargs)
    (Path(os.environ["SAVE_MEMORY"]) / os.environ["RANK"]).write_text(str(_resident("VmHWM") - before))
    return saved


torch._C.PyTorchFileWriter = CopyingWriter  # type: ignore[misc]
DeepSpeedEngine.save_checkpoint = _measured_save

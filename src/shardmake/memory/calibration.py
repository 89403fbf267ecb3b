"""Memory that only a probe on a GPU can measure: CUDA's context, NCCL's buffers, pools of other streams.

The user's cache holds a calibration per accelerator and torch version, so that a login node uses a compute node's.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardmake.core.atomic import digest, write_json
from shardmake.core.environment import cache_folder, library_version
from shardmake.core.errors import ConfigError

LARGEST = 8 << 30  # no context or communicator takes that much: another process's memory was counted


@dataclass(frozen=True)
class Calibration:
    """Bytes per GPU outside the allocator, and the machine that measured them."""

    context: int
    nccl: int | None
    """None if the machine had one GPU; the default is used then."""
    pools: int
    """Memory that the allocator reserved beyond its model, at every size of the step."""
    gpu: str
    host: str
    day: str

    @property
    def origin(self) -> str:
        """Origin of the figures, as text."""
        return f"CUDA's context, NCCL and stream pools as measured on {self.host} ({self.gpu}) on {self.day}"


def fit(
    steps: Sequence[tuple[int, int, int]], nccl: int | None, occupied: int, gpu: str, host: str, day: str
) -> Calibration:
    """Return the calibration from steps of different sizes; other processes held ``occupied`` bytes before.

    A step is its peaks on one GPU, in bytes: reserved, of the device, and reserved as the allocator's model predicts.
    Context and pools are medians over the steps. They do not depend on the size, unlike errors of the estimate. Raises
    `ConfigError` if a result is negative or implausibly large.
    """
    from statistics import median

    context = int(median(device - reserved for reserved, device, _ in steps)) - occupied - (nccl or 0)
    pools = max(0, int(median(reserved - predicted for reserved, _, predicted in steps)))
    for name, size in (("CUDA's context", context), ("NCCL's buffers", nccl or 0)):
        if not 0 <= size < LARGEST:
            raise ConfigError(
                f"The probe measured {size / 2**30:.2f} GiB for {name}, which is impossible. Another process used the "
                "GPU at the same time. Run the probe on a GPU that no other process uses."
            )
    return Calibration(context, nccl, pools, gpu, host, day)


def path_of(accelerator: str) -> Path:
    """Return the file with the calibration of ``accelerator`` (its name in the catalogue) for this torch."""
    return cache_folder() / f"calibration-{accelerator}-{digest(library_version('torch'))[:12]}.json"


def read(accelerator: str) -> Calibration | None:
    """Return the calibration of ``accelerator``, or None if no probe has run."""
    path = path_of(accelerator)
    return Calibration(**json.loads(path.read_text())) if path.is_file() else None


def keep(accelerator: str, calibration: Calibration) -> None:
    """Save ``calibration`` for later estimates."""
    write_json(path_of(accelerator), asdict(calibration))

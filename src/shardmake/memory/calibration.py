"""What cannot be known from outside and a probe on a GPU has measured: context, NCCL's buffers, other streams' pools.

Kept in the user's cache by accelerator and torch version, so that a login node uses what a compute node has found.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from shardmake.core.atomic import digest, write_json
from shardmake.core.errors import ShardmakeError
from shardmake.memory.cache import cache_folder

LARGEST = 8 << 30  # no context and no communicator takes as much: another process's memory was counted


@dataclass(frozen=True)
class Observation:
    """Peaks of one step on one GPU, in bytes, and what the allocator's model says it reserves."""

    tokens: int
    allocated: int
    reserved: int
    device: int
    predicted_reserved: int


@dataclass(frozen=True)
class Calibration:
    """Bytes per GPU beside the model's own, and where they were measured."""

    context: int
    nccl: int | None
    """None where the machine had one GPU: the default stays."""
    pools: int
    """What the allocator reserved beyond its model, whatever the size of the step."""
    gpu: str
    host: str
    day: str

    @property
    def words(self) -> str:
        """For people: where the figures come from."""
        return f"CUDA's context, NCCL and stream pools as measured on {self.host} ({self.gpu}) on {self.day}"


def fit(
    observations: Sequence[Observation], nccl: int | None, occupied: int, gpu: str, host: str, day: str
) -> Calibration:
    """The calibration that steps of different sizes agree on; ``occupied`` is what others held on the GPU before.

    Context and pools are medians over the steps: they do not depend on the size, which is what tells them from errors
    of the estimate. Raises `ShardmakeError` where they come out negative or beyond reason.
    """
    context = int(median(item.device - item.reserved for item in observations)) - occupied - (nccl or 0)
    pools = max(0, int(median(item.reserved - item.predicted_reserved for item in observations)))
    for name, size in (("CUDA's context", context), ("NCCL's buffers", nccl or 0)):
        if not 0 <= size < LARGEST:
            raise ShardmakeError(
                f"The probe found {size / 2**30:.2f} GiB for {name}, which cannot be: another process used the GPU "
                "meanwhile. Run it on a GPU of its own."
            )
    return Calibration(context, nccl, pools, gpu, host, day)


def path_of(accelerator: str) -> Path:
    """Where the calibration of ``accelerator`` (its name in the catalogue) is kept for this torch."""
    return cache_folder() / f"calibration-{accelerator}-{digest(version('torch'))[:12]}.json"


def read(accelerator: str) -> Calibration | None:
    """What a probe has found for ``accelerator``, if one ran."""
    path = path_of(accelerator)
    return Calibration(**json.loads(path.read_text())) if path.is_file() else None


def keep(accelerator: str, calibration: Calibration) -> None:
    """Remember ``calibration`` for later estimates."""
    write_json(path_of(accelerator), asdict(calibration))

"""DeepSpeed's buffer sizes as the rendered file sets them; what it leaves open takes DeepSpeed's default.

``"auto"`` is resolved as transformers' Trainer does, from the hidden size (`transformers.integrations.deepspeed`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Buckets:
    """Sizes in elements, names as in ``zero_optimization``."""

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    overlap_comm: bool = True
    pin_memory: bool = True
    buffer_count: int = 4


SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "sub_group_size",
)


def read_buckets(zero: Mapping[str, Any], hidden_size: int) -> Buckets:
    """The sizes in the ``zero_optimization`` section of a DeepSpeed file."""
    auto = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    offload = zero.get("offload_optimizer") or {}
    given = {name: value for name, value in zero.items() if name in SIZES}
    sizes: dict[str, Any] = {name: int(auto[name] if value == "auto" else value) for name, value in given.items()}
    return replace(
        Buckets(**sizes),
        overlap_comm=bool(zero.get("overlap_comm", zero.get("stage") == 3)),
        pin_memory=bool(offload.get("pin_memory", True)),
        buffer_count=int(offload.get("buffer_count", 4)),
    )

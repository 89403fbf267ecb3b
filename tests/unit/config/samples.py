"""A valid run and cluster, which tests of configurations change."""

from pathlib import Path
from typing import Any

import yaml

from shardmake.config.load import parse_config
from shardmake.config.models import Run

RUN: dict[str, Any] = {
    "model": "org/base", "data": {"train": "org/data"}, "sequence_length": 256, "global_batch_size": 16,
    "max_steps": 60, "learning_rate": 0.001,
}  # fmt: skip
CLUSTER: dict[str, Any] = {
    "executor": "slurm", "processes_per_node": 4, "cpus_per_node": 64, "memory_gib_per_node": 480,
}  # fmt: skip


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``; a value of ``...`` removes the key."""
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


def make_run(**changes: Any) -> Run:
    return parse_config({"cluster": "c.yaml", "runs": {"chat": merged(RUN, changes)}}, "c").runs["chat"]


def write(path: Path, values: Any) -> Path:
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path

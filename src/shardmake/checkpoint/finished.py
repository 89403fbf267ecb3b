"""The receipt of a finished training: the only proof that it finished."""

import json
from pathlib import Path
from typing import Any

from shardmake.checkpoint.store import CheckpointRecord, is_intact
from shardmake.core.atomic import write_json
from shardmake.run.paths import RunDir

STATE = "trainer_state.json"


def trainer_state(checkpoint: Path) -> dict[str, Any]:
    """The Trainer's own state of a checkpoint: ``global_step``, ``max_steps``, ``log_history``."""
    return json.loads((checkpoint / STATE).read_text())


def is_last(record: CheckpointRecord, checkpoint: Path) -> bool:
    """Whether the training is over with this checkpoint; not if its state is damaged, which resuming will find."""
    return is_intact(record, checkpoint, STATE) and record.step >= trainer_state(checkpoint)["max_steps"]


def write_receipt(rundir: RunDir, record: CheckpointRecord, checkpoint: Path) -> None:
    """Write ``train/receipt.json`` for the last checkpoint; everything in it can be made again from the checkpoint."""
    losses = [line["loss"] for line in trainer_state(checkpoint)["log_history"] if "loss" in line]
    write_json(
        rundir.train_receipt,
        {
            "steps": record.step,
            "tokens": record.tokens,
            "loss": losses[-1] if losses else None,
            "checkpoint": str(checkpoint.relative_to(rundir.root)),
            "strategy": record.strategy,
            "world_size": record.world_size,
            "recipe": record.recipe,
            "attempts": record.attempt,
            "versions": record.versions,
            "finished_at": record.saved_at,
        },
    )

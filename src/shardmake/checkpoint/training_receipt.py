"""The training receipt, which marks a run's training as finished."""

import json
from pathlib import Path
from typing import Any

from shardmake.checkpoint.record import CheckpointRecord, is_intact
from shardmake.core.atomic import write_json
from shardmake.run.paths import RunDir

TRAINER_STATE = "trainer_state.json"


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """Return the Trainer state of a checkpoint: ``global_step``, ``max_steps``, ``log_history``."""
    return json.loads((checkpoint / TRAINER_STATE).read_text())


def is_final(record: CheckpointRecord, checkpoint: Path) -> bool:
    """Return True if training ends with this checkpoint; False if its state is damaged, which resuming detects."""
    return is_intact(record, checkpoint, TRAINER_STATE) and record.step >= read_trainer_state(checkpoint)["max_steps"]


def write_training_receipt(rundir: RunDir, record: CheckpointRecord, checkpoint: Path) -> None:
    """Write ``train/receipt.json`` from the last checkpoint alone, so that a lost receipt can be written again."""
    losses = [line["loss"] for line in read_trainer_state(checkpoint)["log_history"] if "loss" in line]
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

"""The training receipt, which marks a run's training as finished."""

import json
from pathlib import Path
from typing import Any

from shardmake.checkpoint.record import CheckpointRecord, is_intact
from shardmake.core.environment import library_versions
from shardmake.run.attempt import AttemptDir
from shardmake.run.engine import Engine, LearningSettings
from shardmake.run.metrics import read_metrics
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.receipts import DataReceipt, TrainingReceipt

TRAINER_STATE = "trainer_state.json"


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """Return the Trainer state of a checkpoint: ``global_step``, ``max_steps``, ``log_history``."""
    return json.loads((checkpoint / TRAINER_STATE).read_text())


def is_final(record: CheckpointRecord, checkpoint: Path) -> bool:
    """Return True if training ends with this checkpoint; False if its state is damaged, which resuming detects."""
    return is_intact(record, checkpoint, TRAINER_STATE) and record.step >= read_trainer_state(checkpoint)["max_steps"]


def write_training_receipt(rundir: RunDir, record: CheckpointRecord, checkpoint: Path) -> None:
    """Write ``train/receipt.json`` from the last checkpoint and its attempt; a lost receipt can be written again."""
    losses = [line["loss"] for line in read_trainer_state(checkpoint)["log_history"] if "loss" in line]
    data = DataReceipt.read_if_exists(rundir.data_receipt)
    TrainingReceipt(
        steps=record.step,
        tokens=round(record.samples * data.train.tokens / data.train.sequences) if data else None,
        loss=losses[-1] if losses else None,
        checkpoint=str(checkpoint.relative_to(rundir.root)),
        strategy=record.strategy,
        world_size=record.world_size,
        settings_digest=record.settings_digest,
        attempts=record.attempt,
        versions=record.versions,
        finished_at=record.saved_at,
        learning=LearningSettings.read_if_exists(AttemptDir(rundir.attempts / f"{record.attempt:03d}").learning),
    ).write(rundir.train_receipt)


def write_script_receipt(rundir: RunDir, attempt: int, settings_digest: str) -> None:
    """Write ``train/receipt.json`` for a user's script that finished in ``attempt``.

    Steps, tokens and loss are the last ones in the script's metrics, if it wrote any. The world size is the one that
    the ranks found, if the script built an engine.
    """
    folder = AttemptDir(rundir.attempts / f"{attempt:03d}")
    choice, lines = Plan.read(folder.plan).choice, read_metrics(rundir.metrics)
    trained = _trained_engine(rundir, attempt, settings_digest)
    TrainingReceipt(
        steps=lines[-1].step if lines else None,
        tokens=next((line.tokens for line in reversed(lines) if line.tokens is not None), None),
        loss=next((line.loss for line in reversed(lines) if line.loss is not None), None),
        checkpoint=str(rundir.script_output.relative_to(rundir.root)),
        strategy=choice.strategy,
        world_size=trained.world_size if trained else choice.world_size,
        settings_digest=settings_digest,
        attempts=attempt,
        versions=library_versions(),
        finished_at=max(node.ended for node in folder.exits()),
        trained=trained,
    ).write(rundir.train_receipt)


def _trained_engine(rundir: RunDir, attempt: int, settings_digest: str) -> Engine | None:
    """Return the engine that a script found in ``attempt``, or in the newest one before it that trained the same.

    An attempt that resumes after the last step trains nothing.
    """
    for number in range(attempt, 0, -1):
        folder = AttemptDir(rundir.attempts / f"{number:03d}")
        trained = Engine.read_if_exists(folder.trained)
        if trained and folder.read().settings_digest == settings_digest:
            return trained
    return None

"""The receipt of a training counts the tokens of the data, not their padding."""

import json
from pathlib import Path

import pytest

from shardmake.checkpoint.record import CheckpointRecord
from shardmake.checkpoint.training_receipt import TRAINER_STATE, write_training_receipt
from shardmake.run.paths import RunDir
from shardmake.run.receipts import TrainingReceipt
from tests.finished_run import make_data_receipt


@pytest.mark.parametrize(("samples", "tokens"), [(63, 30_576), (24, 11_648)])
def test_tokens_are_those_of_the_data(samples: int, tokens: int, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "runs/chat")
    receipt = make_data_receipt("d")
    train = receipt.train.model_copy(update={"sequences": 21, "tokens": 10_192})
    receipt.model_copy(update={"train": train}).write(rundir.data_receipt)
    checkpoint = rundir.checkpoints / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / TRAINER_STATE).write_text(json.dumps({"log_history": []}))
    record = CheckpointRecord(
        step=3, tokens=10**6, samples=samples, world_size=2, strategy="ddp", attempt=1, settings_digest="s",
        saved_at=0, save_seconds=1, versions={}, files={},
    )  # fmt: skip
    write_training_receipt(rundir, record, checkpoint)
    assert TrainingReceipt.read(rundir.train_receipt).tokens == tokens

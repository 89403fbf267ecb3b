"""Trainings with a user's own files learn what the receipt says, and others are refused by the ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import Strategy
from shardmake.run.attempt import AttemptDir
from shardmake.run.paths import RunDir
from shardmake.run.receipts import TrainingReceipt
from tests.unit.render.test_user_files import EVERYTHING_TAKEN
from tests.workflow.forked import Forked, log

pytestmark = pytest.mark.training
STEPS, RATE, WARMUP = 4, 2e-3, 1
GIVEN: dict[str, Any] = {
    "micro_batch_size": 3, "learning_rate": RATE, "scheduler": "cosine", "warmup_ratio": WARMUP / STEPS,
    "weight_decay": 0.01,
}  # fmt: skip
"""Four steps of two passes on two ranks, with a schedule that warms up."""
LEARNING = {
    "format": 1, "optimizer": "AdamW", "learning_rate": RATE, "betas": [0.9, 0.999], "epsilon": 1e-8,
    "weight_decay": 0.01, "decays_vectors": False, "schedule": "cosine", "warmup_steps": WARMUP, "steps": STEPS,
    "group_rates": [RATE], "max_grad_norm": 1.0, "dtype": "float32", "autocast": None, "micro_batch_size": 3,
    "gradient_accumulation_steps": 2, "global_batch_size": 12,
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3-offload"])
def test_everything_that_is_taken_trains_as_planned(forked: Forked, tmp_path: Path, strategy: Strategy) -> None:
    """The losses are those without a file, and the receipt states every value that the ranks learned with.

    The file of zero3-offload is Hugging Face's sample, whose "auto" values Trainer fills in; DDP and FSDP have none.
    """
    file, given = EVERYTHING_TAKEN.get(strategy), GIVEN
    if file:
        (tmp_path / "ds.json").write_text(json.dumps(file))
        given = GIVEN | {"deepspeed_config": str(tmp_path / "ds.json")}
    run = forked.trained(tmp_path, strategy, **given)
    assert run.losses() == pytest.approx(forked.once("ddp", **GIVEN).losses(), abs=2e-4)
    receipt = TrainingReceipt.read(run.rundir.train_receipt)
    assert receipt.learning is not None and receipt.strategy == strategy
    learning = receipt.learning.as_json()
    assert learning.pop("rates") == pytest.approx([0, RATE, 0.75 * RATE, 0.75 * RATE, 0.25 * RATE])
    taken = learning.pop("own_files")
    assert learning == LEARNING
    if not file:
        assert taken == {}
        return
    assert taken["zero_optimization.overlap_comm"] == file["zero_optimization"]["overlap_comm"]
    left_out = ("optimizer", "scheduler", "torch_autocast", "checkpoint", "steps_per_print")
    assert not any(key.startswith(left_out) for key in taken)


SGD = {"type": "SGD", "params": {"lr": RATE, "weight_decay": 0.01}}
WARMUP_LR = {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_max_lr": RATE}}


@pytest.mark.parametrize(("sections", "words"), [
    ({"scheduler": WARMUP_LR}, "schedule: planned 'cosine', found 'WarmupLR'"),
    ({"optimizer": SGD}, "optimizer: planned 'AdamW', found 'SGD'"),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "autocast: planned None, found 'bfloat16'"),
])  # fmt: skip
def test_ranks_refuse_what_a_file_changes(forked: Forked, tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    """A file that was edited after `render` is found by the ranks, which name the planned and the found value."""
    rundir = RunDir(tmp_path / "run")
    assert 0 not in forked.train(rundir, forked.plan("zero2", 2, **GIVEN), deepspeed=sections), log(rundir)
    errors = AttemptDir(rundir.attempts / "001").rank_errors()
    assert {error.kind for error in errors} == {"EngineMismatchError"}, log(rundir)
    assert words in errors[0].message
    assert not rundir.train_receipt.exists()

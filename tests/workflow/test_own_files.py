"""Trainings with a user's own files learn what the receipt says, and others are refused by the ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import Cluster, Run, Strategy
from shardmake.run.attempt import AttemptDir, RankError
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.receipts import TrainingReceipt
from tests.unit.render.test_user_files import EVERYTHING_TAKEN
from tests.workflow.forked import Forked, log, losses

pytestmark = pytest.mark.training
STEPS, RATE, WARMUP = 4, 2e-3, 1


def planned(forked: Forked, strategy: Strategy, **changes: Any) -> tuple[Plan, Run, Cluster]:
    """Return a plan of four steps of two passes on two ranks, with a schedule that warms up."""
    settings = {"learning_rate": RATE, "scheduler": "cosine", "warmup_ratio": WARMUP / STEPS, "weight_decay": 0.01}
    return forked.plan(strategy, 2, micro_batch_size=3, **settings, **changes)


@pytest.fixture(scope="module")
def plain(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses without own files."""
    rundir = RunDir(tmp_path_factory.mktemp("plain") / "run")
    assert forked.train(rundir, planned(forked, "ddp")) == [0, 0], log(rundir)
    check_receipt(rundir, "ddp", {})
    return losses(rundir)


def check_receipt(rundir: RunDir, strategy: str, own: dict[str, Any]) -> None:
    """Check every learning setting of the receipt against the run, in numbers that the test knows."""
    receipt = TrainingReceipt.read(rundir.train_receipt)
    assert receipt.learning is not None
    learning = receipt.learning.as_json()
    rates = learning.pop("rates")
    assert learning.pop("format") == 1
    assert learning.pop("own_files") == own
    assert learning == {
        "optimizer": "AdamW", "learning_rate": RATE, "betas": [0.9, 0.999], "epsilon": 1e-8, "weight_decay": 0.01,
        "decays_vectors": False, "schedule": "cosine", "warmup_steps": WARMUP, "steps": STEPS, "group_rates": [RATE],
        "max_grad_norm": 1.0, "dtype": "float32", "autocast": None, "micro_batch_size": 3,
        "gradient_accumulation_steps": 2, "global_batch_size": 12,
    }  # fmt: skip
    assert rates == pytest.approx([0, RATE, 0.75 * RATE, 0.75 * RATE, 0.25 * RATE])
    assert receipt.strategy == strategy


@pytest.mark.parametrize("strategy", ["zero2", "zero3-offload"])
def test_everything_that_is_taken_trains_as_planned(
    forked: Forked, plain: dict[int, float], tmp_path: Path, strategy: Strategy
) -> None:
    """The losses are those without the file, and the receipt states the file's values.

    That of zero3-offload is Hugging Face's sample, whose "auto" values Trainer fills in.
    """
    own = tmp_path / "ds.json"
    own.write_text(json.dumps(EVERYTHING_TAKEN[strategy]))
    rundir = RunDir(tmp_path / "run")
    assert forked.train(rundir, planned(forked, strategy, deepspeed_config=str(own))) == [0, 0], log(rundir)
    assert losses(rundir) == pytest.approx(plain, abs=2e-4)
    receipt = TrainingReceipt.read(rundir.train_receipt)
    assert receipt.learning is not None
    taken = receipt.learning.own_files
    check_receipt(rundir, strategy, taken)
    assert taken["zero_optimization.overlap_comm"] == EVERYTHING_TAKEN[strategy]["zero_optimization"]["overlap_comm"]
    left_out = ("optimizer", "scheduler", "torch_autocast", "checkpoint", "steps_per_print")
    assert not any(key.startswith(left_out) for key in taken)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_receipt_states_the_settings_without_deepspeed(
    forked: Forked, plain: dict[int, float], tmp_path: Path, strategy: Strategy
) -> None:
    rundir = RunDir(tmp_path / "run")
    assert forked.train(rundir, planned(forked, strategy)) == [0, 0], log(rundir)
    assert losses(rundir) == pytest.approx(plain, abs=2e-4)
    check_receipt(rundir, strategy, {})


SGD = {"type": "SGD", "params": {"lr": RATE, "weight_decay": 0.01}}
WARMUP_LR = {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_max_lr": RATE}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"scheduler": WARMUP_LR}, "schedule: planned 'cosine', found 'WarmupLR'"),
        ({"optimizer": SGD}, "optimizer: planned 'AdamW', found 'SGD'"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "autocast: planned None, found 'bfloat16'"),
    ],
)
def test_ranks_refuse_what_a_file_changes(forked: Forked, tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    """A file that was edited after `render` is found by the ranks, which name the planned and the found value."""
    rundir = RunDir(tmp_path / "run")
    codes = forked.train(rundir, planned(forked, "zero2"), deepspeed=sections)
    assert 0 not in codes, log(rundir)
    errors: list[RankError] = AttemptDir(rundir.attempts / "001").rank_errors()
    assert {error.kind for error in errors} == {"EngineMismatchError"}, log(rundir)
    assert words in errors[0].message
    assert not rundir.train_receipt.exists()

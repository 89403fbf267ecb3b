"""Every strategy resumes from its own checkpoint with the same losses as without the interruption."""

from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import STRATEGIES, Strategy
from shardmake.run.paths import RunDir
from tests.workflow.forked import Forked, log, losses

pytestmark = pytest.mark.training
HERE = [strategy for strategy in STRATEGIES if strategy not in ("zero3-nvme", "zero3-hpz", "fsdp-hybrid")]
"""NVMe is in test_nvme.py; hybrid sharding and hpZ, which need two nodes, in test_strategies.py."""
KINDS: list[tuple[Strategy, dict[str, Any]]] = [
    ("zero2", {"precision": "bf16"}),
    ("fsdp", {"precision": "bf16"}),
    ("zero3", {"method": "lora"}),
    ("fsdp", {"method": "lora"}),
    ("fsdp", {"method": "lora", "gradient_checkpointing": True}),
    ("zero3", {"optimizer": "rmsprop"}),
    ("zero2", {"optimizer": "sgd"}),
]


@pytest.mark.parametrize("strategy", HERE)
def test_every_strategy_resumes(forked: Forked, tmp_path: Path, strategy: Strategy) -> None:
    train_and_resume(forked, RunDir(tmp_path / "run"), strategy)


@pytest.mark.parametrize(("strategy", "kind"), KINDS, ids=str)
def test_every_method_precision_and_optimizer_resumes(
    forked: Forked, tmp_path: Path, strategy: Strategy, kind: dict[str, Any]
) -> None:
    train_and_resume(forked, RunDir(tmp_path / "run"), strategy, **kind)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_mean_over_steps_on_both_sides_of_a_checkpoint_is_the_same(
    forked: Forked, tmp_path: Path, strategy: Strategy
) -> None:
    """Log at step 3 the mean of two or three steps, of which the first were done before the checkpoint of step 2."""
    rundir, arguments = RunDir(tmp_path / "run"), {"logging_steps": 3}
    planned = forked.plan(strategy, 2, micro_batch_size=3, checkpoints={"every_steps": 2})
    assert forked.train(rundir, planned, arguments=arguments) == [0, 0], log(rundir)
    assert 3 in losses(rundir) and 2 not in losses(rundir)
    forked.assert_repeats(rundir, planned, arguments=arguments)


def train_and_resume(forked: Forked, rundir: RunDir, strategy: Strategy, **changes: Any) -> None:
    """Repeat two of four steps; weights, moments, step, learning rate, data and random numbers must be equal."""
    planned = forked.plan(strategy, 2, weight_decay=0.1, checkpoints={"every_steps": 2}, **changes)
    assert forked.train(rundir, planned) == [0, 0], log(rundir)
    assert len(forked.assert_repeats(rundir, planned)) == 4

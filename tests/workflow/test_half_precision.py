"""In bf16, every method and strategy computes what DDP computes, with accumulation and gradient checkpointing."""

from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import STRATEGIES, Method, Strategy
from shardmake.run.paths import RunDir
from tests.workflow.forked import Forked, log, metrics

pytestmark = pytest.mark.training
SHARDED = [strategy for strategy in STRATEGIES if strategy not in ("ddp", "zero3-nvme", "zero3-hpz", "fsdp-hybrid")]
"""NVMe is in test_nvme.py; hybrid sharding, which needs two nodes, in test_strategies.py."""
METHODS: tuple[Method, ...] = ("full", "lora")
LOSS, NORM = 6e-3, 3e-3
"""Absolute difference of losses of about 8.5, and relative one of gradient norms: rounding of activations to bf16.

A step has about a hundred tokens with loss, so the rounding of single logits does not average out."""
Steps = list[dict[str, float]]


def train(forked: Forked, rundir: RunDir, strategy: Strategy, resume_from: Path | None = None, **changes: Any) -> Steps:
    """Train four steps of two passes on two ranks and return the loss and the gradient norm of each."""
    values: dict[str, Any] = {"precision": "bf16", "micro_batch_size": 3, "gradient_checkpointing": True}
    planned = forked.plan(strategy, 2, learning_rate=2e-3, **values | changes)
    assert forked.train(rundir, planned, resume_from=resume_from) == [0, 0], log(rundir)
    return [line for line in metrics(rundir) if "loss" in line]


@pytest.fixture(scope="module")
def under_ddp(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    """Steps of each method under DDP."""
    return {
        method: train(forked, RunDir(tmp_path_factory.mktemp(method) / "run"), "ddp", method=method)
        for method in METHODS
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", SHARDED)
def test_loss_and_gradients_are_those_of_ddp(
    forked: Forked, under_ddp: dict[str, Steps], tmp_path: Path, strategy: Strategy, method: Method
) -> None:
    steps = train(forked, RunDir(tmp_path / "run"), strategy, method=method)
    expected = under_ddp[method]
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in expected], abs=LOSS)
    norms = [step["grad_norm"] for step in expected]
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=NORM)

"""Every strategy goes on from its own checkpoint as if it had never been away."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import STRATEGIES, Strategy
from shardmake.run.paths import RunDir
from tests.workflow.forked import Forked, log
from tests.workflow.test_saving import losses

pytestmark = pytest.mark.training
HERE = [strategy for strategy in STRATEGIES if strategy not in ("zero3-nvme", "fsdp-hybrid")]
"""NVMe: test_nvme.py. Hybrid sharding, which takes two nodes: test_strategies.py."""
KINDS: list[tuple[Strategy, dict[str, Any]]] = [
    ("zero2", {"precision": "bf16"}),
    ("fsdp", {"precision": "bf16"}),
    ("zero3", {"method": "lora"}),
    ("fsdp", {"method": "lora"}),
    ("zero3", {"optimizer": "adafactor"}),
    ("zero2", {"optimizer": "sgd"}),
]


@pytest.mark.parametrize("strategy", HERE)
def test_every_strategy(forked: Forked, tmp_path: Path, strategy: Strategy) -> None:
    goes_on(forked, RunDir(tmp_path / "run"), strategy)


@pytest.mark.parametrize(("strategy", "kind"), KINDS, ids=str)
def test_every_kind_of_training(forked: Forked, tmp_path: Path, strategy: Strategy, kind: dict[str, Any]) -> None:
    goes_on(forked, RunDir(tmp_path / "run"), strategy, **kind)


def goes_on(forked: Forked, rundir: RunDir, strategy: Strategy, **changes: Any) -> None:
    """Two of four steps done again, bit for bit: weights, moments, their step, learning rate, data, random numbers."""
    planned = forked.plan(strategy, 2, weight_decay=0.1, checkpoints={"every_steps": 2}, **changes)
    assert forked.train(rundir, planned) == [0, 0], log(rundir)
    undisturbed = losses(rundir)
    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    codes, resumed = forked.resume(rundir, planned)
    assert codes == [0, 0] and resumed is not None and resumed.step == 2, log(rundir)
    assert losses(rundir) == undisturbed and len(undisturbed) == 4

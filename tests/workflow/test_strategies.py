"""Real processes, started by the rendered command, train with the planned engine; test_recipes.py has every strategy."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardmake.config.models import Strategy
from tests.workflow.by_hand import STEPS, assert_merges_as_ddp, configure, launch_by_hand, rewind_to, train_by_hand
from tests.workflow.checkout import Checkout

pytestmark = pytest.mark.training


@pytest.mark.parametrize("strategy", ["fsdp-hybrid", "zero3-hpz"])
def test_sharding_within_two_nodes(shared_checkout: Checkout, reference: dict[int, float], strategy: Strategy) -> None:
    """It also resumes from its own checkpoint with the same losses; test_recipes.py has the other strategies."""
    saves = {"every_steps": 1, "keep": STEPS}
    losses = train_by_hand(shared_checkout, strategy, nodes=2, checkpoints=saves)
    assert losses == pytest.approx(reference, abs=2e-4)
    launch_by_hand(shared_checkout, strategy, nodes=2, resume_from=rewind_to(shared_checkout, 2), checkpoints=saves)
    assert shared_checkout.losses() == losses


@pytest.mark.parametrize(("strategy", "nodes"), [("zero2", 1), ("zero1", 2)])
def test_tensor_parallel_groups_of_two_ranks(
    shared_checkout: Checkout, reference: dict[int, float], strategy: Strategy, nodes: int
) -> None:
    """One group of two ranks, and two groups of two, train and are consolidated."""
    assert train_by_hand(shared_checkout, strategy, nodes, tensor_parallel=2) == pytest.approx(reference, abs=2e-4)
    assert_merges_as_ddp(shared_checkout)


def test_printed_command_repeats_the_training(shared_checkout: Checkout, reference: dict[int, float]) -> None:
    """The command in the attempt's log, run in a shell outside of Shardmake, trains the same."""
    configure(shared_checkout, "zero2")
    shutil.rmtree(shared_checkout.run / "train", ignore_errors=True)
    shared_checkout.stages("plan", "render", "train")
    losses = shared_checkout.losses()
    assert losses == pytest.approx(reference, abs=2e-4)
    log = (shared_checkout.run / "train/attempts/001/node-0.log").read_text()
    command = log[log.index("env ") : log.index("\n", log.index("accelerate.commands.launch"))]
    shutil.rmtree(shared_checkout.run / "train/checkpoints")
    (shared_checkout.run / "train/metrics.jsonl").unlink()
    subprocess.run(command, shell=True, check=True, cwd=shared_checkout.root, timeout=300, executable="/bin/bash")
    assert shared_checkout.losses() == losses
    assert Path(sys.executable).name in command

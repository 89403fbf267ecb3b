"""Every strategy trains as rendered, the ranks find the planned engine, and all of them compute the same."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config.models import Strategy
from tests.workflow.by_hand import STEPS, configure, forget_after, launch_by_hand, train_by_hand
from tests.workflow.checkout import Checkout

pytestmark = pytest.mark.training


@pytest.mark.parametrize(
    "strategy",
    ["zero1", "zero2-offload", "zero3-offload", "fsdp-grad-op", "fsdp-offload"],
)
def test_every_strategy_computes_what_ddp_computes(
    lab: Checkout, reference: dict[int, float], strategy: Strategy
) -> None:
    """Those that test_loop.py leaves out; same seed and data, so the engine changes where numbers lie, no more."""
    assert train_by_hand(lab, strategy) == pytest.approx(reference, abs=2e-4)


def test_hybrid_sharding_over_two_nodes_of_two_ranks(lab: Checkout, reference: dict[int, float]) -> None:
    """It goes on from its own checkpoint as if it had never been away, too; test_resume.py has the others."""
    saves = {"every_steps": 1, "keep": STEPS}
    losses = train_by_hand(lab, "fsdp-hybrid", nodes=2, checkpoints=saves)
    assert losses == pytest.approx(reference, abs=2e-4)
    launch_by_hand(lab, "fsdp-hybrid", nodes=2, resume_from=forget_after(lab, 2), checkpoints=saves)
    assert lab.losses() == losses


@pytest.mark.parametrize(("strategy", "nodes"), [("zero2", 1), ("zero1", 2)])
def test_tensor_parallel_groups_of_two_ranks(
    lab: Checkout, reference: dict[int, float], strategy: Strategy, nodes: int
) -> None:
    """Two ranks that share everything, and two groups of two: trained, and put together again."""
    assert train_by_hand(lab, strategy, nodes, tensor_parallel=2) == pytest.approx(reference, abs=2e-4)
    lab("shardmake", "consolidate", "demo")
    merged, expected = load_file(lab.run / "model/model.safetensors"), load_file(lab.root / "reference.safetensors")
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-3)


def test_the_printed_command_is_the_run(lab: Checkout, reference: dict[int, float]) -> None:
    """Copied from the log of the attempt into a shell, it trains the same again outside of Shardmake."""
    configure(lab, "zero2")
    shutil.rmtree(lab.run / "train", ignore_errors=True)
    for stage in ("plan", "render", "train"):
        lab("shardmake", stage, "demo")
    losses = lab.losses()
    assert losses == pytest.approx(reference, abs=2e-4)
    log = (lab.run / "train/attempts/001/node-0.log").read_text()
    command = log[log.index("env ") : log.index("\n", log.index("accelerate.commands.launch"))]
    shutil.rmtree(lab.run / "train/checkpoints")
    (lab.run / "train/metrics.jsonl").unlink()
    subprocess.run(command, shell=True, check=True, cwd=lab.root, timeout=300, executable="/bin/bash")
    assert lab.losses() == losses
    assert Path(sys.executable).name in command

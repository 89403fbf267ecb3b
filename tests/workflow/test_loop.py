"""The plain Accelerate loop computes what Trainer computes, and each goes on from the other's checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config import Strategy
from tests.workflow.by_hand import STEPS, launch_by_hand, train_by_hand
from tests.workflow.checkout import Checkout

pytestmark = pytest.mark.training
EVERY = {"every_steps": 2}


@pytest.mark.parametrize(
    ("strategy", "first", "then"),
    [("ddp", "loop", "loop"), ("zero2", "loop", "trainer"), ("zero3", "trainer", "loop"), ("fsdp", "loop", "trainer")],
)
def test_the_loop_is_trainer(
    lab: Checkout, reference: dict[int, float], strategy: Strategy, first: str, then: str
) -> None:
    """Losses of the whole training, and of its second half resumed by the other one; both leave the same model."""
    losses = train_by_hand(lab, strategy, engine=first, checkpoints=EVERY, eval_every_steps=2)
    assert losses == pytest.approx(reference, abs=2e-4)
    whole, evaluated = merged(lab, strategy), evaluations(lab)
    assert len(evaluated) == 2
    shutil.rmtree(checkpoint(lab, STEPS))
    launch_by_hand(lab, strategy, resume_from=checkpoint(lab, 2), engine=then, checkpoints=EVERY, eval_every_steps=2)
    assert lab.losses() == pytest.approx(reference, abs=2e-4)
    assert evaluations(lab) == pytest.approx(evaluated, abs=2e-4)
    assert {line["attempt"] for line in lab.metrics()} == {1, 2}
    for name, tensor in merged(lab, strategy).items():
        torch.testing.assert_close(tensor, whole[name], atol=1e-4, rtol=1e-3)
    receipt = json.loads((lab.run / "train/receipt.json").read_text())
    assert (receipt["steps"], receipt["checkpoint"]) == (STEPS, f"train/checkpoints/checkpoint-{STEPS}")


def checkpoint(lab: Checkout, step: int) -> Path:
    return lab.run / f"train/checkpoints/checkpoint-{step}"


def evaluations(lab: Checkout) -> list[float]:
    return [line["eval_loss"] for line in lab.metrics() if "eval_loss" in line]


def merged(lab: Checkout, strategy: Strategy) -> dict[str, torch.Tensor]:
    model = lab.root / f"merged-{strategy}"
    shutil.rmtree(model, ignore_errors=True)
    base = ("--base", "resources/demo/base")
    lab("shardmake", "consolidate", str(checkpoint(lab, STEPS)), str(model), *base)
    return load_file(model / "model.safetensors")

"""A loss that diverges is reported, not saved, rewound once, and then stops the run."""

import pytest

from tests.workflow.checkout import Checkout

pytestmark = pytest.mark.training

DIVERGENCE = """
import sys
def diverge(event, arguments):
    if event == "open" and str(arguments[0]).endswith("metrics.jsonl") and "a" in str(arguments[1]):
        import gc, torch
        for value in gc.get_objects():
            if isinstance(value, torch.nn.Parameter):
                value.data.mul_(1e30)
if "shardmake.train" in sys.orig_argv:
    sys.addaudithook(diverge)
"""
"""Weights of the size that a diverging training reaches, from the end of the first step on."""


def test_loss_that_diverges_twice_at_one_step_stops_the_run(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.run_at_start(DIVERGENCE, monkeypatch)
    checkout.configure(strategy="ddp", checkpoints={"every_steps": 1}, non_finite="rewind")
    checkout.stages()
    failed = checkout("shardmake", "train", "demo", check=False)
    assert failed.returncode == 2
    assert "is nan" in failed.stdout and "NonFiniteError" in failed.stdout
    history = checkout.read("train/attempts/index.json")
    assert [entry["end"] for entry in history] == ["non-finite loss", "non-finite loss"]
    assert history[0]["failed_step"] == history[1]["failed_step"] == history[1]["checkpoint_step"] + 1

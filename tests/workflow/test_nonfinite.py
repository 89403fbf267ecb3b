"""A loss that diverges is reported, not saved, rewound once, and then stops the run."""

import pytest

from tests.workflow.checkout import Checkout

pytestmark = pytest.mark.training


def test_loss_that_diverges_twice_at_one_step_stops_the_run(checkout: Checkout) -> None:
    checkout.configure(
        strategy="ddp", learning_rate=1e30, warmup_ratio=0.0, checkpoints={"every_steps": 1}, non_finite="rewind"
    )
    for stage in ("plan", "render", "data"):
        checkout("shardmake", stage, "demo")
    failed = checkout("shardmake", "train", "demo", check=False)
    assert failed.returncode == 2
    assert "is nan" in failed.stdout and "NonFiniteError" in failed.stdout
    history = checkout.read("train/attempts/index.json")
    assert [entry["end"] for entry in history] == ["non-finite loss", "non-finite loss"]
    assert history[0]["failed_step"] == history[1]["failed_step"] == history[1]["checkpoint_step"] + 1

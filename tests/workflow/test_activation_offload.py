"""Layers whose inputs are held on the host train exactly as layers whose inputs stay."""

from pathlib import Path

import pytest

from shardmake.config.models import Strategy
from shardmake.run.paths import RunDir
from tests.activations_on_cpu import COPIED
from tests.workflow.forked import Forked, log, losses

pytestmark = pytest.mark.training
OFFLOAD = {"activation_checkpointing_kwargs": {"use_reentrant": False, "offload": True}}
IN_ENVIRONMENT = {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}


@pytest.mark.parametrize(("strategy", "method"), [("zero2", "lora"), ("zero3", "full"), ("fsdp", "full")])
def test_losses_and_weights_are_the_same(forked: Forked, tmp_path: Path, strategy: Strategy, method: str) -> None:
    """The settings are those that `activation_offload: true` renders; on CPUs the plan refuses the key."""
    planned = forked.plan(strategy, 2, gradient_checkpointing=True, method=method)
    kept, offloaded = RunDir(tmp_path / "kept"), RunDir(tmp_path / "offloaded")
    assert forked.train(kept, planned) == [0, 0], log(kept)
    settings = {"variables": IN_ENVIRONMENT} if strategy == "fsdp" else {"arguments": OFFLOAD}
    assert forked.train(offloaded, planned, **settings) == [0, 0], log(offloaded)
    assert copied(offloaded) and not copied(kept)
    assert losses(offloaded) == losses(kept)


def copied(rundir: RunDir) -> bool:
    """Return whether a rank copied the input of a layer."""
    return any(COPIED in file.read_text() for file in rundir.attempts.glob("*/node-0.log"))

"""QLoRA and 8-bit Adam with bitsandbytes' CPU kernels: they train, save, resume and merge.

`make test-all` installs bitsandbytes into a folder of its own, so that no other test can import it.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config.models import Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.run.paths import RunDir
from tests.workflow.forked import Forked, losses
from tests.workflow.test_half_precision import Steps, train

pytestmark = pytest.mark.training


@pytest.fixture(scope="module")
def qlora_under_ddp(quantizing: Forked, tmp_path_factory: pytest.TempPathFactory) -> tuple[Steps, RunDir]:
    rundir = RunDir(tmp_path_factory.mktemp("qlora") / "run")
    return train(quantizing, rundir, "ddp", method="qlora", checkpoints={"every_steps": 2}), rundir


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_qlora_trains_resumes_and_merges(
    quantizing: Forked, qlora_under_ddp: tuple[Steps, RunDir], tmp_path: Path, strategy: Strategy
) -> None:
    """The adapters see the same 4-bit weights under every strategy, so losses and gradients are those of DDP."""
    rundir, (expected, reference) = RunDir(tmp_path / "run"), qlora_under_ddp
    changes = {"method": "qlora", "checkpoints": {"every_steps": 2}}
    steps = train(quantizing, rundir, strategy, **changes)
    for what, off in (("loss", {"abs": 6e-3}), ("grad_norm", {"rel": 5e-3})):
        assert [step[what] for step in steps] == pytest.approx([step[what] for step in expected], **off)

    uninterrupted = losses(rundir)
    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    half = rundir.checkpoints / "checkpoint-2"
    train(quantizing, rundir, strategy, resume_from=half, **changes)
    assert losses(rundir) == uninterrupted

    base = quantizing.checkout.root / "resources/demo/base"
    for run in (rundir, reference):
        consolidate(run.checkpoints / "checkpoint-4", run.model, base=base)
    merged, theirs = load_file(rundir.model / "model.safetensors"), load_file(reference.model / "model.safetensors")
    untrained = load_file(base / "model.safetensors")
    changed = [name for name, tensor in merged.items() if not torch.equal(tensor, untrained[name].to(tensor.dtype))]
    assert any("q_proj" in name for name in changed) and not any("norm" in name for name in changed)
    torch.testing.assert_close(merged, theirs, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_8_bit_adam_steps(quantizing: Forked, tmp_path: Path, strategy: Strategy) -> None:
    """ZeRO cuts the states into other blocks than DDP, so the updates differ a little, and the first loss does not."""
    theirs, ours = (
        [step["loss"] for step in train(quantizing, RunDir(tmp_path / name), name, optimizer="adamw8bit")]
        for name in ("ddp", strategy)
    )
    assert ours == pytest.approx(theirs, abs=0.05) and theirs[-1] < theirs[0] - 0.3

"""QLoRA and 8-bit Adam with bitsandbytes' CPU kernels: they train, save, resume and merge.

`make test-all` installs bitsandbytes into a folder of its own, so that no other test can import it.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config.models import Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.plan import resolve
from shardmake.run.paths import RunDir
from tests.fork_server import REPOSITORY, ForkServer
from tests.workflow.forked import Forked
from tests.workflow.test_half_precision import Steps, train
from tests.workflow.test_saving import losses

pytestmark = pytest.mark.training
PACKAGES = Path(os.environ.get("BITSANDBYTES", REPOSITORY / ".venv/bitsandbytes"))


@pytest.fixture(scope="module")
def quantizing(forked: Forked) -> Iterator[Forked]:
    """Trainings whose ranks import bitsandbytes; plans are made as if it were installed and the cluster had GPUs."""
    if not (PACKAGES / "bitsandbytes").is_dir():
        pytest.fail(f"bitsandbytes is not in {PACKAGES}. Run: make {PACKAGES.name}")
    server = ForkServer("tests.bitsandbytes_on_cpu", packages=PACKAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "wrong_on_cpu", lambda run: ())
        patch.setattr(resolve, "wrong_packages", lambda run: ())
        yield Forked(forked.checkout, server)
    server.close()


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
    assert merged.keys() == theirs.keys()
    changed = [name for name, tensor in merged.items() if not torch.equal(tensor, untrained[name].to(tensor.dtype))]
    assert any("q_proj" in name for name in changed) and not any("norm" in name for name in changed)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_8_bit_adam_steps(quantizing: Forked, tmp_path: Path, strategy: Strategy) -> None:
    """ZeRO cuts the states into other blocks than DDP, so the updates differ a little, and the first loss does not."""
    by_strategy = {
        name: train(quantizing, RunDir(tmp_path / name), name, optimizer="adamw8bit") for name in ("ddp", strategy)
    }
    ours, theirs = ([step["loss"] for step in steps] for steps in by_strategy.values())
    assert ours == pytest.approx(theirs, abs=0.05) and ours[-1] < ours[0] - 0.3

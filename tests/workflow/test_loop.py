"""The example of a loop without Trainer computes the same as Trainer, resumes, and merges; compiled training too."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmake.config.models import Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.data.dataset import Sequences
from shardmake.run.attempt import AttemptDir, Heartbeat, heartbeat_file
from shardmake.run.paths import RunDir
from tests.workflow.checkout import REPOSITORY
from tests.workflow.consolidate_checkpoints import load_weights
from tests.workflow.forked import Forked, metrics

pytestmark = pytest.mark.training
OFTEN = ["--save_steps", "2", "--eval_steps", "2", "--weight_decay", "1.0"]
LOOP: dict[str, Any] = {"script": str(REPOSITORY / "examples/train_loop.py"), "script_args": OFTEN}
TWO_PASSES: dict[str, Any] = {
    "micro_batch_size": 3, "learning_rate": 2e-3, "checkpoints": {"every_steps": 2}, "eval_every_steps": 2,
    "weight_decay": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_loop_equals_trainer(forked: Forked, tmp_path: Path, strategy: Strategy) -> None:
    """The metrics and the final model are the same; the second half, trained again, is the same bit by bit."""
    reference, run = forked.once("ddp", **TWO_PASSES), forked.trained(tmp_path, strategy, **TWO_PASSES | LOOP)
    for key in ("loss", "eval_loss"):
        assert run.losses(key) == pytest.approx(reference.losses(key), abs=2e-4)
    first = metrics(run.rundir)
    shutil.rmtree(run.rundir.script_output)
    again = metrics(run.train().rundir)[len(first) :]
    assert [(line["attempt"], line["step"]) for line in again if "loss" in line] == [(2, 3), (2, 4)]
    for line in (*first, *again):
        line |= {"time": None, "attempt": None}
    assert again == first[len(first) - len(again) :]
    consolidate(run.rundir.script_output, run.rundir.model, base=run.base)
    assert_close(load_weights(run.rundir.model), reference.merged())


def assert_close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(weights, expected, atol=1e-4, rtol=1e-3)


def test_loop_saves_and_ends_when_a_stop_is_requested(forked: Forked, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.train.mkdir(parents=True)
    rundir.stop_file.touch()
    forked.trained(tmp_path, "ddp", **TWO_PASSES | LOOP)
    folder = AttemptDir(rundir.attempts / "001")
    assert folder.stopped.exists() and not rundir.script_output.exists()
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-1"]
    beat = Heartbeat.read(heartbeat_file(folder.heartbeats, 1))
    assert (beat.phase, beat.step) == ("save", 1)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of kernels that the compiled trainings share."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2", "zero3"])
def test_compiled_training_equals_uncompiled_one_and_resumes(
    forked: Forked, kernels: Path, tmp_path: Path, strategy: Strategy
) -> None:
    """Accelerate compiles each layer, under FSDP2 and DeepSpeed in place; the names stay."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(kernels), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run = forked.trained(tmp_path, strategy, 2, {"variables": variables}, torch_compile=True, **TWO_PASSES)
    assert list(kernels.rglob("*.so")), "nothing was compiled"
    shutil.rmtree(run.last)
    run.train(resume_from=run.rundir.checkpoints / "checkpoint-2")
    assert [line["attempt"] for line in metrics(run.rundir) if "loss" in line] == [1, 1, 2, 2]
    reference = forked.once("ddp", **TWO_PASSES)
    assert run.losses() == pytest.approx(reference.losses(), abs=2e-4)
    assert_close(run.merged(), reference.merged())


def test_the_order_of_the_data_is_kept_after_a_resume(forked: Forked, tmp_path: Path) -> None:
    """Trainer trains all steps from short to long examples, and repeats the second half with the same losses."""
    data = forked.unpacked["data"] | {"order": "length"}
    run = forked.trained(tmp_path, "zero2", data=data, packing=False, **TWO_PASSES)
    lengths = Sequences(run.rundir.data, "train").lengths()
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    run.repeat()

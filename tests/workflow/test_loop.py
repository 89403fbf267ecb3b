"""The example of a loop without Trainer computes the same as Trainer, resumes, and merges; compiled training too."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config.models import Cluster, Run, Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.data.dataset import Sequences
from shardmake.data.stage import prepare
from shardmake.run.attempt import AttemptDir, Heartbeat, heartbeat_file
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from tests.workflow.checkout import REPOSITORY
from tests.workflow.forked import Forked, log, losses, metrics

pytestmark = pytest.mark.training
Losses = dict[int, float]
Weights = dict[str, torch.Tensor]
OFTEN = ["--save_steps", "2", "--eval_steps", "2", "--weight_decay", "1.0"]
LOOP: dict[str, Any] = {"script": str(REPOSITORY / "examples/train_loop.py"), "script_args": OFTEN}


def planned(forked: Forked, strategy: Strategy, **changes: Any) -> tuple[Plan, Run, Cluster]:
    """Return a plan of four steps of two passes on two ranks, saved and evaluated at every second step."""
    often = {"checkpoints": {"every_steps": 2}, "eval_every_steps": 2, "weight_decay": 1.0}
    return forked.plan(strategy, 2, micro_batch_size=3, learning_rate=2e-3, **often, **changes)


@pytest.fixture(scope="module")
def reference(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> tuple[Losses, Losses, Weights]:
    """Losses, evaluation losses and weights under DDP with Trainer."""
    rundir = RunDir(tmp_path_factory.mktemp("reference") / "run")
    assert forked.train(rundir, planned(forked, "ddp")) == [0, 0], log(rundir)
    weights = load_file(rundir.checkpoints / "checkpoint-4/model.safetensors")
    return losses(rundir), losses(rundir, "eval_loss"), weights


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_loop_equals_trainer(
    forked: Forked, reference: tuple[Losses, Losses, Weights], tmp_path: Path, strategy: Strategy
) -> None:
    """The metrics and the final model are the same; the second half, trained again, is the same bit by bit."""
    rundir, (expected, evaluations, weights) = RunDir(tmp_path / "run"), reference
    assert forked.train(rundir, planned(forked, strategy, **LOOP)) == [0, 0], log(rundir)
    assert losses(rundir) == pytest.approx(expected, abs=2e-4)
    assert losses(rundir, "eval_loss") == pytest.approx(evaluations, abs=2e-4)
    first = metrics(rundir)

    shutil.rmtree(rundir.script_output)
    assert forked.train(rundir, planned(forked, strategy, **LOOP)) == [0, 0], log(rundir)
    again = metrics(rundir)[len(first) :]
    assert [(line["attempt"], line["step"]) for line in again if "loss" in line] == [(2, 3), (2, 4)]
    for line in (*first, *again):
        line |= {"time": None, "attempt": None}
    assert again == first[len(first) - len(again) :]
    consolidate(rundir.script_output, rundir.model, base=forked.checkout.root / "resources/demo/base")
    assert_equal(weights, rundir)


def test_loop_saves_and_ends_when_a_stop_is_requested(forked: Forked, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.train.mkdir(parents=True)
    rundir.stop_file.touch()
    assert forked.train(rundir, planned(forked, "ddp", **LOOP)) == [0, 0], log(rundir)
    folder = AttemptDir(rundir.attempts / "001")
    assert folder.stopped.exists() and not rundir.script_output.exists()
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-1"]
    beat = Heartbeat.read(heartbeat_file(folder.heartbeats, 1))
    assert (beat.phase, beat.step) == ("save", 1)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for a folder of kernels that the compiled trainings share."""
    folder = tmp_path_factory.mktemp("kernels")
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2", "zero3"])
def test_compiled_training_equals_uncompiled_one_and_resumes(
    forked: Forked, reference: tuple[Losses, Losses, Weights], kernels: dict[str, str], tmp_path: Path, strategy: Strategy
) -> None:  # fmt: skip
    """Accelerate compiles each layer, under FSDP2 and DeepSpeed in place; the names stay."""
    rundir, plan = RunDir(tmp_path / "run"), planned(forked, strategy, torch_compile=True)
    assert forked.train(rundir, plan, variables=kernels) == [0, 0], log(rundir)
    assert list(Path(kernels["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so")), "nothing was compiled"
    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    half = rundir.checkpoints / "checkpoint-2"
    assert forked.train(rundir, plan, resume_from=half, variables=kernels) == [0, 0], log(rundir)
    assert [line["attempt"] for line in metrics(rundir) if "loss" in line] == [1, 1, 2, 2]
    assert losses(rundir) == pytest.approx(reference[0], abs=2e-4)
    consolidate(rundir.checkpoints / "checkpoint-4", rundir.model, base=forked.checkout.root / "resources/demo/base")
    assert_equal(reference[2], rundir)


def assert_equal(weights: Weights, rundir: RunDir) -> None:
    """Compare the merged model with ``weights``."""
    merged = load_file(rundir.model / "model.safetensors")
    torch.testing.assert_close(merged, {name: weights[name] for name in merged}, atol=1e-4, rtol=1e-3)


def test_the_order_of_the_data_is_kept_after_a_resume(forked: Forked, tmp_path: Path) -> None:
    """Trainer trains all steps from short to long examples, and repeats the second half with the same losses."""
    rundir, folder = RunDir(tmp_path / "run"), forked.checkout.root / "resources/demo"
    data = {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "order": "length"}
    plan = planned(forked, "zero2", data=data, packing=False)
    prepare(plan[1], rundir)
    lengths = Sequences(rundir.data, "train").lengths()
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert forked.train(rundir, plan) == [0, 0], log(rundir)
    forked.assert_repeats(rundir, plan)

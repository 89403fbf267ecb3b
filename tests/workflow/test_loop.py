"""The plain Accelerate loop computes the same as Trainer, and each resumes from the other's checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config.models import Cluster, Run, Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.data.dataset import load
from shardmake.data.stage import prepare
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from tests.workflow.forked import Forked, log

pytestmark = pytest.mark.training
Losses = dict[int, float]
Weights = dict[str, torch.Tensor]


def planned(forked: Forked, strategy: Strategy, engine: str) -> tuple[Plan, Run, Cluster]:
    """Return a plan of four steps of two passes on two ranks, saved and evaluated at every second step."""
    often = {"checkpoints": {"every_steps": 2}, "eval_every_steps": 2}
    return forked.plan(strategy, 2, engine=engine, micro_batch_size=3, learning_rate=2e-3, **often)


@pytest.fixture(scope="module")
def reference(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> tuple[Losses, Losses, Weights]:
    """Losses, evaluation losses and weights under DDP with Trainer."""
    rundir = RunDir(tmp_path_factory.mktemp("reference") / "run")
    assert forked.train(rundir, planned(forked, "ddp", "trainer")) == [0, 0], log(rundir)
    weights = load_file(rundir.checkpoints / "checkpoint-4/model.safetensors")
    return series(rundir, "loss"), series(rundir, "eval_loss"), weights


@pytest.mark.parametrize(
    ("strategy", "first", "then"),
    [("ddp", "loop", "loop"), ("zero2", "loop", "trainer"), ("zero3", "trainer", "loop"), ("fsdp", "loop", "trainer")],
)
def test_loop_equals_trainer(
    forked: Forked,
    reference: tuple[Losses, Losses, Weights],
    tmp_path: Path,
    strategy: Strategy,
    first: str,
    then: str,
) -> None:
    """One engine trains all steps, the other repeats the second half; all metrics and the final model are the same."""
    rundir, (losses, evaluations, weights) = RunDir(tmp_path / "run"), reference
    assert forked.train(rundir, planned(forked, strategy, first)) == [0, 0], log(rundir)
    assert series(rundir, "loss") == pytest.approx(losses, abs=2e-4)
    assert series(rundir, "eval_loss") == pytest.approx(evaluations, abs=2e-4)
    norms = series(rundir, "grad_norm")

    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    half = rundir.checkpoints / "checkpoint-2"
    assert forked.train(rundir, planned(forked, strategy, then), resume_from=half) == [0, 0], log(rundir)
    assert [line["attempt"] for line in metrics(rundir) if "loss" in line] == [1, 1, 2, 2]
    assert series(rundir, "loss") == pytest.approx(losses, abs=2e-4)
    assert series(rundir, "eval_loss") == pytest.approx(evaluations, abs=2e-4)
    assert series(rundir, "grad_norm") == pytest.approx(norms, abs=1e-2)
    receipt = json.loads(rundir.train_receipt.read_text())
    assert (receipt["steps"], receipt["checkpoint"]) == (4, "train/checkpoints/checkpoint-4")

    assert_merges_to(weights, forked, rundir)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for a folder of kernels that the compiled trainings share."""
    folder = tmp_path_factory.mktemp("kernels")
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@pytest.mark.parametrize(
    ("strategy", "version", "first", "then"),
    [
        ("fsdp", 2, "trainer", "loop"),
        pytest.param("fsdp", 2, "loop", "trainer", marks=pytest.mark.objectives),
        pytest.param("fsdp", 1, "trainer", "loop", marks=pytest.mark.objectives),
        ("fsdp", 1, "loop", "trainer"),
        ("ddp", 2, "trainer", "loop"),
        pytest.param("ddp", 2, "loop", "trainer", marks=pytest.mark.objectives),
        ("zero2", 2, "loop", "loop"),
    ],
)
def test_compiled_training_equals_uncompiled_one_and_resumes(
    forked: Forked,
    reference: tuple[Losses, Losses, Weights],
    kernels: dict[str, str],
    tmp_path: Path,
    strategy: Strategy,
    version: int,
    first: str,
    then: str,
) -> None:
    """Accelerate compiles the wrapped model as a whole, or under FSDP2 each layer in place; the names stay."""
    rundir = RunDir(tmp_path / "run")
    changes: dict[str, Any] = {"torch_compile": True, "fsdp_version": version, "checkpoints": {"every_steps": 2}}
    plans = {
        engine: forked.plan(strategy, 2, engine=engine, micro_batch_size=3, learning_rate=2e-3, **changes)
        for engine in (first, then)
    }
    assert forked.train(rundir, plans[first], variables=kernels) == [0, 0], log(rundir)
    assert list(Path(kernels["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so")), "nothing was compiled"
    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    half = rundir.checkpoints / "checkpoint-2"
    assert forked.train(rundir, plans[then], resume_from=half, variables=kernels) == [0, 0], log(rundir)
    assert [line["attempt"] for line in metrics(rundir) if "loss" in line] == [1, 1, 2, 2]
    assert series(rundir, "loss") == pytest.approx(reference[0], abs=2e-4)
    assert_merges_to(reference[2], forked, rundir)


def assert_merges_to(weights: Weights, forked: Forked, rundir: RunDir) -> None:
    """Merge the last checkpoint and compare the model with ``weights``."""
    consolidate(rundir.checkpoints / "checkpoint-4", rundir.model, base=forked.checkout.root / "resources/demo/base")
    for name, tensor in load_file(rundir.model / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=1e-3)


def test_the_order_of_the_data_is_the_same_for_both_engines_and_after_a_resume(forked: Forked, tmp_path: Path) -> None:
    """The loop trains all steps from short to long examples; Trainer repeats the second half with the same losses."""
    rundir, folder = RunDir(tmp_path / "run"), forked.checkout.root / "resources/demo"
    data = {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "order": "length"}
    changes = {"data": data, "packing": False, "checkpoints": {"every_steps": 2}, "micro_batch_size": 3}
    loop, trainer = (forked.plan("zero2", 2, engine=engine, **changes) for engine in ("loop", "trainer"))
    prepare(loop[1], rundir)
    lengths = load(rundir.data, "train").lengths()
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert forked.train(rundir, loop) == [0, 0], log(rundir)
    losses = series(rundir, "loss")
    shutil.rmtree(rundir.checkpoints / "checkpoint-4")
    codes, resumed = forked.resume(rundir, trainer)
    assert codes == [0, 0] and resumed is not None and resumed.step == 2, log(rundir)
    assert series(rundir, "loss") == pytest.approx(losses, abs=2e-4)


def metrics(rundir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rundir.metrics.read_text().splitlines()]


def series(rundir: RunDir, key: str) -> dict[int, float]:
    return {line["step"]: line[key] for line in metrics(rundir) if key in line}

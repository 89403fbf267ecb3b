"""Sequence parallelism trains as data parallelism alone, on 2 and on 4 ranks; it resumes, merges and changes degree."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardmake.checkpoint import store
from shardmake.config.models import Loss, Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.data.stage import prepare
from shardmake.run.paths import RunDir
from tests.mixtures import save_llama
from tests.workflow.forked import Forked, log, losses

pytestmark = pytest.mark.training
DEGREES: tuple[tuple[Strategy, int, int, Loss], ...] = (
    ("zero2", 2, 2, "plain"), ("zero1", 2, 1, "plain"), ("zero3", 2, 1, "chunked"), ("fsdp", 2, 2, "plain"),
)  # fmt: skip
"""A strategy, the ranks per group, the groups, and the loss."""
OTHERS: tuple[tuple[Strategy, Mapping[str, Any]], ...] = (
    ("zero1", {}), ("zero3", {}), ("zero1-offload", {}), ("zero2-offload", {}), ("zero3-offload-optimizer", {}),
    ("zero3-offload", {}), ("fsdp", {}), ("fsdp-grad-op", {}), ("fsdp-offload", {}),
    ("fsdp", {"method": "lora", "learning_rates": {}}), ("zero3", {"method": "lora", "learning_rates": {}}),
)  # fmt: skip


@pytest.fixture
def changes(forked: Forked, tmp_path: Path) -> dict[str, Any]:
    """Return a run's settings: eight heads, four key-value heads, and rows of different lengths."""
    base = save_llama(forked.checkout.root / "resources/demo/base", tmp_path / "base")
    folder = forked.checkout.root / "resources/demo"
    data = {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")}
    same = {"model": str(base), "data": data, "global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 2e-3}
    same["learning_rates"] = {"*.mlp": 1e-2, "lm_head": 1e-4}
    return same | {"packing": False, "attention": "sdpa", "checkpoints": {"every_steps": 2}}


def test_sequence_and_data_degrees_together(forked: Forked, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Two groups are merged. The first one repeats its second half bit for bit, and continues with groups of four."""
    reference = RunDir(tmp_path / "ddp")
    planned = forked.plan("ddp", 2, **changes)
    prepare(planned[1], reference)
    assert forked.train(reference, planned) == [0, 0], log(reference)
    for strategy, sequence, data, loss in DEGREES:
        rundir, ranks = RunDir(tmp_path / f"{strategy}-{sequence}x{data}"), sequence * data
        shutil.copytree(reference.data, rundir.data)
        planned = forked.plan(strategy, ranks, sequence_parallel=sequence, loss=loss, **changes)
        assert forked.train(rundir, planned) == [0] * ranks, log(rundir)
        assert losses(rundir) == pytest.approx(losses(reference), abs=2e-4)
        assert losses(rundir, "grad_norm") == pytest.approx(losses(reference, "grad_norm"), rel=2e-3)
        if data > 1:
            assert_merges_alike(rundir, reference, Path(changes["model"]))
    rundir = RunDir(tmp_path / "zero2-2x2")
    uninterrupted = forked.assert_repeats(rundir, forked.plan("zero2", 4, sequence_parallel=2, **changes))
    store.remove(rundir.checkpoints / "checkpoint-4")
    codes, resumed = forked.resume(rundir, forked.plan("zero2", 4, sequence_parallel=4, **changes))
    assert codes == [0] * 4 and resumed is not None and resumed.step == 2, log(rundir)
    assert losses(rundir) == pytest.approx(uninterrupted, abs=2e-4)


@pytest.mark.objectives
@pytest.mark.parametrize(("strategy", "more"), OTHERS)
def test_other_strategies_share_sequences_and_resume(
    forked: Forked, tmp_path: Path, changes: dict[str, Any], strategy: Strategy, more: Mapping[str, Any]
) -> None:
    reference, rundir, changes = RunDir(tmp_path / "ddp"), RunDir(tmp_path / "shared"), {**changes, **more}
    planned = forked.plan("ddp", 2, **changes)
    prepare(planned[1], reference)
    assert forked.train(reference, planned) == [0, 0], log(reference)
    shutil.copytree(reference.data, rundir.data)
    planned = forked.plan(strategy, 2, sequence_parallel=2, **changes)
    assert forked.train(rundir, planned) == [0, 0], log(rundir)
    assert losses(rundir) == pytest.approx(losses(reference), abs=2e-4)
    assert losses(rundir, "grad_norm") == pytest.approx(losses(reference, "grad_norm"), rel=2e-3)
    forked.assert_repeats(rundir, planned)


def assert_merges_alike(rundir: RunDir, reference: RunDir, base: Path) -> None:
    """Merge the last checkpoints and compare the models."""
    merged = []
    for run in (rundir, reference):
        if not run.model.exists():
            consolidate(run.checkpoints / "checkpoint-4", run.model, base=base)
        merged.append(load_file(run.model / "model.safetensors"))
    torch.testing.assert_close(*merged, atol=1e-4, rtol=1e-3)

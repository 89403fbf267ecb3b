"""Saves that are killed, do not fit or fill the disk never damage the checkpoints committed before."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.record import list_files
from shardmake.checkpoint.training_receipt import is_final
from shardmake.config.models import Strategy
from shardmake.consolidate.stage import final_checkpoint
from shardmake.run.paths import RunDir
from shardmake.run.receipts import TrainingReceipt
from tests.workflow.forked import Forked, log, losses
from tests.workflow.sweep import CASES, Sweep

pytestmark = pytest.mark.training


@pytest.mark.parametrize(("strategy", "victim"), [("zero3", 1), ("fsdp", 0)])
def test_killed_at_some_writes_of_a_save(forked: Forked, tmp_path: Path, strategy: Strategy, victim: int) -> None:
    """Kill at half a shard; on rank 0 also before the final rename and halfway through removing the old checkpoint."""
    sweep = Sweep(forked, tmp_path, strategy, victim)
    sweep.prepare()
    halves = [(at, mode) for at, mode, what in sweep.points if mode == "half" and "shardmake.json" not in what]
    moved = [(at, mode) for at, mode, what in sweep.points if what == "os.rename /.saving/002/checkpoint-4"]
    removals = [(at, mode) for at, mode, what in sweep.points if what.startswith("os.remove /.saving/checkpoint-2")]
    chosen = [halves[len(halves) // 2], *moved, *removals[1:2]]
    assert len(chosen) == (1 if victim else 3), sweep.points
    for at, mode in chosen:
        found = sweep.survive(at, mode)
        assert found["recovered"], (at, mode, found)


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("strategy", "victim", "nodes"), CASES)
def test_killed_at_every_write_of_a_save(
    forked: Forked, tmp_path: Path, strategy: Strategy, victim: int, nodes: int
) -> None:
    sweep = Sweep(forked, tmp_path, strategy, victim, nodes)
    sweep.prepare()
    assert sweep.points
    lost = {point: found for point in sweep.points if not (found := sweep.survive(*point[:2]))["recovered"]}
    assert not lost


@pytest.mark.root
def test_disk_is_full_before_and_during_a_save(
    forked: Forked, file_system: Callable[[str], Path], tmp_path: Path
) -> None:
    """A save that does not fit is skipped, except the last one. Then the disk fills up during a save."""
    small_disk = RunDir(file_system("30m") / "run")  # space for one and a half checkpoints of 19 MB
    planned = forked.plan("zero3", 2, max_steps=3, checkpoints={"every_steps": 1, "keep": 2})
    uninterrupted = RunDir(tmp_path / "uninterrupted")
    assert forked.train(uninterrupted, planned) == [0, 0], log(uninterrupted)
    assert {record.step for record, _ in store.committed(uninterrupted.checkpoints)} == {2, 3}

    plan, run, cluster = planned
    impatient = (plan, run, cluster.model_copy(update={"hang_seconds": 1}))
    codes, _ = forked.resume(small_disk, impatient)
    assert any(codes)
    assert "WARNING: checkpoint-3 must be saved. Training waits up to 3 s for room." in log(small_disk)
    assert "WARNING: checkpoint-2 is skipped. The next checkpoint needs 18 MiB" in log(small_disk)
    assert "DiskFullError: The next checkpoint needs" in log(small_disk)
    assert [path.name for _, path in store.checkpoints(small_disk.checkpoints)] == ["checkpoint-1"]

    subprocess.run(["mount", "-o", "remount,size=60m", small_disk.root.parent], check=True)
    writes = {"rank": 1, "folder": str(small_disk.checkpoints), "log": str(tmp_path / "log"), "at": 1, "mode": "fill"}
    codes, resumed = forked.resume(small_disk, planned, kill=writes)
    assert any(codes) and resumed is not None and resumed.step == 1
    assert "The disk filled up while checkpoint-2 was written" in log(small_disk)
    assert "Training resumes from checkpoint-1" in log(small_disk)
    assert (small_disk.checkpoints.parent / "filler").exists()
    newest = store.recover(small_disk.checkpoints)
    assert newest is not None and newest[0].step == 1
    assert [path.name for path in small_disk.checkpoints.iterdir()] == ["checkpoint-1"]

    (small_disk.checkpoints.parent / "filler").unlink()
    codes, resumed = forked.resume(small_disk, planned)
    assert codes == [0, 0] and resumed is not None and resumed.step == 1
    assert losses(small_disk) == losses(uninterrupted)


def test_damaged_shards_fall_back_to_an_older_checkpoint(forked: Forked, tmp_path: Path) -> None:
    """The record contains what a resume needs. A flipped bit and a truncated file make the resume fall back."""
    rundir = RunDir(tmp_path / "run")
    rule = {"every_steps": 1, "keep": 2, "keep_best": True, "keep_every_steps": 3}
    planned = forked.plan("zero2", 2, max_steps=5, checkpoints=rule)
    assert forked.train(rundir, planned) == [0, 0], log(rundir)
    records = {record.step: (record, path) for record, path in store.committed(rundir.checkpoints)}
    assert set(records) == {3, 4, 5}
    record, path = records[5]
    described = (record.step, record.samples, record.tokens, record.world_size, record.strategy, record.rng_states)
    assert described == (5, 60, 60 * 64, 2, "zero2", 2)
    assert record.data_seed == 42 and record.settings_digest == "r" and record.save_seconds > 0
    assert set(record.versions) == {"torch", "transformers", "accelerate", "deepspeed", "shardmake"}
    assert record.eval_loss is not None and record.eval_loss < records[3][0].eval_loss
    assert set(record.files) == set(list_files(path))

    reference = losses(rundir)
    shard = next(path.rglob("*optim_states.pt"))
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    truncated = next(records[4][1].rglob("*model_states.pt"))
    truncated.write_bytes(truncated.read_bytes()[:-100])
    rundir.train_receipt.unlink()
    codes, resumed = forked.resume(rundir, planned)
    assert codes == [0, 0] and resumed is not None and resumed.step == 3
    assert losses(rundir) == reference
    assert {record.step for record, _ in store.committed(rundir.checkpoints)} == {3, 4, 5}
    assert len(store.damaged(rundir.checkpoints)) == 2


def test_interval_follows_the_measured_save(forked: Forked, tmp_path: Path) -> None:
    """A failure every few milliseconds gives the shortest interval, but only after the first save is measured."""
    rundir = RunDir(tmp_path / "run")
    planned = forked.plan("ddp", 2, max_steps=14, checkpoints={"every_steps": "auto", "keep": 9})
    plan, run, cluster = planned
    failing = (plan, run, cluster.model_copy(update={"node_mtbf_hours": 1e-6}))
    assert forked.train(rundir, failing) == [0, 0], log(rundir)
    steps = sorted(record.step for record, _ in store.committed(rundir.checkpoints))
    assert steps[0] == 10 and steps[-1] == 14
    assert "A save takes" in log(rundir) and "by Young's formula" in log(rundir)


def test_training_ends_early_and_the_best_checkpoint_becomes_the_model(forked: Forked, tmp_path: Path) -> None:
    """A rate this high raises the loss from the second evaluation on. The step counts as the last one for a resume."""
    rundir = RunDir(tmp_path / "run")
    rule = {"every_steps": 1, "keep": 1, "keep_best": True, "early_stopping": 2}
    planned = forked.plan("zero2", 2, max_steps=9, checkpoints=rule, learning_rate=3.0, final_checkpoint="best")
    assert forked.train(rundir, planned) == [0, 0], log(rundir)
    saved = {record.step: record for record, _ in store.committed(rundir.checkpoints)}
    best, last = min(saved), max(saved)
    assert last == best + 2 < 9 and saved[best].eval_loss < saved[last].eval_loss
    trained = TrainingReceipt.read(rundir.train_receipt)
    assert trained.steps == last and is_final(*next(store.committed(rundir.checkpoints)))
    assert final_checkpoint(planned[1], rundir, trained) == rundir.checkpoints / f"checkpoint-{best}"

"""Saves, at once or asynchronous, that are killed, do not fit or fill the disk damage no earlier checkpoint."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardmake.checkpoint import store
from shardmake.checkpoint.record import list_files, read_record
from shardmake.checkpoint.training_receipt import is_final
from shardmake.config.models import Strategy
from shardmake.consolidate.stage import final_checkpoint
from shardmake.core.errors import ShardmakeError
from shardmake.core.units import MIB
from shardmake.memory.buckets import Buckets
from shardmake.memory.host import save_bytes
from shardmake.memory.model import split
from shardmake.memory.read_config import read_model
from shardmake.memory.scenario import Scenario
from shardmake.plan.stage import plan_run
from shardmake.render.stage import render
from shardmake.run.paths import RunDir
from shardmake.run.receipts import TrainingReceipt
from tests.fork_server import ForkServer
from tests.unit.train.test_async_saver import make_saver, save, steps
from tests.workflow.by_hand import launch_by_hand
from tests.workflow.checkout import REPOSITORY, Checkout, wait_for
from tests.workflow.forked import Forked, log, losses, result, states
from tests.workflow.sweep import CASES, Sweep
from tests.workflow.test_local import flip

pytestmark = pytest.mark.training


@pytest.mark.parametrize(("strategy", "victim"), [("zero3", 1), ("fsdp", 0)])
def test_killed_at_some_writes_of_a_save(forked: Forked, tmp_path: Path, strategy: Strategy, victim: int) -> None:
    """Kill at half a shard; on rank 0 also before the final rename and halfway through removing the old checkpoint."""
    sweep = Sweep(forked, tmp_path, strategy, victim)
    sweep.prepare()
    removals = [(at, mode) for at, mode, what in sweep.points if what.startswith("os.remove /.saving/checkpoint-2")]
    chosen = [*sweep.chosen(), *removals[1:2]]
    assert len(chosen) == (1 if victim else 3), sweep.points
    sweep.assert_recovers(chosen)


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("strategy", "victim", "nodes"), CASES)
def test_killed_at_every_write_of_a_save(
    forked: Forked, tmp_path: Path, strategy: Strategy, victim: int, nodes: int
) -> None:
    sweep = Sweep(forked, tmp_path, strategy, victim, nodes)
    sweep.prepare()
    sweep.assert_recovers([(at, mode) for at, mode, _ in sweep.points])


@pytest.mark.root
def test_disk_is_full_before_and_in_a_save(forked: Forked, file_system: Callable[[str], Path], tmp_path: Path) -> None:
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
    flip(next(path.rglob("*optim_states.pt")))
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
    plan, run, cluster = forked.plan("ddp", 2, max_steps=14, checkpoints={"every_steps": "auto", "keep": 9})
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


SUB_GROUP = 500_000
"""Elements, of which the rank's part of the embedding has eight times as many."""


@pytest.fixture(scope="module")
def measured(forked: Forked) -> Iterator[Forked]:
    """Trainings whose saves copy as from a GPU, and whose freed blocks return to the system at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        server = ForkServer("tests.saves_as_from_gpu")
    yield Forked(forked.checkout, server)
    server.close()


@pytest.fixture(scope="module")
def large_model(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with 21 million weights."""
    folder = tmp_path_factory.mktemp("model") / "large"
    shutil.copytree(forked.inputs / "base", folder)
    config = LlamaConfig.from_pretrained(folder)
    config.update({"hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 16})
    config.update({"num_key_value_heads": 2, "head_dim": 128})
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("strategy", "ranks"), [("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero3", 1)])
def test_a_save_needs_the_planned_host_ram(
    measured: Forked, large_model: Path, tmp_path: Path, strategy: Strategy, ranks: int
) -> None:
    """Less than the plan counts, beside 3 MiB of each rank for all that is not a storage, and more than 80 % of it."""
    zero = {"zero_optimization": {"sub_group_size": SUB_GROUP} if strategy == "zero3" else {}}
    options, saves = {"deepspeed": zero, "variables": {"SAVE_MEMORY": str(tmp_path)}}, {"every_steps": 1}
    measured.trained(tmp_path, strategy, ranks, options, model=str(large_model), max_steps=1, checkpoints=saves)
    model = read_model(str(large_model))
    with_gpus = Scenario(
        model=model, split=split(model, "full"), strategy=strategy, nodes=1, ranks_per_node=ranks,
        micro_batch=1, sequence_length=64, precision="fp32",
    )  # fmt: skip
    term = save_bytes(with_gpus, Buckets(sub_group_size=SUB_GROUP))
    peaks = [int((tmp_path / str(rank)).read_text()) for rank in range(ranks)]
    assert 0.8 * term < sum(peaks) < term + ranks * 3 * MIB, (peaks, term)


# --- asynchronous saves -----------------------------------------------------------------------------------------------

SAVES = {"every_steps": 2, "keep": 9}


def uploads(rundir: RunDir) -> list[psutil.Process]:
    """Return the upload processes of the run."""
    named = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [process for process, words in named if "shardmake.train.upload" in words and str(rundir.root) in words[-1]]


HELD = """
import sys, time
def hold(event, arguments):
    if event == "open" and ".saving/001/checkpoint-4/" in str(arguments[0]) and "optim_states" in str(arguments[0]):
        time.sleep(600)
if "shardmake.train.upload" in sys.orig_argv and "attempts/001" in sys.orig_argv[-1]:
    sys.addaudithook(hold)
"""


def hold_uploads(folder: Path) -> str:
    """Return a PYTHONPATH that blocks the first attempt's upload of step 4 halfway."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HELD)
    return os.pathsep.join([str(folder), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])


def kill_rank_that_uploads(rundir: RunDir) -> None:
    """SIGKILL the uploading rank when its upload of step 4 is halfway."""
    staged = store.staging_folder(rundir.checkpoints, 1) / "checkpoint-4"
    wait_for(lambda: list(staged.rglob("*model_states.pt")))
    (upload,) = uploads(rundir)
    os.kill(upload.ppid(), signal.SIGKILL)


def assert_same_result(rundir: RunDir, uninterrupted: RunDir) -> None:
    assert result(rundir) == result(uninterrupted)
    waited = {record.step: record.blocked_seconds is not None for record, _ in store.committed(rundir.checkpoints)}
    assert waited == {2: True, 4: True, 6: False}
    assert not uploads(rundir)


@pytest.fixture
def uninterrupted(forked: Forked) -> RunDir:
    return forked.once("zero3", max_steps=6, checkpoints=SAVES).rundir


def test_rank_killed_during_an_upload(forked: Forked, uninterrupted: RunDir, tmp_path: Path) -> None:
    """The upload ends with its rank. After a resume, the result is the same bit for bit."""
    rundir = RunDir(tmp_path / "run")
    plan, run, cluster = forked.plan("zero3", 2, max_steps=6, checkpoints={**SAVES, "asynchronous": True})
    planned = (plan, run, cluster.model_copy(update={"scratch": str(tmp_path)}))
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_rank_that_uploads, rundir)
        codes = forked.train(rundir, planned, variables={"PYTHONPATH": hold_uploads(tmp_path / "held")})
        killing.result()
    assert codes[0] == -signal.SIGKILL and not uploads(rundir), log(rundir)
    assert (store.staging_folder(rundir.checkpoints, 1) / "checkpoint-4").exists()

    codes, resumed = forked.resume(rundir, planned)
    assert codes == [0, 0] and resumed is not None and resumed.step == 2, log(rundir)
    assert_same_result(rundir, uninterrupted)


@pytest.mark.sweep
def test_driver_resumes_after_a_kill_during_an_upload(
    forked: Forked, uninterrupted: RunDir, checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    settings: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": 6, "max_steps": 6}
    checkout.configure({"scratch": str(tmp_path / "scratch")}, **settings, checkpoints={**SAVES, "asynchronous": True})
    monkeypatch.setenv("PYTHONPATH", hold_uploads(tmp_path / "held"))
    monkeypatch.chdir(checkout.root)
    (run, cluster), rundir = checkout.load(), RunDir(checkout.run)
    render(plan_run(run, cluster, rundir), run, cluster, rundir)
    shutil.copytree(forked.checkout.run / "data", rundir.data)
    driver = checkout.start("shardmake", "train", "demo", log=checkout.root / "driver.log")
    kill_rank_that_uploads(rundir)
    assert driver.wait(timeout=240) == 0, (checkout.root / "driver.log").read_text()
    output = (checkout.root / "driver.log").read_text()
    assert "Removing checkpoint-4: its save was not finished" in output and "resuming from checkpoint-2" in output
    assert_same_result(rundir, uninterrupted)
    assert not list((tmp_path / "scratch").rglob("checkpoint-*")), "the worker removes leftover files"


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_nodes_with_own_scratch_upload_all_files(shared_checkout: Checkout, tmp_path: Path, strategy: Strategy) -> None:
    """The engines write all files, although no node sees the scratch folder of the other."""
    found = {}
    for asynchronous in (False, True):
        shutil.rmtree(shared_checkout.run / "train", ignore_errors=True)
        saves = {"every_steps": 1, "asynchronous": asynchronous}
        _, folder = launch_by_hand(shared_checkout, strategy, nodes=2, max_steps=2, checkpoints=saves)
        record = read_record(shared_checkout.run / "train/checkpoints/checkpoint-1")
        assert record is not None and (record.blocked_seconds is not None) == asynchronous
        assert record.world_size == record.rng_states == 4
        found[asynchronous] = (set(record.files), states(record), shared_checkout.losses())
        left = {path.name for path in folder.read().saves.glob("*")}
        assert left == ({"node-0", "node-1"} if asynchronous else set())
        shutil.rmtree(folder.read().saves, ignore_errors=True)  # the workers would have done it
    assert found[True] == found[False]


@pytest.mark.root
def test_shared_disk_fills_up_during_an_upload(tmp_path: Path, file_system: Callable[[str], Path]) -> None:
    """The save found enough space, but another user fills the disk before the upload."""
    saver = make_saver(tmp_path)
    saver.folder.symlink_to(file_system("1m"))
    save(saver, 1, required=True)
    with saver.saving(2, required=False) as folder:
        assert folder is not None
        folder.mkdir(parents=True)
        (folder / "shard.pt").write_bytes(bytes(2 << 20))
    message = r"The disk filled up while checkpoint-2 was written: .*resumes from checkpoint-1"
    with pytest.raises(ShardmakeError, match=message):
        save(saver, 3)
    assert steps(tmp_path) == [1] and not (store.staging_folder(saver.folder, 1) / "checkpoint-2").exists()

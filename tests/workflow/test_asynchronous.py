"""Asynchronous saves of real trainings give the same result after kills, and report a full disk."""

import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.record import read_record
from shardmake.config.load import get_run, load_cluster, load_config
from shardmake.config.models import Strategy
from shardmake.core.errors import ShardmakeError
from shardmake.core.fingerprint import FileEntry
from shardmake.plan.stage import plan_run
from shardmake.render.stage import render
from shardmake.run.paths import RunDir
from tests.unit.train.test_async_saver import make_saver, save, steps
from tests.workflow.by_hand import launch_by_hand
from tests.workflow.checkout import REPOSITORY, Checkout, wait_for
from tests.workflow.forked import Forked, log, losses, states

SAVES = {"every_steps": 2, "keep": 9}


def result(rundir: RunDir) -> tuple[dict[int, float], dict[str, FileEntry]]:
    """Return the losses by step, and the checksums of the last checkpoint's states."""
    last = store.newest_valid(rundir.checkpoints)
    assert last is not None
    return losses(rundir), states(last[0])


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


@pytest.fixture(scope="module")
def uninterrupted(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A training without asynchronous saves."""
    rundir = RunDir(tmp_path_factory.mktemp("asynchronous") / "uninterrupted")
    assert forked.train(rundir, forked.plan("zero3", 2, max_steps=6, checkpoints=SAVES)) == [0, 0], log(rundir)
    return rundir


@pytest.mark.training
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


@pytest.mark.training
@pytest.mark.sweep
def test_driver_resumes_after_a_kill_during_an_upload(
    forked: Forked, uninterrupted: RunDir, checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    settings: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": 6, "max_steps": 6}
    checkout.configure({"scratch": str(tmp_path / "scratch")}, **settings, checkpoints={**SAVES, "asynchronous": True})
    monkeypatch.setenv("PYTHONPATH", hold_uploads(tmp_path / "held"))
    monkeypatch.chdir(checkout.root)
    config, rundir = load_config(Path("config/config.yaml")), RunDir(checkout.run)
    run, cluster = get_run(config, "demo"), load_cluster(Path(config.cluster))
    render(plan_run(run, cluster, rundir), run, cluster, rundir)
    shutil.copytree(forked.checkout.run / "data", rundir.data)
    driver = checkout.start("shardmake", "train", "demo", log=checkout.root / "driver.log")
    kill_rank_that_uploads(rundir)
    assert driver.wait(timeout=240) == 0, (checkout.root / "driver.log").read_text()
    output = (checkout.root / "driver.log").read_text()
    assert "Removing checkpoint-4: its save was not finished" in output and "resuming from checkpoint-2" in output
    assert_same_result(rundir, uninterrupted)
    assert not list((tmp_path / "scratch").rglob("checkpoint-*")), "the worker removes leftover files"


@pytest.mark.training
@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_every_engine_saves_the_same_asynchronously(forked: Forked, tmp_path: Path, strategy: Strategy) -> None:
    found = {}
    for asynchronous in (False, True):
        saves = {"every_steps": 1, "asynchronous": asynchronous}
        plan, run, cluster = forked.plan(strategy, 2, max_steps=4, checkpoints=saves)
        rundir = RunDir(tmp_path / str(asynchronous))
        planned = (plan, run, cluster.model_copy(update={"scratch": str(tmp_path)}))
        assert forked.train(rundir, planned) == [0, 0], log(rundir)
        rundir.train_receipt.unlink()
        store.remove(rundir.checkpoints / "checkpoint-4")
        codes, resumed = forked.resume(rundir, planned)
        assert codes == [0, 0] and resumed is not None and resumed.step == 3, log(rundir)
        assert (resumed.blocked_seconds is not None) == asynchronous
        found[asynchronous] = result(rundir)
    assert found[True] == found[False]


@pytest.mark.training
@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_two_nodes_with_own_scratch_upload_every_file(
    shared_checkout: Checkout, tmp_path: Path, strategy: Strategy
) -> None:
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

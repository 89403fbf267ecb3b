"""The checkpoint of a job that Slurm restarts, and the records of its last start."""

import json
import shutil
from pathlib import Path

import pytest

from shardmake.checkpoint import store
from shardmake.core.atomic import write_json
from shardmake.launch import resume, worker
from shardmake.launch.rendezvous import Rendezvous, RendezvousError
from shardmake.run.attempt import AttemptDir, Hang, record_error, write_heartbeat
from shardmake.run.training_settings import ScriptProgram
from tests.checkpoint_record import commit_checkpoint
from tests.finished_run import make_exit
from tests.unit.launch.fake_run import write_attempt
from tests.unit.plans import make_cluster, make_plan, make_training_settings


@pytest.fixture
def folder(tmp_path: Path, prepared_worker: None) -> AttemptDir:
    """An attempt of two nodes under ZeRO-2, submitted to resume from step 10."""
    folder, plan = AttemptDir(tmp_path / "train/attempts/002"), make_plan("zero2")
    begin = str(tmp_path / "train/checkpoints/checkpoint-10")
    write_attempt(folder, plan, make_cluster(scratch=str(tmp_path)), resume_from=begin)
    make_training_settings("zero2").write(folder.training)
    write_json(folder.deepspeed, {"checkpoint": {"load_universal": True}})
    return folder


def save(folder: AttemptDir, step: int) -> Path:
    """Commit a checkpoint of ``step`` in a training of 30 steps."""
    checkpoint = folder.read().rundir.checkpoints / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "latest").write_text(f"global_step{step}")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"max_steps": 30, "log_history": []}))
    return commit_checkpoint(checkpoint, step, world_size=4, strategy="zero2")


def test_a_restarted_job_resumes_from_its_newest_checkpoint_and_not_from_its_first(folder: AttemptDir) -> None:
    save(folder, 10)
    newest = save(folder, 20)
    shutil.copytree(newest, newest.with_name("checkpoint-25"))  # its record is of another step
    (store.staging_folder(newest.parent, 1) / "checkpoint-25").mkdir(parents=True)
    resume.prepare_restart(folder, 1)
    attempt = folder.read()
    assert (attempt.start, attempt.resume_from, attempt.finished) == (1, str(newest), False)
    assert json.loads(folder.deepspeed.read_text())["checkpoint"] == {"load_universal": False}
    assert not (newest.parent / store.STAGING).exists()


def flip(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_damaged_checkpoints_are_found_before_a_restart(folder: AttemptDir, caplog: pytest.LogCaptureFixture) -> None:
    older, newest = save(folder, 10), save(folder, 20)
    flip(newest / "trainer_state.json")
    resume.prepare_restart(folder, 1)
    assert folder.read().resume_from == str(older)
    assert len(store.damaged(newest.parent)) == 1 and "starts again from the base model" not in caplog.text
    (older / "trainer_state.json").write_text("{}")
    resume.prepare_restart(folder, 2)
    assert folder.read().resume_from is None and "starts again from the base model" in caplog.text


def test_a_restart_after_the_last_step_trains_nothing(folder: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, 30)
    monkeypatch.setattr(worker, "launch_command", lambda *_: pytest.fail("the ranks were started"))
    for rank in (0, 1):
        assert worker.main(folder.root, worker.WorkerNode(rank, start=3)) == 0
    assert [node.returncode for node in folder.exits()] == [0, 0]


def test_a_script_finds_its_checkpoint_itself(folder: AttemptDir) -> None:
    """Its folder has checkpoints without records, which must stay."""
    program = ScriptProgram(path="train.py", args=[], sha256="0")
    make_training_settings("zero2").model_copy(update={"program": program}).write(folder.training)
    own = folder.read().rundir.checkpoints / "checkpoint-20"
    own.mkdir(parents=True)
    resume.prepare_restart(folder, 1)
    assert own.exists() and folder.read().start == 1


def test_a_node_waits_for_the_settings_of_its_start(folder: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NFS it may still see those of an earlier start."""
    monkeypatch.setattr(resume, "_POLL_SECONDS", 0.0)
    with pytest.raises(RendezvousError, match=r"attempt.json is still that of an earlier start"):
        resume.read_settings(folder, 1, 0.0)
    resume.prepare_restart(folder, 1)
    assert resume.read_settings(folder, 1, 0.0) == folder.read()


def test_a_disconnected_node_notices_its_restarted_job(folder: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Rendezvous(address="10.0.0.1", port=1, interface="ib0", host="c1")
    here.write(folder.rendezvous / "start-0.json")
    assert not folder.is_superseded()
    here.write(folder.rendezvous / "start-1.json")
    assert folder.is_superseded()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not folder.is_superseded()


def test_a_restart_ignores_records_of_its_earlier_start(folder: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 archives them before the other nodes start."""
    for rank in (0, 1):
        make_exit(rank).write(folder.exit_record(rank))
    for path in (folder.stop_file, folder.stopped, folder.hung, folder.log(0)):
        path.touch()
    Hang(rank=None, host=None, message="old").write(folder.hang)
    record_error(folder, 3, ValueError("old"))
    write_heartbeat(folder, 3, "train", 7)
    seen = set[str]()

    def fail_after_listing(*args: object) -> None:
        seen.update(path.name for path in folder.root.iterdir())
        raise RendezvousError("no node connected")

    monkeypatch.setattr(worker, "run_rendezvous", fail_after_listing)
    worker.main(folder.root, worker.WorkerNode(rank=0, start=2))
    rendered = {path.name for path in (folder.settings, folder.plan, folder.training, folder.deepspeed)}
    assert seen == rendered | {"node-0.log", "start-1"}
    assert [node.message for node in folder.exits()] == ["no node connected"]
    assert (folder.root / "start-1/errors/rank-3.json").exists()

"""The checkpoint of a job that Slurm restarts: the nodes validate their shares, and the driver reads what they report."""

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from shardmake.checkpoint import store
from shardmake.checkpoint.record import RECORD_NAME, read_record
from shardmake.core.atomic import write_json
from shardmake.core.errors import CheckpointError
from shardmake.core.fingerprint import FileEntry, fingerprint
from shardmake.launch import resume, worker
from shardmake.launch.outcome import Action, classify, decide
from shardmake.launch.preflight import PreflightError
from shardmake.launch.rendezvous import Rendezvous, RendezvousError
from shardmake.launch.resume_validation import DamagedCheckpointError, confirm_damage, share_of_files, validate_share
from shardmake.run.attempt import Attempt, AttemptDir, Hang, record_error, write_heartbeat
from shardmake.run.attempt_history import EndReason
from shardmake.run.findings import stops
from shardmake.run.plan import Plan
from shardmake.run.training_settings import ScriptProgram
from tests.checkpoint_record import commit_checkpoint
from tests.finished_run import make_exit
from tests.unit.launch.fake_run import write_attempt
from tests.unit.launch.test_outcome import evidence, state
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


SHARDS = [f"optimizer/__{rank}_0.distcp" for rank in range(4)]
LOST = SHARDS[2]


def save_shards(folder: Path, step: int) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "optimizer").mkdir(parents=True)
    for number, name in enumerate(SHARDS):
        (checkpoint / name).write_bytes(bytes([number]) * 100)
    return commit_checkpoint(checkpoint, step, world_size=4, strategy="fsdp")


class Job:
    """An attempt of two nodes that resumes from step 20, too large to be read before; there is a checkpoint of step 10."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, plan = AttemptDir(root / "train/attempts/002"), make_plan("fsdp", nodes=2)
        older = save_shards(root / "train/checkpoints", 10)
        self.newest = save_shards(older.parent, 20)
        write_attempt(self.folder, plan, make_cluster(scratch=str(root)), resume_from=str(self.newest))
        make_training_settings("fsdp").write(self.folder.training)
        write_json(self.folder.deepspeed, {})
        self.patch = monkeypatch.setattr
        self.patch(resume, "CHEAP_BYTES", 0)

    def run(self) -> list[int]:
        """Run the workers one after the other; return the nodes that started their ranks."""
        started: list[int] = []
        self.patch(worker, "_run_ranks", lambda *arguments: started.append(arguments[3].rank) or 0)
        self.patch(worker, "OTHERS_SECONDS", 0)  # so that no node waits for one that this process runs later
        for rank in (0, 1):
            worker.main(self.folder.root, worker.WorkerNode(rank, start=0))
        return started

    def run_together(self, run_ranks: Callable[..., int]) -> list[int]:
        """Run both workers at once, with this function in place of the ranks; return their status."""
        self.patch(worker, "_run_ranks", run_ranks)
        with ThreadPoolExecutor(2) as pool:
            nodes = [worker.WorkerNode(rank, start=0) for rank in (0, 1)]
            return list(pool.map(lambda node: worker.main(self.folder.root, node), nodes))


@pytest.fixture
def job(tmp_path: Path, prepared_worker: None, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def test_shares_cover_every_file_once_with_about_as_many_bytes() -> None:
    sizes = {f"{kind}-{rank}": size for kind, size in (("a", 9), ("b", 5)) for rank in range(8)}
    files = {name: FileEntry(size=size, crc32="0") for name, size in sizes.items()}
    shares = [share_of_files(files, node, 4) for node in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert {sum(sizes[name] for name in share) for share in shares} == {28}
    assert share_of_files(files, 0, 1) and not share_of_files(dict[str, FileEntry](), 1, 2)


def test_an_intact_checkpoint_is_reported_in_each_nodes_log(job: Job) -> None:
    assert job.run() == [0, 1]
    assert "checkpoint-20: 2 of 4 files are intact" in job.folder.log(1).read_text()
    assert confirm_damage(job.folder) == ""


def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_is_resumed(job: Job) -> None:
    """Only the node of the damaged file does not start its ranks."""
    folder, choice = job.folder, Plan.read(job.folder.plan).choice
    flip(job.newest / LOST)
    assert resume.resume_checkpoint(folder.read().rundir, choice) == job.newest, "sizes are as recorded"
    started = job.run()
    (guilty,) = [node for node in folder.exits() if node.damaged]
    assert started == [1 - guilty.node_rank]
    assert guilty.phase == "checkpoint" and guilty.damaged == [LOST] and "its checksum differs" in guilty.message
    assert guilty.returncode is None and folder.has_failed_node()
    message = confirm_damage(folder)
    assert message.startswith("checkpoint-20 is damaged and was set aside.") and LOST in message
    assert confirm_damage(folder) == message, "a driver that was killed here starts over"
    assert resume.resume_checkpoint(folder.read().rundir, choice) == job.newest.with_name("checkpoint-10")
    assert len(store.damaged(job.newest.parent)) == 1


def test_the_job_itself_starts_its_ranks_again_from_an_older_checkpoint(job: Job) -> None:
    """It keeps its nodes: on a cluster the next job would wait in the queue."""
    flip(job.newest / LOST)
    started: list[tuple[int, str]] = []

    def run_ranks(folder: AttemptDir, attempt: Attempt, plan: Plan, node: worker.WorkerNode, *_: object) -> int:
        started.append((node.rank, Path(attempt.resume_from or "").name))
        while not node.start and not folder.has_failed_node():  # as in the network check, until the watchdog ends them
            time.sleep(0.05)
        return 0 if node.start else 1

    def restart(folder: AttemptDir, start: int) -> None:
        folder.stop_file.touch()
        resume.prepare_restart(folder, start)

    job.patch(worker, "prepare_restart", restart)
    assert job.run_together(run_ranks) == [0, 0]
    assert job.folder.stop_file.exists(), "a request that comes meanwhile is not forgotten"
    assert {one for one in started if one[1] == "checkpoint-10"} == {(0, "checkpoint-10"), (1, "checkpoint-10")}
    attempt = job.folder.read()
    assert (attempt.start, attempt.again) == (1, 1) and not any(node.damaged for node in job.folder.exits())
    assert "[rank 0] WARNING: checkpoint-20 is damaged and was set aside." in job.folder.log(0).read_text()
    assert len(store.damaged(job.newest.parent)) == 1


@pytest.mark.parametrize("event", ["stop", "failure"])
def test_a_job_that_must_stop_or_has_lost_a_node_does_not_start_its_ranks_again(job: Job, event: str) -> None:
    """The driver sets the checkpoint aside then."""
    flip(job.newest / LOST)

    def run_ranks(folder: AttemptDir, attempt: Attempt, *_: object) -> int:
        while not attempt.again and not folder.has_failed_node():
            time.sleep(0.05)
        if event == "failure":
            raise PreflightError([stops("GPU 0", "Uncorrectable errors")])
        folder.stop_file.touch()
        return 1

    job.patch(worker, "OTHERS_SECONDS", 1)
    assert job.run_together(run_ranks) == [1, 1]
    assert job.folder.read().again == 0 and job.newest.exists() and confirm_damage(job.folder)


def test_a_node_that_reads_an_intact_checkpoint_wrongly_costs_no_checkpoint(job: Job) -> None:
    flip(job.newest / LOST)
    job.run()
    flip(job.newest / LOST)
    assert confirm_damage(job.folder) == "" and job.newest.exists()


def test_a_damaged_conversion_is_removed_and_its_source_stays(job: Job) -> None:
    attempt = job.folder.read()
    converted, theirs = attempt.rundir.resharded / "checkpoint-20", attempt.rundir.root / "theirs/checkpoint-20"
    shutil.copytree(job.newest, converted)
    flip(converted / LOST)
    shutil.copytree(converted, theirs)
    attempt.model_copy(update={"resume_from": str(converted)}).write(job.folder.settings)
    job.run()
    for named in (theirs, converted):  # a member may write any path into the attempt's settings
        attempt.model_copy(update={"resume_from": str(named)}).write(job.folder.settings)
        assert ("checkpoint-20 is damaged" in confirm_damage(job.folder)) == (named == converted)
    assert theirs.exists() and not converted.exists() and job.newest.exists()


def test_a_record_that_only_a_node_cannot_read_costs_no_checkpoint(job: Job) -> None:
    record = job.newest / RECORD_NAME
    content = record.read_bytes()
    record.write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="is damaged or cannot be read"):
        validate_share(job.folder.read(), 0, print)
    job.run()
    record.write_bytes(content)
    assert [node.damaged for node in job.folder.exits()] == [[RECORD_NAME]] * 2 and confirm_damage(job.folder) == ""


def test_a_checkpoint_that_would_import_other_code_is_not_loaded(job: Job) -> None:
    """A group member can replace a file and its checksum. The run stops, and the checkpoint stays for inspection."""
    folder, checkpoint = job.folder, job.newest
    record = read_record(checkpoint)
    assert record is not None
    torch.save(Fraction(1, 3), checkpoint / "scheduler.pt")
    with pytest.raises(CheckpointError, match=r"-20 was not loaded\. scheduler\.pt \(1 in all\) is not in its"):
        resume.resume_checkpoint(folder.read().rundir, Plan.read(folder.plan).choice)
    for link in (None, checkpoint / "optimizer"):
        if link is not None:  # of another place, whose files are the same, and more
            (checkpoint / "scheduler.pt").rename(checkpoint.parent / "scheduler.pt")
            link.rename(checkpoint.parent / "optimizer")
            link.symlink_to(checkpoint.parent / "optimizer")
        with pytest.raises(PreflightError, match="is not in its record"):
            validate_share(folder.read(), 0, print)
    (checkpoint / "optimizer").unlink()
    for name in ("optimizer", "scheduler.pt"):
        (checkpoint.parent / name).rename(checkpoint / name)
    files = record.files | {"scheduler.pt": fingerprint(checkpoint / "scheduler.pt")}
    store.commit_in_place(checkpoint, record.model_copy(update={"files": files}))
    started = job.run()
    (finder,) = [node for node in folder.exits() if node.phase == "run preflight"]
    assert started == [1 - finder.node_rank] and not finder.damaged
    assert "scheduler.pt was not loaded. Its pickle would import fractions.Fraction" in finder.message
    outcome = classify(evidence(exits=folder.exits(), nodes=2))
    assert outcome.end is EndReason.PREFLIGHT and decide(outcome, state(has_fallback=True)) is Action.STOP
    assert confirm_damage(folder) == "" and checkpoint.exists()

"""The nodes of a job validate their shares of its checkpoint; the driver reads what they report before it believes it."""

import shutil
import time
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
from shardmake.launch.resume_validation import DamagedCheckpointError, confirm_damage, share_of_files, validate_share
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.attempt_history import EndReason
from shardmake.run.findings import stops
from shardmake.run.plan import Plan
from tests.checkpoint_record import commit_checkpoint
from tests.unit.launch.fake_run import write_attempt
from tests.unit.launch.test_outcome import evidence, state
from tests.unit.launch.test_resume import flip
from tests.unit.plans import make_cluster, make_plan, make_training_settings

SHARDS = [f"optimizer/__{rank}_0.distcp" for rank in range(4)]
LOST = SHARDS[2]


def save(folder: Path, step: int) -> Path:
    """Commit a checkpoint of four shards."""
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "optimizer").mkdir(parents=True)
    for number, name in enumerate(SHARDS):
        (checkpoint / name).write_bytes(bytes([number]) * 100)
    return commit_checkpoint(checkpoint, step, world_size=4, strategy="fsdp")


@pytest.fixture
def folder(tmp_path: Path, prepared_worker: None) -> AttemptDir:
    """An attempt of two nodes that resumes from step 20; there is a checkpoint of step 10, too."""
    folder, plan = AttemptDir(tmp_path / "train/attempts/002"), make_plan("fsdp", nodes=2)
    older = save(tmp_path / "train/checkpoints", 10)
    newest = save(older.parent, 20)
    write_attempt(folder, plan, make_cluster(scratch=str(tmp_path)), resume_from=str(newest))
    make_training_settings("fsdp").write(folder.training)
    write_json(folder.deepspeed, {})
    return folder


def run_nodes(folder: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run the workers of both nodes; return the nodes that started their ranks."""
    started: list[int] = []
    monkeypatch.setattr(worker, "_run_ranks", lambda *arguments: started.append(arguments[3].rank) or 0)
    monkeypatch.setattr(worker, "OTHERS_SECONDS", 0)  # so that no node waits for one that this process runs later
    for rank in (0, 1):
        worker.main(folder.root, worker.WorkerNode(rank, start=0))
    return started


def test_shares_cover_every_file_once_with_about_as_many_bytes() -> None:
    files = {
        f"{kind}-{rank}": FileEntry(size=size, crc32="0") for kind, size in (("a", 9), ("b", 5)) for rank in range(8)
    }
    shares = [share_of_files(files, node, 4) for node in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert {sum(files[name].size for name in share) for share in shares} == {28}
    assert share_of_files(files, 0, 1) and not share_of_files(dict[str, FileEntry](), 1, 2)


def test_an_intact_checkpoint_is_reported_in_each_nodes_log(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_nodes(folder, monkeypatch) == [0, 1]
    assert "checkpoint-20: 2 of 4 files are intact" in folder.log(1).read_text()
    assert confirm_damage(folder) == ""


def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_is_resumed(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the node of the damaged file does not start its ranks."""
    newest = Path(folder.read().resume_from or "")
    choice, rundir = Plan.read(folder.plan).choice, folder.read().rundir
    flip(newest / LOST)
    monkeypatch.setattr(resume, "CHEAP_BYTES", 0)
    assert resume.resume_checkpoint(rundir, choice) == newest, "sizes are as recorded, and it is too large to read"
    started = run_nodes(folder, monkeypatch)
    (guilty,) = [node for node in folder.exits() if node.damaged]
    assert started == [1 - guilty.node_rank]
    assert guilty.phase == "checkpoint" and guilty.damaged == [LOST] and "its checksum differs" in guilty.message
    assert guilty.returncode is None and folder.has_failed_node()
    message = confirm_damage(folder)
    assert message.startswith("checkpoint-20 is damaged and was set aside.") and LOST in message
    assert confirm_damage(folder) == message, "a driver that was killed here starts over"
    assert resume.resume_checkpoint(rundir, choice) == newest.with_name("checkpoint-10")
    assert len(store.damaged(newest.parent)) == 1


def test_the_job_itself_starts_its_ranks_again_from_an_older_checkpoint(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its nodes: on a cluster the next job would wait in the queue."""
    newest = Path(folder.read().resume_from or "")
    flip(newest / LOST)
    monkeypatch.setattr(resume, "CHEAP_BYTES", 0)
    started: list[tuple[int, str]] = []

    def run_ranks(folder: AttemptDir, attempt: Attempt, plan: Plan, node: worker.WorkerNode, *_: object) -> int:
        started.append((node.rank, Path(attempt.resume_from or "").name))
        while not node.start and not folder.has_failed_node():  # as in the network check, until the watchdog ends them
            time.sleep(0.05)
        return 0 if node.start else 1

    def restart(folder: AttemptDir, start: int) -> None:
        folder.stop_file.touch()
        resume.prepare_restart(folder, start)

    monkeypatch.setattr(worker, "_run_ranks", run_ranks)
    monkeypatch.setattr(worker, "prepare_restart", restart)
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda rank: worker.main(folder.root, worker.WorkerNode(rank, start=0)), (0, 1))
        assert list(ended) == [0, 0]
    assert folder.stop_file.exists(), "a request that comes meanwhile is not forgotten"
    assert {one for one in started if one[1] == "checkpoint-10"} == {(0, "checkpoint-10"), (1, "checkpoint-10")}
    attempt = folder.read()
    assert (attempt.start, attempt.again) == (1, 1) and not any(node.damaged for node in folder.exits())
    assert "[rank 0] WARNING: checkpoint-20 is damaged and was set aside." in folder.log(0).read_text()
    assert len(store.damaged(newest.parent)) == 1


@pytest.mark.parametrize("event", ["stop", "failure"])
def test_a_job_that_must_stop_or_has_lost_a_node_does_not_start_its_ranks_again(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """The driver sets the checkpoint aside then."""
    newest = Path(folder.read().resume_from or "")
    flip(newest / LOST)

    def run_ranks(folder: AttemptDir, attempt: Attempt, *_: object) -> int:
        while not attempt.again and not folder.has_failed_node():
            time.sleep(0.05)
        if event == "failure":
            raise PreflightError([stops("GPU 0", "Uncorrectable errors")])
        folder.stop_file.touch()
        return 1

    monkeypatch.setattr(worker, "_run_ranks", run_ranks)
    monkeypatch.setattr(worker, "OTHERS_SECONDS", 1)
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda rank: worker.main(folder.root, worker.WorkerNode(rank, start=0)), (0, 1))
        assert list(ended) == [1, 1]
    assert folder.read().again == 0 and newest.exists() and confirm_damage(folder)


def test_a_node_that_reads_an_intact_checkpoint_wrongly_costs_no_checkpoint(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(folder.read().resume_from or "") / LOST
    flip(file)
    run_nodes(folder, monkeypatch)
    flip(file)
    assert confirm_damage(folder) == "" and file.exists()


def test_a_damaged_conversion_is_removed_and_its_source_stays(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = folder.read()
    converted, theirs = attempt.rundir.resharded / "checkpoint-20", attempt.rundir.root / "theirs/checkpoint-20"
    shutil.copytree(attempt.resume_from or "", converted)
    flip(converted / LOST)
    shutil.copytree(converted, theirs)
    attempt.model_copy(update={"resume_from": str(converted)}).write(folder.settings)
    run_nodes(folder, monkeypatch)
    for named in (theirs, converted):  # a member may write any path into the attempt's settings
        attempt.model_copy(update={"resume_from": str(named)}).write(folder.settings)
        assert ("checkpoint-20 is damaged" in confirm_damage(folder)) == (named == converted)
    assert theirs.exists() and not converted.exists() and Path(attempt.resume_from or "").exists()


def test_a_record_that_only_a_node_cannot_read_costs_no_checkpoint(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Path(folder.read().resume_from or "") / RECORD_NAME
    content = record.read_bytes()
    record.write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="is damaged or cannot be read"):
        validate_share(folder.read(), 0, print)
    run_nodes(folder, monkeypatch)
    record.write_bytes(content)
    assert [node.damaged for node in folder.exits()] == [[RECORD_NAME]] * 2 and confirm_damage(folder) == ""


def test_a_checkpoint_that_would_import_other_code_is_not_loaded(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group member can replace a file and its checksum. The run stops, and the checkpoint stays for inspection."""
    checkpoint = Path(folder.read().resume_from or "")
    record = read_record(checkpoint)
    assert record is not None
    torch.save(Fraction(1, 3), checkpoint / "scheduler.pt")
    choice = make_plan("fsdp", nodes=2).choice.model_copy(update={"processes_per_node": 2})
    with pytest.raises(
        CheckpointError, match=r"checkpoint-20 was not loaded\. scheduler\.pt \(1 in all\) is not in its"
    ):
        resume.resume_checkpoint(folder.read().rundir, choice)
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
    store.commit_in_place(
        checkpoint,
        record.model_copy(update={"files": record.files | {"scheduler.pt": fingerprint(checkpoint / "scheduler.pt")}}),
    )
    started = run_nodes(folder, monkeypatch)
    (finder,) = [node for node in folder.exits() if node.phase == "run preflight"]
    assert started == [1 - finder.node_rank] and not finder.damaged
    assert "scheduler.pt was not loaded. Its pickle would import fractions.Fraction" in finder.message
    outcome = classify(evidence(exits=folder.exits(), nodes=2))
    assert outcome.end is EndReason.PREFLIGHT and decide(outcome, state(has_fallback=True)) is Action.STOP
    assert confirm_damage(folder) == "" and checkpoint.exists()

"""Stop, cancel and the logs of a training."""

import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from shardmake.commands import control
from shardmake.commands.control import cancel, for_each, read_logs, request_stop, retrain
from shardmake.core.errors import ConfigError, ShardmakeError, SlurmError
from shardmake.launch.jobs import _process_id, job_name
from shardmake.launch.slurm_states import parse_rows
from shardmake.run.attempt import SubmittedJob
from shardmake.run.paths import RunDir
from tests.unit.plans import make_cluster


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    found = RunDir(tmp_path / "runs/chat")
    found.train.mkdir(parents=True)
    return found


def submitted(rundir: RunDir, job: str) -> None:
    SubmittedJob(id=job, attempt=1, submitted=time.time()).write(rundir.job)


def test_a_stop_is_requested_once_and_only_of_a_training(rundir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"^Nothing to stop: chat\. It has no training job\."):
        request_stop(rundir, make_cluster())
    submitted(rundir, "12")
    assert request_stop(rundir, make_cluster()).startswith("Requested a stop (runs/chat/train/STOP).")
    assert rundir.stop_file.exists()
    assert request_stop(rundir, make_cluster()) == "A stop was already requested (runs/chat/train/STOP)."
    rundir.stop_file.unlink()
    rundir.train_receipt.touch()
    with pytest.raises(ConfigError, match=r"^Nothing to stop: chat\. Its training has finished\."):
        request_stop(rundir, make_cluster())


def test_a_training_is_set_aside_as_often_as_asked_and_never_while_it_runs(rundir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"^chat has no training to set aside\."):
        retrain(rundir)
    for number in (1, 2):
        rundir.attempts.mkdir(parents=True)
        rundir.train_receipt.write_text(str(number))
        submitted(rundir, "12")
        with pytest.raises(ConfigError, match="shardmake stop chat"):
            retrain(rundir)
        rundir.job.unlink()
        assert f"to runs/chat/train-before-{number};" in retrain(rundir) and not rundir.train.exists()
        assert (rundir.root / f"train-before-{number}/receipt.json").read_text() == str(number)


@pytest.mark.parametrize(("rows", "words"), [
    (None, "The ranks save and stop after their current step."),
    ("12|RUNNING|c1|name\n", "The ranks save and stop after their current step."),
    ("12|PENDING|(Priority)|name\n", "Job 12 still waits in the queue: its ranks save and stop after the first"),
])  # fmt: skip
def test_a_stop_of_a_waiting_job(rundir: RunDir, monkeypatch: pytest.MonkeyPatch, rows: str | None, words: str) -> None:
    submitted(rundir, "12")
    monkeypatch.setattr(control, "queue_of", lambda *_: None if rows is None else parse_rows(rows))
    assert f"(runs/chat/train/STOP). {words}" in request_stop(rundir, make_cluster(executor="slurm"))


def test_a_local_training_is_interrupted(rundir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"^Nothing to cancel: chat\. It has no training job\."):
        cancel(rundir, make_cluster())
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=-1) as process:
        assert process.stdout
        process.stdout.readline()
        job = _process_id(psutil.Process(process.pid))
        submitted(rundir, f"{process.pid}@1")
        with pytest.raises(ConfigError, match=r"^Nothing to cancel: chat\. Its process has ended\."):
            cancel(rundir, make_cluster())  # another process with the same id
        submitted(rundir, job)
        assert cancel(rundir, make_cluster()).startswith(f"Cancelled job {job} of chat.") and process.wait() != 0


@pytest.mark.parametrize(("rows", "refused", "message"), [
    (None, False, "Cannot cancel job 12 of chat: Slurm does not answer."),
    ("12|RUNNING|c1|another-job\n", False, "Nothing to cancel: chat. Its job 12 has ended."),
    ("", False, "Nothing to cancel: chat. Its job 12 has ended."),
    ("12|RUNNING|c1|{name}\n", True, "Cannot cancel job 12 of chat: Access denied."),
    ("12|PENDING|(Priority)|{name}\n", False, None),
])  # fmt: skip
def test_only_the_runs_own_job_is_cancelled_in_slurm(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, rows: str | None, refused: bool, message: str | None
) -> None:
    asked: list[tuple[str, ...]] = []

    def answer(*words: str) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        return subprocess.CompletedProcess(words, int(refused), "", "Access denied\n")

    queue = None if rows is None else parse_rows(rows.format(name=job_name(rundir.root)))
    monkeypatch.setattr(control, "queue_of", lambda *_: queue)
    monkeypatch.setattr(control, "run_slurm", answer)
    submitted(rundir, "12")
    if message is None:
        cancel(rundir, make_cluster(executor="slurm"))
    else:
        with pytest.raises(ShardmakeError, match=f"^{re.escape(message)}"):
            cancel(rundir, make_cluster(executor="slurm"))
    assert asked == ([("scancel", "12")] if refused or message is None else [])


def test_the_logs_of_an_attempt_or_of_one_rank(rundir: RunDir) -> None:
    rundir.attempts.mkdir()
    with pytest.raises(ConfigError, match=r"^--rank 0: chat has no attempt of train\."):
        read_logs(rundir, "train", 0, 5)
    with pytest.raises(ConfigError, match=r"^No logs: train of chat\. Neither logs/chat/train\.log nor .*slurm_logs"):
        read_logs(rundir, "train", None, 5)
    for attempt in ("001", "002"):
        folder = rundir.attempts / attempt
        folder.mkdir(parents=True)
        (folder / "node-0.log").write_text(f"start {attempt}\n[rank 0] a\n[rank 1] b\n[rank 0] c\n")
        (folder / "node-1.log").write_text("[rank 2] d\n")
    assert read_logs(rundir, "train", None, 2) == (
        "==> runs/chat/train/attempts/002/node-0.log\n[rank 1] b\n[rank 0] c\n"
        "==> runs/chat/train/attempts/002/node-1.log\n[rank 2] d"
    )
    assert read_logs(rundir, "train", 0, 9) == "==> runs/chat/train/attempts/002/node-0.log\n[rank 0] a\n[rank 0] c"
    assert "start 001" in read_logs(rundir, "train", None, 40, attempt=1)
    with pytest.raises(ConfigError, match=r"^--rank 7: no line of this rank in runs/chat/train/attempts/002\."):
        read_logs(rundir, "train", 7, 9)
    with pytest.raises(ConfigError, match=r"^--attempt 7: chat has no such attempt\. It has attempts 1, 2\.$"):
        read_logs(rundir, "train", None, 40, attempt=7)


def test_a_stop_of_several_runs_names_those_without_a_training_and_one_that_slurm_refused(rundir: RunDir) -> None:
    other = RunDir(rundir.root.with_name("other"))
    submitted(rundir, "12")
    lines = for_each([rundir, other], partial(request_stop, cluster=make_cluster())).splitlines()
    assert lines[0].startswith("Requested a stop (runs/chat/train/STOP).")
    assert lines[1].startswith("Nothing to stop: other.")
    with pytest.raises(ConfigError, match=r"^Nothing to stop: other\."):
        for_each([other], partial(request_stop, cluster=make_cluster()))
    act = Mock(side_effect=[SlurmError("Cannot cancel job 12 of chat: Access denied."), "Cancelled."])
    with pytest.raises(SlurmError, match=r"^Cannot cancel job 12 of chat: Access denied\.\nCancelled\.$"):
        for_each([rundir, rundir], act)

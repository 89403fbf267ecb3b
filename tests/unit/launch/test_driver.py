"""Decisions of the driver, with an executor whose jobs end as the test says."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.core.errors import DiskFullError, ShardmakeError, SlurmError, StopRequestedError, TooFewNodesError
from shardmake.launch import attempt_end, driver, submission
from shardmake.launch.attempt_end import apply_decision, record_attempt
from shardmake.launch.driver import adopt, drive, hold_driver_lock
from shardmake.launch.monitor import report_held, watch
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.launch.submission import choose_checkpoint, submit
from shardmake.launch.training import Training
from shardmake.launch.watcher import STARTED_VARIABLE
from shardmake.run.attempt import AttemptDir, SubmittedJob
from shardmake.run.attempt_history import load_history
from shardmake.run.attempt_owner import NOBODY, claim
from shardmake.run.driver_job import DriverDir
from shardmake.run.plan import Fallback, Plan
from tests.finished_run import make_record
from tests.unit.launch.fake_run import End, FakeJobs, FakeRun, exits, fails
from tests.unit.plans import make_cluster, make_plan, make_run

OUT_OF_MEMORY = fails("OutOfMemoryError", "CUDA out of memory.")
TERMINATED = exits(stop_signal="SIGTERM", returncode=0)
BAD_LABEL = fails("ValueError", "bad label")
BROKEN = fails("AcceleratorError", "CUDA error: uncorrectable ECC error encountered")


@pytest.mark.parametrize(("end", "words", "shown"), [
    (fails("KeyError", "line 3 is empty; use another file"), "use another file", True),
    (fails("DataError", "line 3 is empty; use another file"), "use another file", False),
    (fails("ConfigError", "line 3 is empty; use another file"), "use another file", False),
    (exits(phase="preflight", returncode=None, message="old torch"), "(?s)old torch.*Fix what the check found", False),
])  # fmt: skip
def test_an_error_that_the_user_can_fix_has_no_traceback(demo: FakeRun, end: End, words: str, shown: bool) -> None:
    with pytest.raises(ShardmakeError, match=words) as found:
        drive(demo.load(FakeJobs(end)))
    assert ("Traceback" in str(found.value)) == shown


def test_it_gives_up_after_three_attempts_without_a_new_checkpoint(demo: FakeRun) -> None:
    for start in (1, 2):
        with pytest.raises(ShardmakeError, match="3 attempts in a row brought no new checkpoint"):
            drive(demo.load(FakeJobs(*[TERMINATED] * 3)))
        assert len(list(demo.rundir.attempts.glob("[0-9]*"))) == 3 * start, "a new driver has three more attempts"


def test_wait_for_disk_space(demo: FakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    full = fails("DiskFullError", "The disk filled up while checkpoint-20 was written.")
    answers = [DiskFullError("Run demo will need 2 GiB more."), DiskFullError("Run demo will need 1 GiB more."), None]
    monkeypatch.setattr(attempt_end, "check_run", check := Mock(side_effect=answers))
    monkeypatch.setattr(attempt_end, "_ROOM_POLL_SECONDS", 0)
    with pytest.raises(ShardmakeError, match="bad label"):
        drive(demo.load(FakeJobs(full, BAD_LABEL)))
    warning = "Run demo will need 2 GiB more. The driver waits up to 10 min 00 s for room."
    assert caplog.messages.count(warning) == 1 and check.call_count == len(answers)
    assert [record.end for record in load_history(demo.rundir.attempt_history)][:1] == ["disk full"]


def test_a_disk_that_stays_full_ends_the_wait(demo: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    full = DiskFullError("Run demo will need 2 GiB more.")
    monkeypatch.setattr(attempt_end, "check_run", Mock(side_effect=full))
    with pytest.raises(DiskFullError, match="2 GiB more"):
        attempt_end.wait_for_room(demo.rundir, seconds=0)
    demo.rundir.stop_file.parent.mkdir(parents=True)
    demo.rundir.stop_file.touch()
    with pytest.raises(StopRequestedError):
        attempt_end.wait_for_room(demo.rundir)


def test_a_stop_request_counts_even_if_ranks_could_not_save(demo: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    def end(folder: AttemptDir) -> None:
        demo.rundir.stop_file.touch()
        TERMINATED(folder)

    with pytest.raises(StopRequestedError, match=r"somebody created runs/demo/train/STOP. No job was submitted"):
        drive(demo.load(FakeJobs(end)))
    with pytest.raises(ShardmakeError, match="ValueError"):
        drive(demo.load(FakeJobs(BAD_LABEL)))
    assert "Removing the stop file runs/demo/train/STOP of an earlier request." in caplog.messages


@pytest.mark.parametrize(("requested", "end", "message"), [
    (True, "stop requested", "saved and stopped at step 93, because somebody created runs/demo/train/STOP."),
    (False, "cancelled by a person", "was cancelled: Slurm ended the job: CANCELLED."),
])  # fmt: skip
def test_a_persons_stop_names_the_step_and_shows_no_log(demo: FakeRun, requested: bool, end: str, message: str) -> None:
    def stop(folder: AttemptDir) -> None:
        demo.commit(93, folder.read().settings_digest)
        folder.log(0).write_text("FutureWarning: 40 lines of this\n")
        if requested:
            demo.rundir.stop_file.touch()
            folder.stopped.touch()
        TERMINATED(folder)

    jobs = FakeJobs(stop)
    jobs.slurm_state = "FAILED" if requested else "CANCELLED"
    training = demo.load(jobs)
    with pytest.raises(StopRequestedError) as stopped:
        drive(training)
    assert [record.end for record in training.attempts] == [end]
    expected = f"Training of demo {message} Run the same command again to resume from step 93."
    assert str(stopped.value) == training.attempts[-1].message == expected


def test_a_job_of_other_settings_is_not_adopted(demo: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    submit(demo.load(FakeJobs(TERMINATED)))
    demo.rate = 5e-4
    (running := FakeJobs()).state = JobState.RUNNING
    words = r"Job 1 \(attempt 1\) still trains demo with other settings \(learning_rate: 0.001 -> 0.0005\).*scancel 1"
    with pytest.raises(ShardmakeError, match=words):
        drive(demo.load(running))
    demo.rate = 1e-3
    assert adopt(demo.load(running)) == SubmittedJob.read(demo.rundir.job)
    demo.rate = 5e-4
    assert adopt(demo.load(FakeJobs())) is None and not demo.rundir.job.exists()
    assert caplog.messages[-1] == "Job 1 (attempt 1) of other settings has ended."


def test_a_recorded_job_is_adopted_while_slurm_does_not_answer(demo: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(demo.load(FakeJobs(TERMINATED)))
    monkeypatch.setattr(FakeJobs, "find", Mock(side_effect=SlurmError("Slurm does not answer")))
    assert adopt(demo.load(FakeJobs())) == SubmittedJob.read(demo.rundir.job)
    demo.rundir.job.unlink()
    with pytest.raises(SlurmError, match="does not answer"):
        adopt(demo.load(FakeJobs()))


def test_a_moved_checkout_is_named(demo: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(*_: object) -> None:
        demo.rundir.root.parent.rename(demo.rundir.root.parents[1] / "moved")
        raise FileNotFoundError(demo.rundir.plan)

    monkeypatch.setattr(Training, "load", move)
    with pytest.raises(ShardmakeError, match=r"runs/demo/train is not there any more.*Move it back"):
        driver.train(make_run(), make_cluster(executor="local"), demo.rundir)


def test_a_job_that_the_driver_waited_for_is_not_reported(demo: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    submit(demo.load(FakeJobs(TERMINATED)))
    os.environ[STARTED_VARIABLE] = "1"
    for messages in ([], ["Adopting job 1 (attempt 1)."]):
        caplog.clear()
        adopt(demo.load(FakeJobs()))
        assert caplog.messages == messages


@pytest.mark.parametrize("by", ["scancel", "stop file", "driver job", "this driver"])
def test_one_command_resumes_what_a_person_stopped_while_no_driver_watched(
    demo: FakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    """A stop under a driver, or under one that a driver job starts by itself, lasts."""

    def stop(folder: AttemptDir) -> None:
        if by == "stop file":
            demo.rundir.stop_file.touch()
            folder.stopped.touch()

    jobs = FakeJobs(stop, BAD_LABEL)
    jobs.slurm_state = "FAILED" if by == "stop file" else "CANCELLED"
    submit(demo.load(jobs))
    if by == "this driver":
        monkeypatch.setenv(STARTED_VARIABLE, "1")
    if by == "driver job":
        monkeypatch.setattr(driver, "current_driver_dir", lambda: DriverDir(demo.rundir.root))
    resumes = by in ("scancel", "stop file")
    with pytest.raises(ShardmakeError) as ended:
        drive(demo.load(jobs))
    assert isinstance(ended.value, StopRequestedError) is not resumes and len(jobs.excluded) == 1 + resumes
    assert ("This command resumes it." in caplog.text) is resumes and not demo.rundir.stop_file.exists()


def test_a_driver_without_a_slot_prepares_nothing(demo: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that waits for its turn reads no checkpoint and checks no disk."""
    rows = "1|RUNNING|c1|shardmake-a-1\n2|PENDING||shardmake-b-1\n"
    monkeypatch.setattr(submission, "cached_squeue", lambda *_: rows)
    monkeypatch.setattr(submission, "wait_until_slot", Mock(side_effect=KeyboardInterrupt))  # replaces the process
    for name in ("check_run", "copy_rendered", "choose_checkpoint"):
        monkeypatch.setattr(submission, name, lambda *_: pytest.fail("it prepares"))
    with pytest.raises(KeyboardInterrupt):
        drive(demo.load(FakeJobs(), executor="slurm"))
    assert not demo.rundir.attempts.exists()


def test_an_attempt_is_recorded_once_even_if_the_driver_was_killed_right_afterwards(demo: FakeRun) -> None:
    (demo.rundir.attempts / "002.bak").mkdir(parents=True)  # a person's copy, not an attempt
    training = demo.load(FakeJobs(TERMINATED))
    job = submit(training)
    for _ in range(2):
        record_attempt(training, job, watch(training, job))
    assert [record.attempt for record in training.attempts] == [1]


def test_checkpoints_of_other_settings_are_moved_and_restored(demo: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    def resume(rate: float) -> Path | None:
        demo.rate = rate
        return choose_checkpoint(demo.load(FakeJobs()), demo.plan.choice)

    assert resume(1e-3) is None
    submit(demo.load(FakeJobs(TERMINATED)))
    demo.commit(100, demo.load(FakeJobs()).settings_digest)
    assert resume(5e-4) is None
    renamed = "belongs to other settings (learning_rate: 0.001 -> 0.0005). Renamed it to checkpoints-of-"
    assert f"The folder checkpoints {renamed}" in caplog.messages[-1]
    demo.commit(10, demo.load(FakeJobs()).settings_digest)
    assert resume(1e-3) == (demo.rundir.checkpoints / "checkpoint-100").resolve()
    assert resume(5e-4) == (demo.rundir.checkpoints / "checkpoint-10").resolve()
    assert caplog.messages[-1].startswith("Restoring checkpoints-of-")


def test_a_foreign_checkpoint_beside_own_ones_is_reported(demo: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    demo.commit(100, demo.load(FakeJobs()).settings_digest)
    demo.commit(200, "of another run")
    chosen = choose_checkpoint(demo.load(FakeJobs()), demo.plan.choice)
    assert chosen == (demo.rundir.checkpoints / "checkpoint-100").resolve()
    assert "checkpoint-200 has other settings than this run and is not used" in caplog.text
    assert len(list(demo.rundir.checkpoints.glob("foreign-checkpoint-200-*"))) == 1


def test_a_broken_node_is_excluded_until_a_person_starts_again(demo: FakeRun) -> None:
    jobs = FakeJobs(BROKEN, BAD_LABEL, BAD_LABEL)
    for _ in range(2):
        with pytest.raises(ShardmakeError, match="bad label"):
            drive(demo.load(jobs, executor="local"))
    assert jobs.excluded == [[], ["c1"], []]


class ThreeNodes(FakeJobs):
    """A partition of three nodes, for jobs of two."""

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        if len(excluded) > 1:
            raise TooFewNodesError("Slurm rejected the job: Requested node configuration is not available")
        return super().submit(folder, plan, list(excluded))


def test_nodes_that_seemed_to_fail_return_if_too_few_are_left(demo: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    lost = [exits(phase="rendezvous", returncode=None, message="no connection", culprit=node) for node in ("c1", "c2")]
    jobs = ThreeNodes(*lost, BAD_LABEL)
    with pytest.raises(ShardmakeError, match="bad label"):
        drive(demo.load(jobs, executor="local"))
    assert jobs.excluded == [[], ["c1"], ["c2"]]
    assert "Slurm has too few nodes without c1. Including it again, because its checks passed." in caplog.messages


def test_nodes_whose_checks_failed_stay_excluded(demo: FakeRun) -> None:
    training = demo.load(ThreeNodes(), executor="local")
    failed = {"end": "preflight failure", "message": "no scratch", "next_fallback": 0}
    training.attempts = [make_record(**failed, host=node, excluded=node) for node in ("c1", "c2")]
    with pytest.raises(TooFewNodesError, match="not available"):
        submit(training)


def test_fallbacks_that_cannot_resume_a_checkpoint_are_skipped(demo: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    below = [Fallback(choice=make_plan(name).choice, host_memory=1 << 30, memory_gib=2) for name in ("zero1", "zero3")]
    demo.plan = make_plan("ddp").model_copy(update={"fallbacks": below})

    def saves(folder: AttemptDir) -> None:
        demo.commit(5, AttemptDir(folder.root).read().settings_digest, "ddp")
        OUT_OF_MEMORY(folder)

    with pytest.raises(ShardmakeError, match="CUDA out of memory"):
        drive(demo.load(FakeJobs(saves)))
    skipped = [line for line in caplog.messages if line.startswith("Skipping fallback")]
    why = "checkpoints of ddp cannot be converted, only those of ZeRO and FSDP."
    assert skipped[0] == f"Skipping fallback 1 (zero1) for checkpoint-5: {why}" and len(skipped) == 2


def test_an_out_of_memory_error_counts_for_the_plan_of_its_job(demo: FakeRun) -> None:
    fallback = Fallback(choice=demo.plan.choice, host_memory=1, memory_gib=2)
    demo.plan = demo.plan.model_copy(update={"fallbacks": [fallback]})
    first = demo.load(FakeJobs(OUT_OF_MEMORY))
    job = submit(first)
    demo.plan = demo.plan.model_copy(update={"reason": "planned again"})
    second = demo.load(FakeJobs())
    apply_decision(second, record_attempt(second, job, watch(second, job)))
    assert second.attempts[-1].plan == first.plan_digest != second.plan_digest
    assert second.current_plan() == demo.plan, "the new plan starts with its own choice"


def test_a_file_system_without_locks_is_rejected(demo: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    demo.rundir.train.mkdir(parents=True)
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    with pytest.raises(ShardmakeError, match=r"no file locks \(Function not implemented\).*-o flock"):
        hold_driver_lock(demo.rundir).__enter__()


def test_the_newest_attempt_is_closed_or_its_unrecorded_job_is_adopted(demo: FakeRun) -> None:
    """A driver was killed at its submission: the job may have started, or Slurm may accept it later."""
    submit(demo.load(FakeJobs(TERMINATED)))
    job = SubmittedJob.read(demo.rundir.job)
    demo.rundir.job.unlink()
    training = demo.load(FakeJobs())
    training.cluster = make_cluster(executor="slurm")
    folder = training.attempt_dir(1)
    assert adopt(training) is None and claim(folder, "7") == NOBODY, "a job that starts now ends at once"
    shutil.rmtree(folder.owner)
    claim(folder, "7")
    adopted = adopt(training)
    assert adopted and (adopted.id, adopted.attempt) == ("7", job.attempt)
    record_attempt(training, adopted, JobStatus(JobState.ENDED, "FAILED"))
    assert adopt(training) is None, "its end is recorded"


def test_a_job_that_waits_for_a_person_is_reported_each_time(demo: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    note = 'echo "$SHARDMAKE_EVENT $SHARDMAKE_STAGE: $SHARDMAKE_MESSAGE" >> note'
    training = demo.load(FakeJobs(), make_run(notify={"command": note}))
    job = SubmittedJob(id="7", attempt=1, submitted=0.0)
    for reason in ("(Priority)", "(JobHeldUser)", "(JobHeldUser)", "(Priority)", "(JobHeldUser)"):
        report_held(training, job, JobStatus(JobState.PENDING, "PENDING", reason))
    report_held(training, job, JobStatus(JobState.RUNNING, "RUNNING", "held-1"))
    notes = Path("note").read_text().splitlines()
    assert len(notes) == 2 and len([text for text in caplog.messages if "until a person acts" in text]) == 2
    assert notes[0].startswith("held train: Slurm does not start job 7 until a person acts: JobHeldUser. Remove the")


IGNORES = """
import os, signal
from shardmake.launch.monitor import raise_on_signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with raise_on_signals():
    os.kill(os.getpid(), signal.SIGHUP)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_signals_that_nohup_ignores_stay_ignored() -> None:
    ended = subprocess.run([sys.executable, "-c", IGNORES], capture_output=True, text=True, check=False)
    assert ended.stdout == "still here\n" and signal.Signals.SIGTERM.name in ended.stderr

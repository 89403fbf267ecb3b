"""What the driver decides from what is on disk, with an executor whose jobs end as the test says."""

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.files import fingerprint, list_files
from shardmake.checkpoint.record import CheckpointRecord
from shardmake.config.models import Run
from shardmake.core.atomic import write_json
from shardmake.core.errors import ShardmakeError
from shardmake.launch import driver as driver_module
from shardmake.launch.driver import Driver, SubmittedJob
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.run.attempt import AttemptDir, NodeExit, RankError
from shardmake.run.paths import RunDir
from shardmake.run.plan import Fallback, Plan
from tests.unit.plans import make_cluster, make_plan, make_run, make_training_settings

End = Callable[[AttemptDir], None]


class FakeJobs:
    """An executor; each job has ended before it is asked for."""

    slowest_poll: ClassVar[float] = 0.0

    def __init__(self, *ends: End) -> None:
        self.ends = list(ends)
        self.state = JobState.ENDED
        self.excluded: list[list[str]] = []

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        self.excluded.append(excluded)
        self.ends.pop(0)(folder)
        return str(len(self.excluded))

    def find(self) -> str | None:
        return None

    def status(self, job: str) -> JobStatus:
        return JobStatus(self.state, "FAILED")

    def how_to_cancel(self, job: str) -> str:
        return f"scancel {job}"


class Lab:
    """One run, and drivers for it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(root)
        monkeypatch.setattr(driver_module, "copy_rendered", lambda *_: None)
        monkeypatch.setattr(driver_module, "check_run", lambda *_: None)
        monkeypatch.setattr(driver_module, "checkpoint_size", lambda *_: 0)
        monkeypatch.setattr(driver_module, "RECORD_SECONDS", 0)
        self.rundir = RunDir(root / "runs/demo")
        self.told: list[str] = []
        self.rate = 1e-3
        self.plan = make_plan("zero2")
        write_json(self.rundir.data_receipt, {"digest": "d"})

    def driver(self, jobs: FakeJobs, run: Run | None = None, **cluster: Any) -> Driver:
        """A new driver for the run with the learning rate and the plan of now."""
        make_training_settings(learning_rate=self.rate).write(self.rundir.training)
        self.plan.write(self.rundir.plan)
        made = Driver(run or make_run(), make_cluster(**cluster), self.rundir, self.plan, self.told.append, 0)
        made.jobs = jobs
        return made

    def seal(self, step: int, recipe: str, strategy: str = "zero2") -> Path:
        """A checkpoint that counts."""
        folder = self.rundir.checkpoints / f"checkpoint-{step}"
        write_json(folder / "trainer_state.json", {"global_step": step, "max_steps": 99, "epoch": 0})
        files = {name: fingerprint(folder / name, sync=False) for name in list_files(folder)}
        record = CheckpointRecord(
            step=step, tokens=1, world_size=4, strategy=strategy, attempt=1, recipe=recipe, saved_at=0, save_seconds=1,
            versions={}, files=files,
        )  # fmt: skip
        store.commit_in_place(folder, record)
        return folder


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


def fails(kind: str, message: str, **values: Any) -> End:
    """A rank raises."""

    def end(folder: AttemptDir) -> None:
        base = {"rank": 0, "host": "c1", "blamed": "c1", "time": 1.0, "traceback": "Traceback ..."}
        RankError.model_validate(base | values | {"kind": kind, "message": message}).write(
            folder.errors / "rank-0.json"
        )

    return end


def exits(**values: Any) -> End:
    """A node leaves a record."""

    def end(folder: AttemptDir) -> None:
        base = {"node_rank": 0, "host": "c1", "started": 0, "ended": 1, "phase": "training", "returncode": 1}
        NodeExit.model_validate(base | {"stop_signal": None} | values).write(folder.exit_record(0))

    return end


OUT_OF_MEMORY = fails("OutOfMemoryError", "CUDA out of memory.")
PREEMPTED = exits(stop_signal="SIGTERM", returncode=0)
BROKEN = fails("AcceleratorError", "CUDA error: uncorrectable ECC error encountered")


def test_it_gives_up_after_three_attempts_without_a_checkpoint_and_says_so(lab: Lab) -> None:
    for start in (1, 2):
        with pytest.raises(ShardmakeError, match="3 attempts, one after the other, brought no new checkpoint"):
            lab.driver(FakeJobs(*[PREEMPTED] * 3)).drive()
        assert len(list(lab.rundir.attempts.glob("[0-9]*"))) == 3 * start, "who starts again has three more"


def test_a_stop_that_was_asked_for_is_not_forgotten_because_the_ranks_could_not_save(lab: Lab) -> None:
    def end(folder: AttemptDir) -> None:
        lab.rundir.stop_file.touch()
        PREEMPTED(folder)

    with pytest.raises(ShardmakeError, match=r"demo was asked to stop \(runs/demo/train/STOP\). Nothing was submitted"):
        lab.driver(FakeJobs(end)).drive()
    with pytest.raises(ShardmakeError, match="ValueError"):
        lab.driver(FakeJobs(fails("ValueError", "bad label"))).drive()
    assert "Removing the stop file runs/demo/train/STOP of an earlier request." in lab.told


def test_a_job_for_other_settings_is_not_taken_for_one_for_these(lab: Lab) -> None:
    before = lab.driver(FakeJobs(PREEMPTED))
    before._submit()
    lab.rate = 5e-4
    running = FakeJobs()
    running.state = JobState.RUNNING
    with pytest.raises(ShardmakeError, match=r"Job 1 \(attempt 1\) still trains demo with other settings .*scancel 1"):
        lab.driver(running).drive()
    lab.rate = 1e-3
    assert lab.driver(running)._adopt() == SubmittedJob.model_validate_json(lab.rundir.job.read_text())
    lab.rate = 5e-4
    assert lab.driver(FakeJobs())._adopt() is None and not lab.rundir.job.exists()
    assert lab.told[-1] == "Job 1 (attempt 1), which was for other settings, has ended."


def test_a_recorded_job_is_adopted_while_slurm_does_not_answer(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: FakeJobs) -> None:
        raise ShardmakeError("Slurm does not answer, so a running job cannot be ruled out")

    lab.driver(FakeJobs(PREEMPTED))._submit()
    monkeypatch.setattr(FakeJobs, "find", silent)
    adopted = lab.driver(FakeJobs())._adopt()
    assert adopted and adopted.id == "1"
    lab.rundir.job.unlink()
    with pytest.raises(ShardmakeError, match="cannot be ruled out"):
        lab.driver(FakeJobs())._adopt()


def test_an_attempt_is_told_once_also_if_the_driver_died_after_it_wrote_so(lab: Lab) -> None:
    driver = lab.driver(FakeJobs(PREEMPTED))
    job = driver._submit()
    for _ in range(2):
        driver._watch(job)
        driver._close(job)
    assert [attempt_record.attempt for attempt_record in driver.history] == [1]


def test_checkpoints_of_other_settings_are_kept_and_taken_back(lab: Lab) -> None:
    def go_on(rate: float) -> Path | None:
        lab.rate = rate
        return lab.driver(FakeJobs())._choose_checkpoint(lab.plan.choice)

    assert go_on(1e-3) is None
    lab.seal(100, lab.driver(FakeJobs()).recipe)
    assert go_on(5e-4) is None and "it is now checkpoints-of-" in lab.told[-1]
    lab.seal(10, lab.driver(FakeJobs()).recipe)
    assert go_on(1e-3) == (lab.rundir.checkpoints / "checkpoint-100").resolve()
    assert go_on(5e-4) == (lab.rundir.checkpoints / "checkpoint-10").resolve()
    assert lab.told[-1].startswith("Taking back checkpoints-of-")


def test_a_broken_node_is_left_out_until_a_person_starts_again(lab: Lab) -> None:
    jobs = FakeJobs(BROKEN, fails("ValueError", "bad label"), fails("ValueError", "bad label"))
    for _ in range(2):
        with pytest.raises(ShardmakeError, match="bad label"):
            lab.driver(jobs, executor="local").drive()
    assert jobs.excluded == [[], ["c1"], []]


def test_a_check_that_fails_on_this_machine_is_not_repeated(lab: Lab) -> None:
    with pytest.raises(ShardmakeError, match=r"(?s)old torch.*Mend what the check found"):
        lab.driver(FakeJobs(exits(phase="preflight", returncode=None, message="old torch"))).drive()


def test_rungs_that_cannot_go_on_from_the_checkpoint_are_left_out(lab: Lab) -> None:
    below = [Fallback(choice=make_plan(name).choice, host_memory=1 << 30, memory_gib=2) for name in ("zero1", "zero3")]
    lab.plan = make_plan("ddp").model_copy(update={"fallbacks": below})

    def saves(folder: AttemptDir) -> None:
        lab.seal(5, AttemptDir(folder.root).read().recipe, "ddp")
        OUT_OF_MEMORY(folder)

    with pytest.raises(ShardmakeError, match="CUDA out of memory"):
        lab.driver(FakeJobs(saves)).drive()
    left = [line for line in lab.told if line.startswith("The fallbacks's fallback")]
    assert left[0] == (
        "The fallbacks's fallback 1 (zero1) cannot go on from checkpoint-5: checkpoints of ddp are not converted, only those "
        "of ZeRO and FSDP."
    )
    assert len(left) == 2


def test_the_plan_that_a_job_was_made_for_has_its_out_of_memory(lab: Lab) -> None:
    lab.plan = lab.plan.model_copy(
        update={"fallbacks": [Fallback(choice=lab.plan.choice, host_memory=1, memory_gib=2)]}
    )
    first = lab.driver(FakeJobs(OUT_OF_MEMORY))
    job = first._submit()
    lab.plan = lab.plan.model_copy(update={"reason": "planned anew"})
    second = lab.driver(FakeJobs())
    second._watch(job)
    second._answer(second._close(job))
    assert second.history[-1].plan == first.plan_digest != second.plan_digest
    assert second._present_plan() == lab.plan, "the new plan begins at its top"


def test_a_file_system_without_locks_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    lab.rundir.train.mkdir(parents=True)
    monkeypatch.setattr("fcntl.flock", no_locks)
    refused = pytest.raises(ShardmakeError, match=r"without locks \(Function not implemented\).*-o flock")
    with refused, driver_module._sole_driver(lab.rundir):
        pass


def test_what_nohup_ignores_stays_ignored() -> None:
    code = "\n".join(
        [
            "import os, signal, sys",
            "from shardmake.launch.driver import _leaving_the_job_alone",
            "signal.signal(signal.SIGHUP, signal.SIG_IGN)",
            "with _leaving_the_job_alone():",
            "    os.kill(os.getpid(), signal.SIGHUP)",
            "    print('still here', flush=True)",
            "    os.kill(os.getpid(), signal.SIGTERM)",
        ]
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout == "still here\n" and signal.Signals.SIGTERM.name in ended.stderr

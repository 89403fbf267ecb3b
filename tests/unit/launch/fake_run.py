"""A run whose jobs end as a test says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shardmake.config.models import Cluster, Run
from shardmake.core.atomic import write_json
from shardmake.launch import attempt_end, submission
from shardmake.launch.jobs import attempt_settings
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.launch.training import Training
from shardmake.run.attempt import Attempt, AttemptDir, RankError
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from tests.checkpoint_record import commit_checkpoint
from tests.finished_run import make_data_receipt, make_exit
from tests.unit.plans import make_cluster, make_plan, make_run, make_training_settings

End = Callable[[AttemptDir], None]


class FakeJobs:
    """An executor whose jobs have ended before they are queried."""

    slowest_poll: ClassVar[float] = 0.0
    find = staticmethod(lambda: None)
    hosts = staticmethod(lambda nodes: [])
    down_hosts = staticmethod(lambda hosts: [])
    has_lost_script = staticmethod(lambda job: False)
    cancel_command = staticmethod("scancel {}".format)

    def __init__(self, *ends: End) -> None:
        self.ends = list(ends)
        self.state = JobState.ENDED
        self.slurm_state = "FAILED"
        self.excluded: list[list[str]] = []

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        self.excluded.append(excluded)
        self.ends.pop(0)(folder)
        return str(len(self.excluded))

    def status(self, job: str) -> JobStatus:
        return JobStatus(self.state, self.slurm_state)


class FakeRun:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(root)
        monkeypatch.setattr(submission, "copy_rendered", lambda *_: None)
        monkeypatch.setattr(submission, "check_run", lambda *_: None)
        monkeypatch.setattr(submission, "checkpoint_size", lambda *_: 0)
        monkeypatch.setattr(attempt_end, "RECORD_SECONDS", 0)
        self.rundir = RunDir(root / "runs/demo")
        self.rate = 1e-3
        self.plan = make_plan("zero2")
        make_data_receipt("d").write(self.rundir.data_receipt)

    def load(self, jobs: FakeJobs, run: Run | None = None, **cluster: Any) -> Training:
        """Return the training as a new driver loads it, with the current learning rate and plan."""
        make_training_settings(learning_rate=self.rate).write(self.rundir.training)
        self.plan.write(self.rundir.plan)
        training = Training.load(run or make_run(), make_cluster(**cluster), self.rundir, 0)
        training.jobs = jobs
        return training

    def commit(self, step: int, settings_digest: str, strategy: str = "zero2") -> Path:
        folder = self.rundir.checkpoints / f"checkpoint-{step}"
        write_json(folder / "trainer_state.json", {"global_step": step, "max_steps": 99, "epoch": 0})
        return commit_checkpoint(folder, step, world_size=4, strategy=strategy, settings_digest=settings_digest)


def fails(kind: str, message: str, **values: Any) -> End:
    def end(folder: AttemptDir) -> None:
        base = {"rank": 0, "host": "c1", "culprit": "c1", "time": 1.0, "traceback": "Traceback ..."}
        RankError.model_validate(base | values | dict(kind=kind, message=message)).write(folder.errors / "rank-0.json")

    return end


def exits(**values: Any) -> End:
    def end(folder: AttemptDir) -> None:
        make_exit(**{"returncode": 1} | values).write(folder.exit_record(0))

    return end


def write_attempt(folder: AttemptDir, plan: Plan, cluster: Cluster | None = None, **settings: Any) -> Attempt:
    """Write settings and plan of an attempt; its number and its run are those of the folder."""
    values = {"resume_from": None, "settings_digest": "r"} | settings
    number, root = int(folder.root.name), folder.root.parents[2]
    attempt = attempt_settings(number, root, cluster or make_cluster(), plan, **values)
    attempt.write(folder.settings)
    plan.write(folder.plan)
    return attempt

"""The state of one run's training that all steps of its driver share."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from shardmake.checkpoint import store
from shardmake.checkpoint.record import CheckpointRecord
from shardmake.checkpoint.training_receipt import is_final, write_training_receipt
from shardmake.config.models import Cluster, Run
from shardmake.launch import user_script
from shardmake.launch.jobs import Jobs, LocalJobs
from shardmake.launch.slurm_jobs import SlurmJobs
from shardmake.launch.watcher import STARTED_VARIABLE, WAITED_VARIABLE
from shardmake.render.stage import check_unedited
from shardmake.run.attempt import AttemptDir, SubmittedJob
from shardmake.run.attempt_history import (
    AttemptRecord,
    excluded_nodes,
    load_history,
    next_fallback,
    save_history,
    wants_all_memory,
)
from shardmake.run.paths import RunDir, numbered_paths
from shardmake.run.plan import Plan
from shardmake.run.receipts import DataReceipt
from shardmake.run.settings_digest import result_settings, settings_digest
from shardmake.run.sources import content_of_model
from shardmake.run.training_settings import TrainingSettings

logger = logging.getLogger(__name__)


@dataclass
class Training:
    """One run: its settings, its executor and its finished attempts."""

    run: Run
    cluster: Cluster
    rundir: RunDir
    plan: Plan
    jobs: Jobs
    result_settings: dict[str, str]
    """The settings that define the result, as text by key."""
    settings_digest: str
    """Their digest."""
    plan_digest: str
    attempts: list[AttemptRecord]
    lock: int
    """Descriptor of the run's lock file, which a waiting driver keeps open."""
    has_waited: bool
    """An earlier process of this driver waited for a slot in the queue."""
    watched_job: str | None = None
    """Job that an earlier process of this driver watched."""

    @classmethod
    def load(cls, run: Run, cluster: Cluster, rundir: RunDir, lock: int) -> "Training":
        """Read the state of ``rundir``, whose lock this process holds."""
        plan = Plan.read(rundir.plan)
        check_unedited(rundir)
        settings = TrainingSettings.read(rundir.training)
        data = DataReceipt.read(rundir.data_receipt).digest
        results = result_settings(settings, plan, data, content_of_model(rundir))
        return cls(
            run,
            cluster,
            rundir,
            plan,
            SlurmJobs(rundir.root, cluster, run) if cluster.executor == "slurm" else LocalJobs(rundir.root),
            result_settings=results,
            settings_digest=settings_digest(results, rundir),
            plan_digest=plan.digest,
            attempts=load_history(rundir.attempt_history),
            lock=lock,
            has_waited=os.environ.pop(WAITED_VARIABLE, None) is not None,
            watched_job=os.environ.pop(STARTED_VARIABLE, None),
        )

    @property
    def uses_slurm(self) -> bool:
        """Return whether attempts run as Slurm jobs rather than as processes of this machine."""
        return self.cluster.executor == "slurm"

    @property
    def node_memory_gib(self) -> int:
        """Host RAM of one node, the most that a job can request."""
        return max(1, int(self.cluster.memory_gib_per_node))

    def current_plan(self) -> Plan:
        """Return the plan at the fallback, and with the memory request, of the next attempt."""
        plan = self.plan.at(next_fallback(self.attempts, self.plan_digest))
        return plan.asking(self.node_memory_gib) if wants_all_memory(self.attempts, self.plan_digest) else plan

    def last_attempt(self) -> int:
        """Return the number of the newest attempt, 0 if there is none."""
        return max(numbered_paths(self.rundir.attempts), default=0)

    def attempt_dir(self, number: int) -> AttemptDir:
        """Return the folder of an attempt."""
        return AttemptDir(self.rundir.attempts / f"{number:03d}")

    def save_attempts(self, attempts: list[AttemptRecord]) -> None:
        """Replace the history of finished attempts."""
        self.attempts = attempts
        save_history(self.rundir.attempt_history, attempts)

    def newest_checkpoint(self) -> tuple[CheckpointRecord, Path] | None:
        """Return the newest committed checkpoint; None for a user's script, whose checkpoints have no records."""
        return None if self.run.script else next(store.committed(self.rundir.checkpoints), None)

    def healthy_hosts(self, job: SubmittedJob) -> list[str]:
        """Return the nodes that the running ``job`` still has, without those that are excluded, in Slurm's order."""
        excluded = excluded_nodes(self.attempts)
        return [host for host in self.jobs.hosts(self.jobs.status(job.id).nodes) if host not in excluded]

    def progress(self) -> int:
        """Return a number that grows with what an attempt leaves for the next one."""
        if self.run.script:
            return user_script.newest_file(self.rundir)
        newest = self.newest_checkpoint()
        return newest[0].step if newest else 0

    def is_finished(self) -> bool:
        """Return whether the final step is committed. Write the receipt again if it is missing."""
        if self.run.script:
            return user_script.is_finished(self.rundir, self.settings_digest)
        newest = self.newest_checkpoint()
        if newest is None or newest[0].settings_digest != self.settings_digest or not is_final(*newest):
            return False
        if not self.rundir.train_receipt.exists():
            logger.info("Training has already finished. Writing its receipt again.")
            write_training_receipt(self.rundir, *newest)
        return True

"""Submit the next attempt: wait for a slot, write the attempt's files, choose its checkpoint, start its job."""

import contextlib
import logging
import shutil
import time
from pathlib import Path
from typing import NoReturn

from shardmake.checkpoint.reshard.convert import set_load_universal
from shardmake.launch import user_script
from shardmake.launch.jobs import attempt_settings, job_name
from shardmake.launch.low_memory_wait import wait_until_slot
from shardmake.launch.messages import short_path
from shardmake.launch.resume import choose_checkpoint
from shardmake.launch.slurm_commands import waiting_snapshot
from shardmake.launch.stop_file import check_stop_file
from shardmake.launch.submission_limit import require_slot, submission_slot, waiting_message
from shardmake.launch.training import Training
from shardmake.render.stage import copy_rendered
from shardmake.run.attempt import Attempt, AttemptDir, SubmittedJob
from shardmake.run.attempt_history import excluded_nodes, next_fallback
from shardmake.run.disk_budget import check_run, checkpoint_size
from shardmake.run.plan import Plan

logger = logging.getLogger(__name__)


def submit(training: Training) -> SubmittedJob:
    """Submit the next attempt and record its job."""
    check_stop_file(training.rundir)
    if training.uses_slurm:
        require_slot(job_name(training.rundir.root), training.cluster.trainings_per_user, _Waiter(training))
    check_run(training.rundir)
    number = training.last_attempt() + 1
    folder = AttemptDir(training.attempt_dir(number).root.resolve())
    training.rundir.train_receipt.unlink(missing_ok=True)
    plan = _write_configuration(training, folder)
    checkpoint = _prepare_resume(training, folder, plan)
    _settings(training, number, plan, checkpoint).write(folder.settings)
    with _slot(training, folder):
        id = training.jobs.submit(folder, plan, excluded_nodes(training.attempts))
        job = SubmittedJob(id=id, attempt=number, submitted=time.time())
        job.write(training.rundir.job)
    training.has_waited = False
    logger.info(
        "Attempt %d: job %s, %s on %d node(s) x %d rank(s), %s. Logs: %s",
        number,
        job.id,
        plan.choice.strategy,
        plan.choice.nodes,
        plan.choice.processes_per_node,
        f"resuming from {checkpoint.name}" if checkpoint else training.run.script or "from the base model",
        short_path(folder.root),
    )
    return job


def _write_configuration(training: Training, folder: AttemptDir) -> Plan:
    """Write the files that this attempt runs with to its folder."""
    plan = training.current_plan()
    plan.write(folder.plan)
    fallback = next_fallback(training.attempts, training.plan_digest)
    copy_rendered(training.rundir, training.plan, fallback, folder.root)
    return plan


def _prepare_resume(training: Training, folder: AttemptDir, plan: Plan) -> Path | None:
    """Return the checkpoint to resume from. A user's script finds its own."""
    if training.run.script:
        user_script.prepare_folders(training.rundir, training.settings_digest)
        return None
    checkpoint = choose_checkpoint(training, plan.choice)
    if checkpoint:
        set_load_universal(folder.deepspeed, checkpoint)
    return checkpoint


def _settings(training: Training, number: int, plan: Plan, checkpoint: Path | None) -> Attempt:
    return attempt_settings(
        number,
        training.rundir.root,
        training.cluster,
        plan,
        resume_from=str(checkpoint) if checkpoint else None,
        settings_digest=training.settings_digest,
        plan_digest=training.plan_digest,
        checkpoint_bytes=checkpoint_size(training.rundir, training.run.checkpoints.most(training.run.max_steps)),
    )


def _slot(training: Training, folder: AttemptDir) -> contextlib.AbstractContextManager[None]:
    """Hold a slot in the queue; wait for one, without the attempt in ``folder``, if another driver took the last."""
    if not training.uses_slurm:
        return contextlib.nullcontext()
    waiter = _Waiter(training, folder)
    return submission_slot(job_name(training.rundir.root), training.cluster.trainings_per_user, waiter)


class _Waiter:
    """Report once whose trainings are ahead, and become a process that waits in low memory."""

    def __init__(self, training: Training, unused: AttemptDir | None = None) -> None:
        self.training = training
        self.unused = unused

    def __call__(self, ahead: list[str] | None) -> NoReturn:
        training, limit = self.training, self.training.cluster.trainings_per_user
        if self.unused:
            shutil.rmtree(self.unused.root)
        if not training.has_waited:
            logger.info(waiting_message(ahead, training.rundir.name, limit))
        stop_file = str(training.rundir.stop_file.resolve())
        wait_until_slot(job_name(training.rundir.root), limit, stop_file, training.lock, str(waiting_snapshot()))

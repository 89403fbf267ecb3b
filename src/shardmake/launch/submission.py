"""Submit the next attempt: wait for a slot, write the attempt's files, choose its checkpoint, start its job.

An attempt that restarts in place continues the job of the one before it instead.
"""

import contextlib
import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from shardmake.checkpoint import store
from shardmake.checkpoint.reshard.convert import set_load_universal
from shardmake.core.errors import StopRequestedError, TooFewNodesError
from shardmake.core.run_folder import real_path, remove, unlink
from shardmake.core.units import plural
from shardmake.launch import user_script
from shardmake.launch.jobs import attempt_settings, job_name
from shardmake.launch.resume import resume_checkpoint
from shardmake.launch.slurm_jobs import waiting_snapshot
from shardmake.launch.training import Training
from shardmake.launch.watcher import PREFIX, SECONDS, cached_squeue, other_trainings, wait_until_slot
from shardmake.render.stage import copy_rendered
from shardmake.run.attempt import AttemptDir, SubmittedJob
from shardmake.run.attempt_history import excluded_nodes, next_fallback, suspected_nodes
from shardmake.run.attempt_owner import claim, claim_next
from shardmake.run.disk_budget import check_run, checkpoint_size, warn_of_purge
from shardmake.run.paths import RunDir, short_path
from shardmake.run.plan import Choice, MemoryEstimates, Plan
from shardmake.run.settings_digest import describe_changes, stash_and_restore

logger = logging.getLogger(__name__)
WaitUntilSlot = Callable[[list[str] | None], NoReturn]


def submit(training: Training) -> SubmittedJob:
    """Submit the next attempt and record its job."""
    folder = _next_folder(training)
    wait = partial(_wait_for_slot, training, folder)
    slot = job_name(training.rundir.root), training.cluster.trainings_per_user, wait
    if training.uses_slurm:
        require_slot(*slot)
    plan = _prepare(training, folder)
    with submission_slot(*slot) if training.uses_slurm else contextlib.nullcontext():
        job = _record(training, folder, _submit_without_failed_nodes(training, folder, plan))
    training.has_waited = False
    return job


def restart(training: Training, running: SubmittedJob) -> SubmittedJob | None:
    """Start the next attempt in the ``running`` job, whose workers wait; None if they waited too long."""
    folder = _next_folder(training)
    plan = _prepare(training, folder)
    if plan.spare_nodes:
        hosts = training.healthy_hosts(running)[: plan.choice.nodes]
        folder.read().model_copy(update={"hosts": hosts}).write(folder.settings)
    if claim_next(training.attempt_dir(running.attempt), folder.root.name) != folder.root.name:
        remove(folder.root)
        return None
    nodes = ", ".join(folder.read().hosts) or "the same nodes"
    logger.info("Job %s starts its ranks again, on %s.", running.id, nodes)
    claim(folder, running.id)
    return _record(training, folder, running.id)


def _next_folder(training: Training) -> AttemptDir:
    check_stop_file(training.rundir)
    return AttemptDir(training.attempt_dir(training.last_attempt() + 1).root.resolve())


def _prepare(training: Training, folder: AttemptDir) -> Plan:
    """Write the files of the attempt in ``folder``, choose its checkpoint, and return its plan."""
    check_run(training.rundir)
    warn_of_purge(training.rundir, training.cluster.purge_days)
    unlink(training.rundir.train_receipt)
    plan = training.current_plan()
    plan.write(folder.plan)
    fallback = next_fallback(training.attempts, training.plan_digest)
    copy_rendered(training.rundir, training.plan, fallback, folder.root)
    checkpoint = _prepare_resume(training, folder, plan)
    attempt_settings(
        int(folder.root.name),
        training.rundir.root,
        training.cluster,
        plan,
        resume_from=str(checkpoint) if checkpoint else None,
        settings_digest=training.settings_digest,
        result_settings=training.result_settings,
        plan_digest=training.plan_digest,
        checkpoint_bytes=checkpoint_size(training.rundir, training.run.checkpoints.most(training.run.max_steps)),
        gpu_memory=0
        if training.cluster.accelerator == "cpu"
        else MemoryEstimates.read(training.rundir.memory).gpu_memory,
    ).write(folder.settings)
    return plan


def _record(training: Training, folder: AttemptDir, id: str) -> SubmittedJob:
    """Record the job of the attempt in ``folder``."""
    attempt, plan = folder.read(), Plan.read(folder.plan)
    job = SubmittedJob(id=id, attempt=attempt.number, submitted=time.time())
    job.write(training.rundir.job)
    resumed = f"resuming from {Path(attempt.resume_from).name}" if attempt.resume_from else None
    logger.info(
        "Attempt %d: job %s, %s on %s x %s, %s. Logs: %s",
        job.attempt,
        job.id,
        plan.choice.strategy,
        plural(plan.choice.nodes, "node"),
        plural(plan.choice.processes_per_node, "rank"),
        resumed or training.run.script or "from the base model",
        short_path(folder.root),
    )
    return job


def _submit_without_failed_nodes(training: Training, folder: AttemptDir, plan: Plan) -> str:
    """Submit the job without the nodes that failed, and return its id.

    If Slurm then has too few nodes, those that only seemed to fail are included again, one by one. An end of the
    training there without a new checkpoint counts as any other.
    """
    excluded, suspected = excluded_nodes(training.attempts), suspected_nodes(training.attempts)
    while True:
        try:
            return training.jobs.submit(folder, plan, excluded)
        except TooFewNodesError:
            if not suspected:
                raise
            node = suspected.pop(0)
            excluded.remove(node)
            logger.warning("Slurm has too few nodes without %s. Including it again, because its checks passed.", node)


def _prepare_resume(training: Training, folder: AttemptDir, plan: Plan) -> Path | None:
    """Return the checkpoint to resume from. A user's script finds its own."""
    if training.run.script:
        user_script.prepare_folders(training.rundir, training.settings_digest, training.result_settings)
        return None
    checkpoint = choose_checkpoint(training, plan.choice)
    if checkpoint:
        set_load_universal(folder.deepspeed, checkpoint)
    return checkpoint


def _wait_for_slot(training: Training, unused: AttemptDir, ahead: list[str] | None) -> NoReturn:
    """Report once whose trainings are ahead, and become a process that waits in low memory, without the attempt."""
    limit, stop_file = training.cluster.trainings_per_user, str(training.rundir.stop_file.resolve())
    remove(unused.root)
    if not training.has_waited:
        logger.info(waiting_message(ahead, training.rundir.name, limit))
    wait_until_slot(job_name(training.rundir.root), limit, stop_file, training.lock, str(waiting_snapshot()))


def choose_checkpoint(training: Training, choice: Choice) -> Path | None:
    """Return the newest valid checkpoint of the current settings; set checkpoints of other settings aside.

    The checkpoint is converted if the library of ``choice`` cannot read it as it is.

    Raises:
        ShardmakeError: the checkpoint cannot be converted.
    """
    rundir, folder = training.rundir, real_path(training.rundir.checkpoints)
    store.discard_unfinished(folder)
    found = list(store.committed(folder))
    foreign = [path for record, path in found if record.settings_digest != training.settings_digest]
    if len(foreign) < len(found):
        for path in foreign:
            aside = store.set_aside(path, "foreign")
            logger.warning("%s has other settings than this run and is not used. Renamed it to %s.", path, aside.name)
    newest = next(store.committed(folder), None)
    if newest and newest[0].settings_digest != training.settings_digest:
        theirs = newest[0].settings_digest
        changes = describe_changes(rundir, theirs, training.result_settings)
        stash_and_restore(folder, theirs, training.settings_digest, changes)
        unlink(rundir.metrics)
    return resume_checkpoint(rundir, choice)


def check_stop_file(rundir: RunDir) -> None:
    """Raise `StopRequestedError` if somebody created the stop file since this driver started."""
    if rundir.stop_file.exists():
        raise StopRequestedError(
            f"Training of {rundir.name} stopped, because somebody created {short_path(rundir.stop_file)}. No job was "
            "submitted. Run the same command again to resume."
        )


def require_slot(name: str, limit: int, wait: WaitUntilSlot, max_age: float = SECONDS) -> None:
    """Call ``wait`` unless the user has fewer than ``limit`` trainings beside ``name`` in the queue.

    The limit covers all runs and checkouts. ``wait`` gets the names, or None if Slurm does not answer.
    """
    queue = cached_squeue(str(waiting_snapshot()), max_age)
    ahead = None if queue is None else other_trainings(queue, name)
    if ahead is None or len(ahead) >= limit:
        wait(ahead)


@contextlib.contextmanager
def submission_slot(name: str, limit: int, wait: WaitUntilSlot) -> Iterator[None]:
    """Hold the lock under which the job ``name`` is submitted; call ``wait`` instead if no slot is free now.

    Each login node has its own lock. So drivers on two login nodes may exceed the limit by one training if they query
    the queue within the same second.
    """
    with waiting_snapshot().with_suffix(".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        require_slot(name, limit, wait, 0)
        yield


def waiting_message(ahead: list[str] | None, run: str, limit: int) -> str:
    """Return why ``run`` waits; ``ahead`` are the names of the user's other jobs."""
    if ahead is None:
        return f"{run} waits: Slurm does not answer. The driver submits the job once squeue works."
    runs = ", ".join(sorted(name.removeprefix(PREFIX).rpartition("-")[0] for name in ahead))
    return (
        f"{run} waits: you have {plural(len(ahead), 'training')} in the queue ({runs}), and trainings_per_user in the "
        f"cluster file is {limit}. The driver submits the job when one of them has ended."
    )

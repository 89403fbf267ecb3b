"""The driver of a run's training: adopt or submit a job, watch it, decide what follows. It owns all retries.

Neither Snakemake nor Slurm nor torchrun repeats anything. The driver determines why an attempt ended. It then resumes,
takes the plan's next fallback, or stops with the error that matters. If the driver exits, the job keeps running and
the next driver adopts it.
"""

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator

from shardmake.config.models import Cluster, Run
from shardmake.core.errors import ShardmakeError, SlurmError
from shardmake.core.permissions import refuse_job_of_others
from shardmake.core.run_folder import make_folder, open_file, unlink
from shardmake.launch import user_script
from shardmake.launch.attempt_end import apply_decision, record_attempt, restarts_in_place
from shardmake.launch.jobs import ActiveJob, LocalJobs
from shardmake.launch.monitor import raise_on_signals, watch
from shardmake.launch.outcome import Outcome
from shardmake.launch.slurm_jobs import job_owners
from shardmake.launch.slurm_states import JobState
from shardmake.launch.submission import restart, submit
from shardmake.launch.training import Training
from shardmake.launch.watcher import LOCK_VARIABLE, SNAKEMAKE_VARIABLE, snakemake_above
from shardmake.run.attempt import SubmittedJob
from shardmake.run.attempt_history import BY_PERSON, EndReason
from shardmake.run.attempt_owner import NOBODY, NONE, claim, claim_next
from shardmake.run.driver_job import current_driver_dir
from shardmake.run.paths import RunDir, short_path
from shardmake.run.settings_digest import describe_changes

logger = logging.getLogger(__name__)
SECONDS_AFTER_A_KILL = 5.0
"""How long a driver needs to notice that its Snakemake was killed, and to release the lock."""
SECONDS_AFTER_A_NODE = 180.0
"""How long a file server may keep the lock of a driver whose node failed; a driver job then starts on another node."""


def train(run: Run, cluster: Cluster, rundir: RunDir) -> None:
    """Train ``run`` to its final step.

    Raises:
        ShardmakeError: the training cannot continue; the message says why.
    """
    make_folder(rundir.train)
    os.environ.setdefault(SNAKEMAKE_VARIABLE, snakemake_above())
    with hold_driver_lock(rundir) as lock, raise_on_signals():
        if owners := _owners(cluster, rundir):
            refuse_job_of_others(owners, rundir.name, short_path(rundir.stop_file))
        try:
            drive(Training.load(run, cluster, rundir, lock))
        except Exception as error:
            if rundir.train.is_dir():
                raise
            raise ShardmakeError(
                f"{rundir.train.absolute()} is not there any more: {error}. Somebody moved or removed the checkout or "
                "the run. Move it back and run the same command again, which adopts the job if it still runs."
            ) from error


def _owners(cluster: Cluster, rundir: RunDir) -> dict[str, str]:
    """Return the users of the run's jobs by id, where another user's may be among them."""
    if cluster.executor == "local":
        return LocalJobs(rundir.root).other_owners()
    return job_owners(rundir.root) if cluster.shared else {}


def drive(training: Training) -> None:
    """Submit and watch one attempt after another, until the training has finished."""
    job = adopt(training)
    resumes = job is not None and _has_ended_before(training, job)
    if job is None and not training.has_waited:
        _remove_stop_file(training)
    if job is None and training.run.script:
        user_script.refuse_repetition(
            training.rundir, training.attempts, training.settings_digest, training.plan_digest
        )
    while not (job is None and training.is_finished()):
        job = job or submit(training)
        status = watch(training, job)
        outcome, ended, job = record_attempt(training, job, status), job, None
        if status.state is JobState.RUNNING:
            job = _restart(training, ended, outcome)
        elif resumes and outcome.end.value in BY_PERSON:
            logger.info("%s This command resumes it.", outcome.message)
            _remove_stop_file(training)
        elif outcome.end is EndReason.FINISHED:
            logger.info(outcome.message)
        else:
            apply_decision(training, outcome)
        resumes = False


def _restart(training: Training, job: SubmittedJob, outcome: Outcome) -> SubmittedJob:
    """Start the next attempt in ``job``, whose workers wait, or let it end; return what to watch next."""
    if training.cluster.slurm.restart_in_place and restarts_in_place(training, job, outcome):
        apply_decision(training, outcome)
        if restarted := restart(training, job):
            return restarted
    claim_next(training.attempt_dir(job.attempt), NONE)
    job.write(training.rundir.job)
    return job


def _remove_stop_file(training: Training) -> None:
    """Remove the stop file of an earlier request: a person who starts a driver without a job wants to continue."""
    if (stop_file := training.rundir.stop_file).exists():
        logger.info("Removing the stop file %s of an earlier request.", short_path(stop_file))
        unlink(stop_file)


def _has_ended_before(training: Training, job: SubmittedJob) -> bool:
    """Return whether ``job`` had ended when a person started this driver, who then wants to continue.

    The drivers of a driver job start by themselves: what a person has stopped stays stopped.
    """
    if job.id == training.watched_job or current_driver_dir():
        return False
    return training.jobs.status(job.id).state in (JobState.ENDED, JobState.GONE)


@contextlib.contextmanager
def hold_driver_lock(rundir: RunDir) -> Iterator[int]:
    """Hold the run's lock and yield its descriptor. A driver that waited in low memory has the lock already.

    Raises:
        ShardmakeError: another driver holds the lock, or the file system has no locks.
    """
    held = os.environ.pop(LOCK_VARIABLE, None)
    with open(int(held), "a+") if held else open_file(rundir.driver_lock, "a+") as lock:  # noqa: PTH123
        try:
            _lock(lock.fileno(), SECONDS_AFTER_A_NODE if current_driver_dir() else SECONDS_AFTER_A_KILL)
        except BlockingIOError:
            lock.seek(0)
            raise ShardmakeError(
                f"Another driver is already watching {rundir.name}: {lock.read().strip()}. Wait until that driver "
                "ends, or end it: the job keeps running without a driver."
            ) from None
        except OSError as error:
            raise ShardmakeError(
                f"Cannot lock {rundir.train}: its file system has no file locks ({error.strerror}). Two drivers could "
                "train the same run. Mount the file system with locks (Lustre: -o flock), or put runs/ elsewhere."
            ) from None
        lock.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
        yield lock.fileno()


def _lock(file: int, seconds: float) -> None:
    """Lock ``file``; try for ``seconds`` before the `BlockingIOError` of the last attempt."""
    give_up = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise
            time.sleep(1)


def adopt(training: Training) -> SubmittedJob | None:
    """Return the job of an earlier driver if it trains with the current settings.

    A job of other settings must not be judged by the current ones: its model would count as this run's.

    Raises:
        ShardmakeError: a job of other settings is still queued or running.
    """
    job = _find_job(training)
    if job is None:
        return None
    folder = training.attempt_dir(job.attempt)
    theirs = folder.read().settings_digest if folder.settings.exists() else None
    if theirs == training.settings_digest:
        return job
    if training.jobs.status(job.id).state not in (JobState.ENDED, JobState.GONE):
        changes = "its attempt is not recorded"
        if theirs is not None:
            changes = describe_changes(training.rundir, theirs, training.result_settings)
        raise ShardmakeError(
            f"Job {job.id} (attempt {job.attempt}) still trains {training.rundir.name} with other settings ({changes})."
            " Restore those settings to adopt the job, wait for its end, or cancel it "
            f"({training.jobs.cancel_command(job.id)}). Then run the same command again."
        )
    logger.info("Job %s (attempt %d) of other settings has ended.", job.id, job.attempt)
    unlink(training.rundir.job)
    return None


def _find_job(training: Training) -> SubmittedJob | None:
    """Return the recorded job, or one that was submitted and not recorded."""
    path = training.rundir.job
    recorded = SubmittedJob.read_if_exists(path)
    try:
        active = training.jobs.find()
    except SlurmError:
        if recorded is None:
            raise
        active = None
    if recorded and (active is None or active.id == recorded.id):
        if recorded.id != training.watched_job:
            logger.info("Adopting job %s (attempt %d).", recorded.id, recorded.attempt)
        return recorded
    if found := active or _owner_of_newest_attempt(training):
        job = SubmittedJob(id=found.id, attempt=found.attempt, submitted=time.time())
        job.write(path)
        logger.info("Adopting job %s (attempt %d), which an earlier driver submitted.", job.id, job.attempt)
        return job
    return None


def _owner_of_newest_attempt(training: Training) -> ActiveJob | None:
    """Return the job of the newest attempt if its end is not recorded either.

    An attempt without a job gets none any more: one that Slurm accepts later ends at once, beside the next attempt.
    """
    number = training.last_attempt()
    if not training.uses_slurm or number <= max((record.attempt for record in training.attempts), default=0):
        return None
    owner = claim(training.attempt_dir(number), NOBODY)
    return None if owner == NOBODY else ActiveJob(owner, number)

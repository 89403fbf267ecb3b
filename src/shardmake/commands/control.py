"""Stop or cancel the training of a run, and read its logs."""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Sequence

from shardmake.commands.stage_logs import read_stage_log
from shardmake.commands.status import queue_of
from shardmake.config.models import Cluster
from shardmake.core.errors import ConfigError, SlurmError
from shardmake.core.run_folder import open_file, read_bytes, rename, unlink
from shardmake.core.units import numbered
from shardmake.launch.jobs import LocalJobs, job_name
from shardmake.launch.slurm_jobs import run_slurm
from shardmake.launch.slurm_states import JobState
from shardmake.run.attempt import AttemptDir, SubmittedJob
from shardmake.run.paths import RunDir, numbered_paths, short_path
from shardmake.run.state import living_driver


def for_each(rundirs: Sequence[RunDir], action: Callable[[RunDir], str]) -> str:
    """Do ``action`` for every run, and return a line for each.

    A run for which there is nothing to do has its reason there. Raises `ConfigError` if that is so for all runs, and
    `SlurmError`, after the last run, if Slurm refused one.
    """
    lines, refused, done = list[str](), False, False
    for rundir in rundirs:
        try:
            lines.append(action(rundir))
            done = True
        except (ConfigError, SlurmError) as error:
            lines.append(str(error))
            refused |= isinstance(error, SlurmError)
    if refused or not done:
        raise (SlurmError if refused else ConfigError)("\n".join(lines))
    return "\n".join(lines)


def request_stop(rundir: RunDir, cluster: Cluster) -> str:
    """Create the stop file, and return what happens then.

    Raises `ConfigError` if the run has neither a job nor a driver that this machine can see.
    """
    if rundir.stop_file.exists():
        return f"A stop was already requested ({short_path(rundir.stop_file)})."
    if rundir.train_receipt.exists():
        raise ConfigError(f"Nothing to stop: {rundir.name}. Its training has finished.")
    if not rundir.job.exists() and living_driver(rundir) is None:
        raise ConfigError(f"Nothing to stop: {rundir.name}. It has no training job. See: shardmake status")
    open_file(rundir.stop_file, "a").close()
    job, queue = SubmittedJob.read_if_exists(rundir.job), queue_of([rundir], cluster)
    found = queue.get(job.id) if job and queue else None
    when = "The ranks save and stop after their current step."
    if job and found and found.state is JobState.PENDING:
        when = (
            f"Job {job.id} still waits in the queue: its ranks save and stop after the first step once it has started. "
            f"To cancel the job instead: shardmake cancel {rundir.name}."
        )
    return f"Requested a stop ({short_path(rundir.stop_file)}). {when} To resume, run the workflow again."


def retrain(rundir: RunDir) -> str:
    """Rename the folder of a run's training, so that the workflow trains again from the start, and return what to do.

    Raises `ConfigError` if there is no training, or one that has a job or a driver.
    """
    if not rundir.attempts.exists():
        raise ConfigError(f"{rundir.name} has no training to set aside. The workflow trains it from the start.")
    if rundir.job.exists() or living_driver(rundir) is not None:
        raise ConfigError(f"{rundir.name} has a training job. Stop it first: shardmake stop {rundir.name}")
    names = (rundir.root / f"train-before-{number}" for number in itertools.count(1))
    aside = next(path for path in names if not path.exists())
    rename(rundir.train, aside)
    unlink(rundir.stage_settings("train"))
    return (
        f"Renamed {short_path(rundir.train)} to {short_path(aside)}; delete that folder when you no longer need it. "
        "The workflow now trains again from the start, and makes all that follows again."
    )


def cancel(rundir: RunDir, cluster: Cluster) -> str:
    """Cancel the training job of a run, and return the job that was cancelled.

    Steps since the newest checkpoint may be lost. Raises `ConfigError` if no job is queued or running, and `SlurmError`
    if Slurm refuses.
    """
    job = SubmittedJob.read_if_exists(rundir.job)
    if job is None:
        raise ConfigError(f"Nothing to cancel: {rundir.name}. It has no training job. See: shardmake status")
    if cluster.executor == "slurm":
        _cancel_in_slurm(rundir, cluster, job.id)
    elif LocalJobs(rundir.root).status(job.id).state is not JobState.RUNNING:
        raise ConfigError(f"Nothing to cancel: {rundir.name}. Its process has ended. See: shardmake status")
    else:
        with contextlib.suppress(ProcessLookupError):  # it ended in this moment
            os.kill(int(job.id.partition("@")[0]), signal.SIGINT)
    return f"Cancelled job {job.id} of {rundir.name}. The next run of the workflow resumes from the newest checkpoint."


def _cancel_in_slurm(rundir: RunDir, cluster: Cluster, job: str) -> None:
    queue = queue_of([rundir], cluster)
    if queue is None:
        raise SlurmError(f"Cannot cancel job {job} of {rundir.name}: Slurm does not answer. Run the command again.")
    found = queue.get(job)
    if found is None or found.job_name != job_name(rundir.root):
        raise ConfigError(f"Nothing to cancel: {rundir.name}. Its job {job} has ended. See: shardmake status")
    answer = run_slurm("scancel", job)
    if answer.returncode != 0:
        raise SlurmError(f"Cannot cancel job {job} of {rundir.name}: {answer.stderr.strip()}.")


def read_logs(rundir: RunDir, stage: str, rank: int | None, lines: int, attempt: int | None = None) -> str:
    """Return the end of the logs of ``stage``, at most ``lines`` of each.

    A training that has begun has those of the nodes of an attempt, the last one if it is None. With ``rank`` only the
    lines of this rank. Raises `ConfigError` if there is no such attempt, or no line and no error of the rank.
    """
    attempts = numbered_paths(rundir.attempts)
    if stage != "train" or not attempts:
        for option, value in (("--rank", rank), ("--attempt", attempt)):
            if value is not None:
                raise ConfigError(
                    f"{option} {value}: {rundir.name} has no attempt of {stage}. Run it without {option}."
                )
        return read_stage_log(rundir, stage, lines)
    number = max(attempts) if attempt is None else attempt
    if number not in attempts:
        known = numbered("attempt", sorted(attempts))
        raise ConfigError(f"--attempt {number}: {rundir.name} has no such attempt. It has {known}.")
    folder, parts = AttemptDir(attempts[number]), []
    for file in sorted(folder.root.glob("node-*.log")):
        found = read_bytes(file).decode(errors="replace").splitlines()
        if rank is not None:
            found = [line for line in found if line.startswith(f"[rank {rank}] ")]
        if found:
            parts.append("\n".join([f"==> {short_path(file)}", *found[-lines:]]))
    if rank is not None:
        errors = [error for error in folder.rank_errors() if error.rank == rank]
        parts += [f"==> error of rank {rank}\n{error.traceback.strip()}" for error in errors]
    if rank is not None and not parts:
        raise ConfigError(f"--rank {rank}: no line of this rank in {short_path(folder.root)}. Run it without --rank.")
    return "\n".join(parts)

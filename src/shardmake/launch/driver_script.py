"""The batch script of a driver job, its submission, and the Slurm jobs that belong to a workflow."""

import getpass
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Collection, Set
from pathlib import Path
from typing import Final

from shardmake.config.models import Cluster, Slurm
from shardmake.config.slurm_options import JobKind
from shardmake.config.values import minutes
from shardmake.core.errors import ConfigError, SlurmError
from shardmake.launch.slurm_jobs import (
    TRANSIENT,
    hides_jobs,
    list_jobs,
    run_slurm,
    submit_with_retry,
    submitted_job,
)
from shardmake.launch.slurm_request import SlurmRequest, prepare_submission
from shardmake.launch.slurm_states import JobStatus
from shardmake.launch.stage_jobs import ON_GPUS
from shardmake.run.driver_job import DriverDir, DriverState, Workflow, driver_dirs
from shardmake.run.paths import short_path

logger = logging.getLogger(__name__)
PREFIX: Final = "driver-"
"""Start of the names of driver jobs. It is not that of a training job, which would count towards trainings_per_user."""
LEAD_SECONDS: Final = 600
RULES_WITH_JOBS: Final = {f"{stage}_run" for stage in ("train", *ON_GPUS)}
_PURPOSE = "list the jobs of the workflow"
_LOCKS = Path(".snakemake/locks")
_WAIT_SECONDS = 600
_POLL_SECONDS = 2.0


def time_limit_minutes(slurm: Slurm) -> int:
    """Return the time limit of a driver job in minutes, rounded up."""
    return minutes(slurm.driver_time_limit or slurm.time_limit)


def lead_seconds(slurm: Slurm) -> int:
    """Return how long before its limit a driver job hands over: ten minutes, and at most a quarter of the limit."""
    return min(LEAD_SECONDS, time_limit_minutes(slurm) * 60 // 4)


def batch_script(cluster: Cluster, name: str, folder: DriverDir) -> str:
    """Return the batch script. Python replaces the shell, because Slurm sends the signal to the shell alone.

    ``singleton`` keeps a second job of the name waiting until the first has ended. A job whose node fails is queued
    again by Slurm, which is safe, because the drivers in it adopt the jobs of the trainings.
    """
    prepare_submission(cluster, os.environ)
    log = folder.log.absolute()
    request = SlurmRequest(
        cluster,
        JobKind.DRIVER,
        time_limit_minutes(cluster.slurm),
        tasks=1,
        cpus=1,
        memory_mib=math.ceil(1024 * cluster.slurm.driver_memory_gib),
        lead=lead_seconds(cluster.slurm),
        signal="B:USR1",
        name=name,
        comment="shardmake: Snakemake and drivers",
        options={"dependency": "singleton", "requeue": True, "open-mode": "append", "output": str(log)},
    )
    command = [sys.executable, "-u", "-m", "shardmake.launch.driver_job", str(folder.root.absolute())]
    lines = ["#!/bin/bash", *request.sbatch(), "", *cluster.slurm.setup]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def submit_script(script: Path, name: str, present: str | None = None) -> str:
    """Submit a driver job and return its id. ``present`` is the id of the job that submits it.

    Raises:
        SlurmError: Slurm rejects the job, or does not answer.
    """

    def submit() -> str:
        answer = run_slurm("sbatch", str(script))
        words = answer.stderr.strip()
        if answer.returncode and TRANSIENT.search(words):
            raise SlurmError(
                f"Slurm does not take the job at present: {words}. Run `shardmake submit` again later, if squeue lists "
                f"no job {name} then."
            )
        if answer.returncode:
            raise SlurmError(
                f"Slurm rejected the driver job: {words}. Correct the section slurm of the cluster file, and run "
                "`shardmake submit` again."
            )
        return submitted_job(answer.stdout)

    return submit_with_retry(submit, lambda: next(iter(jobs_of(name).keys() - {present}), None))


def jobs_of(*names: str) -> dict[str, JobStatus]:
    """Return the queued and running driver jobs of these names, of all users, by id.

    Raises:
        SlurmError: Slurm does not answer.
    """
    return list_jobs(_PURPOSE, f"--name={','.join(names)}")


def stage_jobs_of(name: str) -> list[str]:
    """Return the ids of this user's jobs that the Snakemake of a driver job submitted for stages.

    Raises:
        SlurmError: Slurm does not answer.
    """
    return [job for job, status in list_jobs(_PURPOSE, "--me").items() if status.job_name.startswith(f"{name}_")]


def cancel_stage_jobs(name: str) -> None:
    """Cancel the jobs of stages that a killed Snakemake left, and wait for their end: a stage has one writer.

    Raises:
        SlurmError: They do not end, or Slurm does not answer, for ten minutes.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            left = stage_jobs_of(name)
        except SlurmError as error:
            trouble = error
        else:
            if not left:
                return
            trouble = SlurmError(
                f"Jobs of stages do not end: {', '.join(left)}. Two jobs would write the same results. Cancel them "
                "(scancel), and run `shardmake submit` again."
            )
            logger.info("Cancelling the jobs of stages whose Snakemake was killed: %s.", ", ".join(left))
            run_slurm("scancel", *left)
        if time.monotonic() > deadline:
            raise trouble
        time.sleep(_POLL_SECONDS)


def remove_locks(runs: Collection[str]) -> None:
    """Remove the locks that a killed Snakemake left on files of ``runs``; nobody else could have taken them since."""
    for lock in _LOCKS.glob("*.lock"):
        files = lock.read_text().splitlines()
        if any(Path(file).parts[:2] == ("runs", run) for file in files for run in runs):
            lock.unlink(missing_ok=True)


def refuse_while_driven(runs: Path, names: Set[str]) -> None:
    """Raise a `ConfigError` if a driver job works on one of the runs ``names`` below the folder ``runs``.

    Raises:
        SlurmError: Slurm does not answer.
    """
    unfinished = {
        workflow.name: (workflow, folder)
        for folder in driver_dirs(runs)
        if DriverState.read(folder.state).end not in ("done", "failed")
        and not names.isdisjoint((workflow := Workflow.read(folder.workflow)).runs)
    }
    for job, status in (jobs_of(*unfinished) if unfinished else {}).items():
        workflow, folder = unfinished[status.job_name]
        common = [run for run in workflow.runs if run in names]
        raise ConfigError(
            f"Driver job {job} of {workflow.user} ({status.state.value}) works on {', '.join(common)} already. Its "
            f"output is in {short_path(folder.log)}. Wait for its end, or cancel it: shardmake cancel {common[0]} "
            "--driver. Its trainings keep running, and `shardmake submit` reattaches to them."
        )
    for workflow, folder in unfinished.values():
        if DriverState.read(folder.state).end != "cancelled" and is_hidden(workflow):
            raise ConfigError(
                f"A driver job of {workflow.user} may work on {', '.join(workflow.runs)}, and Slurm shows nobody the "
                f"jobs of others. Let {workflow.user} cancel it: shardmake cancel {workflow.runs[0]} --driver."
            )


def is_hidden(workflow: Workflow) -> bool:
    """Return whether Slurm does not show this user the jobs of ``workflow``, which another one submitted."""
    return workflow.user != getpass.getuser() and hides_jobs()


def refuse_login_node(cluster: Cluster, rules: Collection[str]) -> None:
    """Raise a `ConfigError` if Snakemake would wait on a login node for jobs of ``rules`` where the site forbids it."""
    waiting = sorted(rule.removesuffix("_run") for rule in rules if rule in RULES_WITH_JOBS)
    if cluster.slurm.driver == "job" and waiting:
        raise ConfigError(
            f"Snakemake would wait on this node for the jobs of {', '.join(waiting)}. The cluster file has "
            "`slurm.driver: job`, because this site forbids long processes on login nodes. Run `shardmake submit` with "
            "the same arguments, which runs Snakemake in a job."
        )

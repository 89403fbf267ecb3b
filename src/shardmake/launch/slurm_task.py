"""Each Slurm task of a training starts here: ``python -m shardmake.launch.slurm_task ATTEMPT``, the attempt's folder.

A job to which the attempt does not belong ends without touching the run.
"""

import os
import sys
from pathlib import Path

from shardmake.launch.step_output import WORKER_STARTS
from shardmake.launch.worker import StopRequest, run_slurm_task
from shardmake.run.attempt import START_VARIABLE, Attempt, AttemptDir, host_name, restarts
from shardmake.run.attempt_owner import NOBODY, claim, last_in_job


def main(attempt_folder: Path) -> None:
    """Run the worker of this task, if the attempt belongs to this job, and those of the attempts that follow in it."""
    job = os.environ["SLURM_JOB_ID"]
    folder: AttemptDir | None = last_in_job(AttemptDir(attempt_folder), job)
    stop: StopRequest | None = None
    while folder:
        os.environ.pop(START_VARIABLE, None)
        if attempt := Attempt.read_if_exists(folder.settings):
            os.environ[START_VARIABLE] = str(restarts() + attempt.again)
        if reason := not_wanted(folder, job):
            print(f"Job {job} ends without training: {reason}.")
            return
        print(f"{WORKER_STARTS} of job {job} on {host_name()}.", flush=True)
        stop = stop or StopRequest(folder.stop_file)
        stop.follow(folder.stop_file)
        folder = run_slurm_task(folder.root, stop)


def not_wanted(attempt: AttemptDir, job: str) -> str:
    """Return why ``job`` must not work on ``attempt``; empty if it may."""
    owner = claim(attempt, job)
    if owner != job:
        of = "no job" if owner == NOBODY else f"job {owner}"
        return f"attempt {attempt.root.name} belongs to {of}, because the sbatch of this one had failed"
    return "a later attempt has begun" if attempt.is_superseded() else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))

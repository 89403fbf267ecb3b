"""A driver job: Snakemake and the drivers in a small Slurm job, which continues in another one before its time limit.

The batch script runs this module with the folder of the workflow. Slurm sends SIGUSR1 some minutes before the limit.
The job then submits its script again, lets Snakemake finish what it can, and ends; the trainings continue in their
own jobs, and the drivers of the next job adopt them. A killed driver job leaves nothing behind that the next one does
not take over: jobs of trainings are adopted, jobs of other stages are cancelled and run again.
"""

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from shardmake.config.load import load_cluster, load_config
from shardmake.core.environment import CONFIG_VARIABLE, OFFLINE
from shardmake.core.errors import ConfigError, ShardmakeError, SlurmError
from shardmake.core.log import configure_logging
from shardmake.core.process import wait_until
from shardmake.launch.driver_script import (
    cancel_stage_jobs,
    jobs_of,
    remove_locks,
    stage_jobs_of,
    submit_script,
)
from shardmake.launch.slurm_jobs import run_slurm
from shardmake.launch.slurm_request import leave_job, prepare_submission
from shardmake.run import driver_job
from shardmake.run.attempt import restarts
from shardmake.run.driver_job import DriverDir, DriverState, End, Workflow
from shardmake.run.notification import notify
from shardmake.run.paths import RunDir

logger = logging.getLogger("shardmake.launch.driver_job")  # also if this is __main__
MOST_INTERRUPTIONS = 3
_POLL_SECONDS = 0.5
_QUEUE_SECONDS = 10.0
_RESERVE_SECONDS = 60.0
"""Time before the limit at which Snakemake has to end, whatever it does."""
_PATIENCE = 20.0
"""Seconds for the drivers to exit, and for Snakemake to cancel its jobs."""
_ASK_SECONDS = 10.0
"""How long a job that is about to be killed asks Slurm why; Slurm kills it 30 s after the signal by default."""
_HASTE = 3.0
"""The same where the job of a stage has to be cancelled anyway."""


@dataclass
class DriverJob:
    """The present driver job."""

    folder: DriverDir
    job: str
    workflow: Workflow
    restarts: int = 0
    """How often Slurm has restarted this job."""
    limit_is_near: bool = False
    """SIGUSR1 has arrived."""
    must_end: bool = False
    """SIGTERM has arrived."""

    def catch_signals(self) -> None:
        """Record SIGUSR1 and SIGTERM from now on. Snakemake must react to SIGINT, also if this process ignores it."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGUSR1, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.limit_is_near |= number == signal.SIGUSR1
        self.must_end |= number == signal.SIGTERM

    def run(self) -> int:
        """Run the workflow until it ends or this job has to; return the exit status of the job."""
        self.prepare()
        snakemake = self.start_snakemake()
        while snakemake.poll() is None:
            if self.must_end:
                return self.stop(snakemake)
            if self.limit_is_near:
                return self.hand_over(snakemake)
            time.sleep(_POLL_SECONDS)
        if snakemake.returncode:
            time.sleep(_POLL_SECONDS)  # scancel ends Snakemake too, which may end before the signal arrives here
        return self.stop(snakemake) if self.must_end else self.finish(snakemake)

    # ---- start ------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take over from an earlier driver job of this workflow, however it ended."""
        before = DriverState.read(self.folder.state)
        logger.info("Driver job %s on %s, number %d.", self.job, socket.gethostname(), len({*before.jobs, self.job}))
        if before.snakemake_started:
            cancel_stage_jobs(self.workflow.name)
            remove_locks(self.workflow.runs)
        jobs = [*(job for job in before.jobs if job != self.job), self.job]
        self.record(jobs=jobs, host=socket.gethostname(), snakemake_started=True, end=None)

    def record(self, **changes: object) -> None:
        """Change fields of the recorded state."""
        DriverState.read(self.folder.state).model_copy(update=changes).write(self.folder.state)

    def start_snakemake(self) -> "subprocess.Popen[bytes]":
        """Start Snakemake in a process group of its own. One failed run does not keep the others from continuing."""
        command = [sys.executable, "-m", "snakemake", *self.workflow.arguments, "--keep-going", "--nocolor"]
        environment = os.environ | {
            driver_job.VARIABLE: str(self.folder.root),
            CONFIG_VARIABLE: self.workflow.config,
            **(OFFLINE if self.workflow.offline else {}),
        }
        command += ["--slurm-jobname-prefix", self.workflow.name]
        return subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)

    # ---- end --------------------------------------------------------------------------------------------------------

    def finish(self, snakemake: "subprocess.Popen[bytes]") -> int:
        """Record the end of the workflow. A job that was submitted to continue is not needed any more."""
        status = snakemake.returncode
        self.cancel_next()
        self.close("failed" if status else "done", snakemake)
        logger.info(
            "The workflow is done." if status == 0 else
            "The workflow ended with failures or stopped runs, see above. Trainings that still run have their own "
            "jobs. Once the causes are fixed, run `shardmake submit` again."
        )  # fmt: skip
        return 1 if status else 0

    def stop(self, snakemake: "subprocess.Popen[bytes]") -> int:
        """End at once, because Slurm is about to kill this job; continue in another job unless a person cancelled.

        If Slurm has queued this job again, it is the job that continues. If Slurm does not say why the job ends, a
        person has to continue.
        """
        shown = show_job(self.job)
        queued_again = int(shown.get("Restarts", "0")) > self.restarts
        preempted = shown.get("PreemptTime", "None") != "None"  # as opposed to a person's scancel
        continues = queued_again or preempted or shown.get("JobState") in ("TIMEOUT", "PREEMPTED")
        end: End = "continued" if continues else "cancelled" if shown else "failed"
        self.record(end=end)  # Slurm may kill this process before Snakemake has ended
        end_snakemake(snakemake, _HASTE)
        if continues and not queued_again and not self.next_jobs():
            self.submit_next()
        self.close(end, snakemake)
        if not shown:
            self.report(
                f"Driver job {self.job} ends, and Slurm did not answer why. Run `shardmake submit` again to continue."
            )
        logger.info("Driver job %s ends, the jobs of trainings keep running.", self.job)
        return 0 if continues else 1

    def hand_over(self, snakemake: "subprocess.Popen[bytes]") -> int:
        """Continue in another job: submit it, let the jobs of stages finish if they can, and end Snakemake."""
        deadline = time.monotonic() + max(0.0, self.workflow.lead_seconds - _RESERVE_SECONDS)
        logger.info("The time limit is near. Another driver job continues.")
        # A driver job that Slurm restarted may have submitted the next one already.
        submitted = bool(self.next_jobs()) or self.submit_next()
        snakemake.send_signal(signal.SIGTERM)  # it starts nothing new
        while snakemake.poll() is None and not self.must_end and time.monotonic() < deadline:
            if not self.stage_jobs_left():
                break
            pause = min(_QUEUE_SECONDS, deadline - time.monotonic())
            wait_until(lambda: snakemake.poll() is not None or self.must_end, pause, _POLL_SECONDS)
        unfinished = snakemake.poll() is None and self.stage_jobs_left()
        interrupted = DriverState.read(self.folder.state).interrupted + 1 if unfinished else 0
        end_snakemake(snakemake, _HASTE if unfinished else _PATIENCE)
        if snakemake.returncode == 0:
            return self.finish(snakemake)
        if interrupted >= MOST_INTERRUPTIONS:
            return self.give_up(interrupted, snakemake)
        self.close("continued" if submitted else "failed", snakemake, interrupted=interrupted)
        return 0 if submitted else 1

    def give_up(self, interrupted: int, snakemake: "subprocess.Popen[bytes]") -> int:
        """End for good, because a stage does not fit into the time limit."""
        self.cancel_next()
        self.close("failed", snakemake, interrupted=0)
        self.report(
            f"The job of a stage was interrupted by the time limit of the driver job {interrupted} times in a row. "
            "Increase slurm.driver_time_limit, and run `shardmake submit` again."
        )
        return 1

    def close(self, end: End, snakemake: "subprocess.Popen[bytes]", **changes: object) -> None:
        """Record that this job has ended. A Snakemake that was killed leaves what the next job has to remove."""
        self.record(snakemake_started=snakemake.returncode is None or snakemake.returncode < 0, end=end, **changes)

    def report(self, message: str) -> None:
        """Log an error and notify the persons of all runs, whom a configuration that cannot be read does not name."""
        logger.error(message)
        with contextlib.suppress(ConfigError):
            config = load_config(Path(self.workflow.config))
            for run in self.workflow.runs:
                rundir = self.folder.root.parent.parent / run
                notify(config.runs[run], RunDir(rundir), "driver", "failed", message)

    # ---- the next job -----------------------------------------------------------------------------------------------

    def submit_next(self) -> bool:
        """Submit the script again; the job waits until this one has ended. Return whether Slurm accepted it."""
        try:
            job = submit_script(self.folder.script, self.workflow.name, self.job)
        except SlurmError as error:
            self.report(f"No driver job continues the workflow. {error} The jobs of trainings keep running.")
            return False
        logger.info("Submitted driver job %s.", job)
        return True

    def next_jobs(self) -> list[str]:
        """Return the ids of the other jobs of this workflow; none if Slurm does not answer."""
        try:
            return [job for job in jobs_of(self.workflow.name) if job != self.job]
        except SlurmError:
            return []

    def cancel_next(self) -> None:
        """Cancel the jobs that wait for the end of this one."""
        if jobs := self.next_jobs():
            run_slurm("scancel", *jobs)

    def stage_jobs_left(self) -> bool:
        """Return whether jobs of stages are queued or running, or Slurm does not answer."""
        try:
            return bool(stage_jobs_of(self.workflow.name))
        except SlurmError:
            return True


def end_snakemake(snakemake: "subprocess.Popen[bytes]", patience: float) -> None:
    """End Snakemake and its drivers. Jobs of trainings continue; those of stages are cancelled after ``patience`` s."""
    _stop_drivers(snakemake, patience)
    # Interrupted, Snakemake cancels its jobs.
    for send, number in ((os.kill, signal.SIGINT), (os.killpg, signal.SIGKILL)):
        if snakemake.poll() is None:
            send(snakemake.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                snakemake.wait(_PATIENCE)


def _stop_drivers(snakemake: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Let Snakemake start nothing new, and end each driver. It ends by itself when nothing else runs."""
    snakemake.send_signal(signal.SIGTERM)  # which does nothing if it has ended
    until, ended = time.monotonic() + seconds, set[psutil.Process]()
    while snakemake.poll() is None and time.monotonic() < until:
        with contextlib.suppress(psutil.Error):
            for process in set(psutil.Process(snakemake.pid).children(recursive=True)) - ended:
                words = [Path(word).name for word in process.cmdline()]
                if "watcher.py" in words or ("shardmake", "train") in itertools.pairwise(words):
                    process.terminate()
                    ended.add(process)
        time.sleep(_POLL_SECONDS)


def show_job(job: str) -> dict[str, str]:
    """Return what ``scontrol show job`` has of ``job``, by field; empty if Slurm does not answer in `_ASK_SECONDS`."""
    deadline = time.monotonic() + _ASK_SECONDS
    while (answer := run_slurm("scontrol", "show", "job", job)).returncode and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return dict(part.split("=", 1) for part in answer.stdout.split() if "=" in part)


def main(folder: str) -> int:
    """Run the driver job of the workflow in ``folder``, and return its exit status."""
    configure_logging()
    driver = DriverDir(Path(folder))
    job = DriverJob(driver, os.environ["SLURM_JOB_ID"], Workflow.read(driver.workflow), restarts())
    job.catch_signals()
    leave_job(os.environ)
    try:
        prepare_submission(load_cluster(Path(load_config(Path(job.workflow.config)).cluster)), os.environ)
        return job.run()
    except ShardmakeError as error:
        job.record(end="failed")
        job.report(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

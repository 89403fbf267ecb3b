"""Run a training job as a process of this machine."""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.run.attempt import AttemptDir
from shardmake.run.plan import Plan


@dataclass
class LocalJobs:
    """One worker process in a session of its own, so that it keeps running when the driver exits."""

    slowest_poll: ClassVar[float] = 1.0
    run_folder: Path

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        """See `Jobs`. The id is ``PID@START``, because a process id alone may be reused."""
        command = [sys.executable, "-m", "shardmake.launch.worker", str(folder.root), "0"]
        with (folder.root / "worker.log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return _process_id(psutil.Process(process.pid))

    def find(self) -> str | None:
        """See `Jobs`."""
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "shardmake.launch.worker" in command and any(
                Path(word).is_relative_to(self.run_folder.resolve()) for word in command
            ):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        return _process_id(process)
        return None

    def status(self, job: str) -> JobStatus:
        """See `Jobs`."""
        pid = int(job.partition("@")[0])
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if _process_id(process) == job:
                if process.status() != psutil.STATUS_ZOMBIE:
                    return JobStatus(JobState.RUNNING)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return JobStatus(JobState.ENDED)

    def cancel_command(self, job: str) -> str:
        """See `Jobs`."""
        return f"kill -INT {job.partition('@')[0]}"


def _process_id(process: psutil.Process) -> str:
    """Return the process id and its start in clock ticks since boot, which a changed clock does not affect."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(process.pid) from None
    return f"{process.pid}@{fields[19]}"

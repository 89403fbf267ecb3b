"""The interface of an executor to the driver, the settings of every job, and jobs as processes of this machine."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import psutil

from shardmake.config.models import Cluster
from shardmake.core.atomic import digest
from shardmake.core.environment import checkout_commit, library_versions
from shardmake.core.run_folder import open_file
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.launch.watcher import PREFIX
from shardmake.memory.hardware import from_cluster
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.plan import Plan


@dataclass(frozen=True)
class ActiveJob:
    """A job that is queued or running."""

    id: str
    attempt: int
    """Number of its attempt."""


class Jobs(Protocol):
    """An executor of training jobs; a job is identified by a string."""

    slowest_poll: ClassVar[float]
    """Seconds between two queries while nothing changes."""

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        """Start the workers of the attempt in ``folder``, and return the job's id."""

    def find(self) -> ActiveJob | None:
        """Return this run's job if one is queued or running, even if nobody recorded its id."""

    def status(self, job: str) -> JobStatus:
        """Return the job's state."""

    def seconds_left(self, job: str) -> float:
        """Return the seconds until the job's time limit; 0 if they are unknown."""
        return 0.0

    def hosts(self, nodes: str) -> list[str]:
        """Return the names in ``nodes``, the nodes of a `JobStatus`; none if they are unknown."""
        return []

    def down_hosts(self, hosts: Sequence[str]) -> list[str]:
        """Return those of ``hosts`` that are down or do not answer; none if that is unknown."""
        return []

    def has_lost_script(self, job: str) -> bool:
        """Return whether the job runs on without the node of its batch script: it lasts until somebody cancels it."""
        return False

    def cancel_command(self, job: str) -> str:
        """Return the command that cancels the job."""


def job_name(run_folder: Path) -> str:
    """Return the name of a run's job: readable, and the same for the same folder."""
    return f"{PREFIX}{run_folder.name}-{digest(str(run_folder.resolve()))[:8]}"


def attempt_settings(number: int, run_folder: Path, cluster: Cluster, plan: Plan, **decided: Any) -> Attempt:
    """Return the `Attempt` for ``plan`` on ``cluster``; ``decided`` are the driver's own decisions."""
    return Attempt(
        number=number,
        run_folder=str(run_folder.resolve()),
        nodes=plan.choice.nodes,
        service_nodes=plan.service_nodes,
        spare_nodes=plan.spare_nodes,
        on_one_machine=cluster.executor == "local",
        processes_per_node=plan.choice.processes_per_node,
        cpus_per_node=plan.resources["train"].cpus,
        accelerator=cluster.accelerator,
        network_interface=cluster.network_interface,
        scratch=cluster.scratch,
        offline=not cluster.internet_on_compute_nodes,
        environment=cluster.variables,
        container=cluster.slurm.container.image if cluster.slurm.container else None,
        versions=library_versions(),
        commit=checkout_commit(),
        planned_bandwidth=cluster.inter_node_gbps * 1e9 if plan.choice.nodes > 1 else None,
        planned_node_bandwidth=from_cluster(cluster).intra_node if plan.choice.processes_per_node > 1 else None,
        network_check_seconds=cluster.network_check_seconds,
        restart_in_place=cluster.slurm.restart_in_place and not plan.service_nodes,
        hang_seconds=cluster.hang_seconds,
        **decided,
    )


@dataclass
class LocalJobs(Jobs):
    """One worker process in a session of its own, so that it keeps running when the driver exits."""

    slowest_poll: ClassVar[float] = 1.0
    run_folder: Path

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        """See `Jobs`. The id is ``PID@START``, because a process id alone may be reused."""
        command = [sys.executable, "-m", "shardmake.launch.worker", str(folder.root), "0"]
        with open_file(folder.root / "worker.log", "w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return _process_id(psutil.Process(process.pid))

    def find(self) -> ActiveJob | None:
        """See `Jobs`."""
        for process, command in self._workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                return ActiveJob(_process_id(process), int(Path(command[-2]).name))
        return None

    def other_owners(self) -> dict[str, str]:
        """Return the users, by process id, of the run's jobs that other users started."""
        owners = {}
        for process, _ in self._workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.uids().real != os.getuid():
                    owners[str(process.pid)] = process.username()
        return owners

    def _workers(self) -> Iterator[tuple[psutil.Process, list[str]]]:
        """Yield each running worker of the run, of any user, and its command."""
        for process in psutil.process_iter(["cmdline", "status"]):
            command = process.info["cmdline"] or []
            if (
                "shardmake.launch.worker" in command
                and command[-1] == "0"
                and any(Path(word).is_relative_to(self.run_folder.resolve()) for word in command)
                and process.info["status"] != psutil.STATUS_ZOMBIE
            ):
                yield process, command

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

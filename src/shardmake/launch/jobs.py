"""The interface of an executor to the driver, and the settings of every job."""

from pathlib import Path
from typing import Any, ClassVar, Protocol

from shardmake.config.models import Cluster
from shardmake.core.atomic import digest
from shardmake.core.environment import library_versions
from shardmake.launch.low_memory_wait import PREFIX
from shardmake.launch.slurm_states import JobStatus
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.plan import Plan


class Jobs(Protocol):
    """An executor of training jobs; a job is identified by a string."""

    slowest_poll: ClassVar[float]
    """Seconds between two queries while nothing changes."""

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        """Start the workers of the attempt in ``folder``, and return the job's id."""

    def find(self) -> str | None:
        """Return the id of this run's job if one is queued or running, even if nobody recorded its id."""

    def status(self, job: str) -> JobStatus:
        """Return the job's state."""

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
        processes_per_node=plan.choice.processes_per_node,
        cpus_per_node=plan.resources["train"].cpus,
        accelerator=cluster.accelerator,
        network_interface=cluster.network_interface,
        scratch=cluster.scratch,
        offline=not cluster.internet_on_compute_nodes,
        versions=library_versions(),
        planned_bandwidth=cluster.inter_node_gbps * 1e9 if plan.choice.nodes > 1 else None,
        hang_seconds=cluster.hang_seconds,
        **decided,
    )

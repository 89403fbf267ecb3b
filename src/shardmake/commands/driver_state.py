"""The driver jobs of runs: their state for `status`, their end for `cancel`, their output for `logs`."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from shardmake.core.errors import ConfigError, SlurmError
from shardmake.launch.driver_script import jobs_of
from shardmake.launch.slurm_jobs import run_slurm
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.run.driver_job import DriverDir, DriverState, Workflow, driver_dirs
from shardmake.run.paths import RunDir, short_path
from shardmake.run.state import DriverJobStatus


def newest_workflows(runs: Path, names: Collection[str]) -> Iterator[tuple[DriverDir, Workflow, list[str]]]:
    """Yield the last workflow that was submitted for each run of ``names``, with those runs."""
    left = set(names)
    for folder in driver_dirs(runs):
        workflow = Workflow.read(folder.workflow)
        if common := [run for run in workflow.runs if run in left]:
            left -= set(common)
            yield folder, workflow, common


def driver_jobs(runs: Path, names: Collection[str]) -> dict[str, DriverJobStatus]:
    """Return the state of the driver jobs by run, for those of ``names`` that were submitted. Slurm gets one query."""
    found = list(newest_workflows(runs, names))
    unfinished = {workflow.name for folder, workflow, _ in found if DriverState.read(folder.state).end != "done"}
    try:
        queue = jobs_of(*unfinished) if unfinished else {}
    except SlurmError:
        queue = None
    states = ((_status(folder, workflow, queue), common) for folder, workflow, common in found)
    return {run: status for status, common in states for run in common}


def _status(folder: DriverDir, workflow: Workflow, queue: Mapping[str, JobStatus] | None) -> DriverJobStatus:
    """Return the state of the driver jobs of a workflow; ``queue`` has those in the queue, None without an answer."""
    state, log = DriverState.read(folder.state), short_path(folder.log)
    last = state.jobs[-1] if state.jobs else None
    if state.end == "done" or queue is None:
        return DriverJobStatus(job=last, state="done" if state.end == "done" else "unknown", log=log)
    active = [(job, status) for job, status in queue.items() if status.job_name == workflow.name]
    for job, status in sorted(active, key=lambda item: item[1].state is not JobState.RUNNING):
        name: Literal["running", "pending"] = "running" if status.state is JobState.RUNNING else "pending"
        return DriverJobStatus(job=job, state=name, nodes=status.nodes, log=log)
    return DriverJobStatus(job=last, state=state.end if state.end in ("failed", "cancelled") else "killed", log=log)


def describe_drivers(runs: Path, names: Collection[str]) -> list[str]:
    """Return a sentence for each workflow that driver jobs work on, or that ended before its runs were done."""
    by_log: dict[str, tuple[DriverJobStatus, list[str]]] = {}
    for run, status in driver_jobs(runs, names).items():
        if status.state != "done":
            by_log.setdefault(status.log, (status, []))[1].append(run)
    return [
        f"Driver of {', '.join(common)}: "
        + _SENTENCES[status.state].format(job=f"job {status.job}" if status.job else "its job", nodes=status.nodes)
        + f" Output: {status.log}"
        for status, common in by_log.values()
    ]


_SENTENCES: Final = {
    "running": "{job} is running on {nodes}.",
    "pending": "{job} is pending {nodes}.",
    "unknown": "Slurm does not say whether a driver job works on them.",
    "failed": "{job} ended, because a person is needed. Fix the cause and run `shardmake submit` again.",
    "cancelled": "{job} was cancelled; trainings keep running. Run `shardmake submit` to continue.",
    "killed": "{job} was killed or cancelled; trainings keep running. Run `shardmake submit` to continue.",
}


def cancel_driver(rundir: RunDir) -> str:
    """Cancel the driver jobs of a run, and return what happens then.

    Raises `ConfigError` if there are none, and `SlurmError` if Slurm refuses or does not answer.
    """
    for _, workflow, _ in newest_workflows(rundir.root.parent, [rundir.name]):
        if jobs := jobs_of(workflow.name):
            answer = run_slurm("scancel", *jobs)
            if answer.returncode:
                raise SlurmError(f"Cannot cancel driver job {', '.join(jobs)}: {answer.stderr.strip()}.")
            return (
                f"Cancelled driver job {', '.join(jobs)} of {', '.join(workflow.runs)}. Trainings keep running. To "
                "continue: shardmake submit"
            )
    raise ConfigError(f"Nothing to cancel: {rundir.name}. It has no driver job. See: shardmake status")


def read_driver_log(rundir: RunDir, lines: int) -> str:
    """Return the last ``lines`` of the output of a run's driver jobs; raise `ConfigError` if there is none."""
    for folder, _, _ in newest_workflows(rundir.root.parent, [rundir.name]):
        if folder.log.exists():
            found = folder.log.read_text(errors="replace").splitlines()
            return "\n".join([f"==> {short_path(folder.log)}", *found[-lines:]])
    raise ConfigError(f"No logs: {rundir.name}. No driver job of it has started. See: shardmake status")

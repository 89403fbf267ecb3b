"""The driver jobs of runs: their state for `status`, their end for `cancel`, their output for `logs`."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from shardmake.core.errors import ConfigError, SlurmError
from shardmake.launch.driver_script import jobs_of
from shardmake.launch.slurm_jobs import run_slurm
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.run.driver_job import DriverDir, DriverState, Workflow, driver_dirs
from shardmake.run.paths import RunDir, short_path


def newest_workflows(runs: Path, names: Collection[str]) -> Iterator[tuple[DriverDir, Workflow, list[str]]]:
    """Yield the last workflow that was submitted for each run of ``names``, with those runs."""
    left = set(names)
    for folder in driver_dirs(runs):
        workflow = Workflow.read(folder.workflow)
        if common := [run for run in workflow.runs if run in left]:
            left -= set(common)
            yield folder, workflow, common


def describe_drivers(runs: Path, names: Collection[str]) -> list[str]:
    """Return a sentence for each workflow that driver jobs work on, or that ended before its runs were done."""
    lines = []
    for folder, workflow, common in newest_workflows(runs, names):
        state = DriverState.read(folder.state)
        if state.end == "done":
            continue
        try:
            text = _describe(state, jobs_of(workflow.name))
        except SlurmError:
            text = "Slurm does not say whether a driver job works on them."
        lines.append(f"Driver of {', '.join(common)}: {text} Output: {short_path(folder.log)}")
    return lines


def _describe(state: DriverState, jobs: Mapping[str, JobStatus]) -> str:
    """Return the state of the driver jobs of a workflow; ``jobs`` are those in the queue."""
    for job, status in sorted(jobs.items(), key=lambda item: item[1].state is not JobState.RUNNING):
        where = f"on {status.nodes}" if status.state is JobState.RUNNING else status.nodes
        return f"job {job} is {status.state.value} {where}."
    last = f"job {state.jobs[-1]}" if state.jobs else "its job"
    if state.end == "failed":
        return f"{last} ended, because a person is needed. Fix the cause and run `shardmake submit` again."
    ended = "was cancelled" if state.end == "cancelled" else "was killed or cancelled"
    return f"{last} {ended}; trainings keep running. Run `shardmake submit` to continue."


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

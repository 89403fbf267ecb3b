"""Read why a job ended from the output of Slurm's step and from the logs of its nodes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NOT_STARTED = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+): (.+)")
_TASK_ENDED = re.compile(r"srun: error: (\S+): tasks? (\d+)\S*: (.+)")
_BY_ITSELF = "Exited with exit code"
_CANCELLED = re.compile(r"error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+( DUE TO (?!SIGNAL Terminated))?", re.IGNORECASE)
"""Slurm's line about the end of a job; a preempted job that ends within its grace time has one for its step alone."""
_RAISED = re.compile(r"^(?:\[\S+\]: ?)?([\w.]+(?:Error|Exception): .+)")
_SIGNAL_OF_A_RANK = re.compile(r"Signal \d+ \(SIG\w+\) received by PID")
WORKER_STARTS = "Starting the worker"
"""Begin of a worker's first line in the log of node 0, which restarts of the job append to."""


@dataclass(frozen=True)
class StepFailure:
    """The first worker that Slurm could not start, or that a signal ended; Slurm then ends all others."""

    host: str
    reason: str
    """Slurm's words, for example `Killed`."""
    node_rank: int | None
    """Rank of the worker's node; None if the worker did not start."""


def _of_last_start(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines since the last start of a job that Slurm restarted, else all of them."""
    starts = [number for number, line in enumerate(lines) if line.startswith(WORKER_STARTS)]
    return lines[starts[-1] :] if len(starts) > 1 else lines


def step_failure(lines: Sequence[str]) -> StepFailure | None:
    """Return the failure that the last start of a job printed first; None if its workers ended by themselves."""
    for line in _of_last_start(lines):
        if found := _NOT_STARTED.search(line):
            return StepFailure(found[1], found[2].strip(), None)
        if found := _TASK_ENDED.search(line):
            return None if found[3].startswith(_BY_ITSELF) else StepFailure(found[1], found[3].strip(), int(found[2]))
    return None


def was_cancelled(lines: Sequence[str]) -> bool:
    """Return whether Slurm's own lines say that it cancelled the job, and give no other reason than a request."""
    found = [match for line in _of_last_start(lines) if (match := _CANCELLED.search(line))]
    return bool(found) and not any(match[1] for match in found)


def launcher_error(lines: Sequence[str]) -> str:
    """Return the last exception that a node's log shows; empty if its launcher saw a rank end by a signal."""
    if any(_SIGNAL_OF_A_RANK.search(line) for line in lines):
        return ""
    return next((found[1] for line in reversed(lines) if (found := _RAISED.match(line))), "")

"""Failures of workers in the output of Slurm's step: one that Slurm could not start, or one that a signal ended."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NOT_STARTED = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+): (.+)")
_TASK_ENDED = re.compile(r"srun: error: (\S+): tasks? (\d+)\S*: (.+)")
_BY_ITSELF = "Exited with exit code"
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


def step_failure(lines: Sequence[str]) -> StepFailure | None:
    """Return the failure that the last start of a job printed first; None if its workers ended by themselves."""
    for line in _last_start(lines):
        if found := _NOT_STARTED.search(line):
            return StepFailure(found[1], found[2].strip(), None)
        if found := _TASK_ENDED.search(line):
            return None if found[3].startswith(_BY_ITSELF) else StepFailure(found[1], found[3].strip(), int(found[2]))
    return None


def _last_start(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines from the last start on, if the job was restarted: earlier ones are about an earlier start."""
    starts = [number for number, line in enumerate(lines) if line.startswith(WORKER_STARTS)]
    return lines[starts[-1] :] if len(starts) > 1 else lines

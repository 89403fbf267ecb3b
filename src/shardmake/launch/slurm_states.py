"""Slurm's names for the states of a job: parse the output of squeue, sacct and scontrol."""

import re
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from shardmake.launch.watcher import PENDING, RUNNING, STATES, needs_person


class JobState(Enum):
    """A state as the driver distinguishes them."""

    PENDING = PENDING
    RUNNING = RUNNING
    ENDED = "ended"
    UNKNOWN = "unknown"
    """No answer, or one that cannot be parsed: query again. It never counts as the end of the job."""
    GONE = "gone"
    """Slurm answered that the job does not exist."""


FORGOTTEN = "FORGOTTEN"
"""Name, as of a state, for a job of state `JobState.GONE`."""


@dataclass(frozen=True)
class JobStatus:
    """State of one job."""

    state: JobState
    name: str = ""
    """Slurm's name of the state."""
    nodes: str = ""
    """Nodes of the job; while it is pending, squeue has the reason in parentheses instead."""
    job_name: str = ""
    cancelled_by: str = ""
    expected_start: str = ""
    """Slurm's estimate for a pending job, as squeue prints it (``%S``); empty or ``N/A`` if there is none."""
    user: str = ""
    script: str = ""
    """Path of the batch script."""


_ENDED = "COMPLETED FAILED TIMEOUT CANCELLED NODE_FAIL OUT_OF_MEMORY PREEMPTED BOOT_FAIL DEADLINE REVOKED LAUNCH_FAILED"
_STATES = {name: JobState(state) for state, names in (STATES | {"ended": _ENDED}).items() for name in names.split()}


def parse_state(text: str) -> tuple[JobState, str]:
    """Return the state and its bare name for text such as ``CANCELLED by 1000`` or ``COMPLETED+``."""
    parts = text.split()
    name = parts[0].rstrip("+*").upper() if parts else ""
    return _STATES.get(name, JobState.UNKNOWN), name


def parse_rows(text: str) -> dict[str, JobStatus]:
    """Return the status by job id from rows ``ID|STATE|NODES|NAME|START|USER|SCRIPT``, or only the first four.

    Steps (``12.0``, ``12.batch``) are skipped. If sacct lists a requeued job twice, the last row counts.
    """
    found: dict[str, JobStatus] = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 6)
        if len(fields) >= 4 and fields[0].isdigit():
            job, state, nodes, name, *others = fields
            found[job] = JobStatus(*parse_state(state), nodes, name, state.partition(" by ")[2], *others)
    return found


def parse_scontrol(text: str) -> JobStatus:
    """Return the status from ``scontrol show job ID``.

    A preempted job that may not be requeued ends as TIMEOUT after its grace time, as CANCELLED, or with the status of
    its ranks, which saved and stopped. Its time of preemption identifies it.
    """
    fields: dict[str, str] = {}
    for part in text.split():
        key, equals, value = part.partition("=")
        if equals:
            fields.setdefault(key, value)
    state, name = parse_state(fields.get("JobState", ""))
    if state is JobState.ENDED and fields.get("PreemptTime", "None") != "None":
        name = "PREEMPTED"
    return JobStatus(state, name, fields.get("NodeList", ""), fields.get("JobName", ""))


def parse_seconds_left(text: str, now: datetime) -> float:
    """Return the seconds from ``now`` to the end time in ``scontrol show job ID``; 0 without one."""
    found = re.search(r"\bEndTime=(\d\S+)", text)
    return (datetime.fromisoformat(found[1]) - now).total_seconds() if found else 0.0


def held_message(job: str, status: JobStatus, seconds: float = 0.0) -> str:
    """Return what a person has to do for a ``job`` that is pending for one reason for ``seconds``; empty if nothing."""
    reason = status.nodes.strip("()")
    if status.state is not JobState.PENDING or not needs_person(reason, seconds):
        return ""
    until = f"Slurm does not start job {job} until a person acts: {reason}. Remove the reason"
    if not needs_person(reason):
        until = (
            f"Job {job} waits for {reason}. The wait may end by itself, with other jobs of the account or the site's "
            "maintenance. Otherwise remove the reason"
        )
    return (
        f"{until} and release the job (scontrol release {job}). Or cancel it (scancel {job}), correct the slurm "
        "section of the cluster file and run the same command again."
    )


def is_no_such_job(message: str) -> bool:
    """Return whether error output says that the job does not exist, as opposed to that Slurm did not answer."""
    return "invalid job id" in message.lower()

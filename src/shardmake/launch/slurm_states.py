"""Slurm's words for the state of a job, as text in, as values out. Nothing here asks Slurm."""

from dataclasses import dataclass
from enum import Enum


class JobState(Enum):
    """What a state means for the driver."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """No answer, or one that cannot be read: ask again. Never taken for an end."""
    GONE = "gone"
    """Slurm answered that it knows no such job."""


@dataclass(frozen=True)
class JobStatus:
    """State of one job: the meaning, Slurm's own word, the nodes, the job's name, and who cancelled it.

    While it is pending, squeue tells the reason in brackets in place of the nodes.
    """

    state: JobState
    word: str = ""
    nodes: str = ""
    name: str = ""
    by: str = ""


PREEMPTION_ALIASES = ("CANCELLED", "TIMEOUT")
"""What Slurm may call a preempted job."""
_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_ENDED = {
    "COMPLETED",
    "FAILED",
    "TIMEOUT",
    "CANCELLED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "REVOKED",
    "LAUNCH_FAILED",
}
_BY_WORD = (
    dict.fromkeys(_PENDING, JobState.PENDING)
    | dict.fromkeys(_RUNNING, JobState.RUNNING)
    | dict.fromkeys(_ENDED, JobState.ENDED)
)


def parse_word(text: str) -> tuple[JobState, str]:
    """Meaning and bare word of a state such as ``CANCELLED by 1000`` or ``COMPLETED+``."""
    parts = text.split()
    word = parts[0].rstrip("+*").upper() if parts else ""
    return _BY_WORD.get(word, JobState.UNKNOWN), word


def parse_rows(text: str) -> dict[str, JobStatus]:
    """Status by job id from rows ``ID|STATE|NODES|NAME``, as both squeue and sacct print them on request.

    Steps (``12.0``, ``12.batch``) are left out. Where sacct lists a requeued job twice, the last row counts.
    """
    found: dict[str, JobStatus] = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 3)
        if len(fields) == 4 and fields[0].isdigit():
            job, text, nodes, name = fields
            found[job] = JobStatus(*parse_word(text), nodes, name, text.partition(" by ")[2])
    return found


def parse_scontrol(text: str) -> JobStatus:
    """Status from ``scontrol show job ID``.

    A job that may not be requeued ends as TIMEOUT when the grace of its preemption is over, or as CANCELLED; its time
    of preemption tells.
    """
    fields: dict[str, str] = {}
    for part in text.split():
        key, equals, value = part.partition("=")
        if equals:
            fields.setdefault(key, value)
    state, word = parse_word(fields.get("JobState", ""))
    if word in PREEMPTION_ALIASES and fields.get("PreemptTime", "None") != "None":
        word = "PREEMPTED"
    return JobStatus(state, word, fields.get("NodeList", ""), fields.get("JobName", ""))


def is_no_such_job(message: str) -> bool:
    """Whether a command's error output says that Slurm knows no such job, rather than that it did not answer."""
    return "invalid job id" in message.lower()

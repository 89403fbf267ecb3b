"""Why an attempt ended, and what follows: two pure functions over the records that the attempt left."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from shardmake.attempt import NodeExit, RankError


class End(Enum):
    """Why an attempt ended."""

    FINISHED = "finished"
    STOP_REQUESTED = "stop requested"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled by a person"
    GPU_OUT_OF_MEMORY = "GPU out of memory"
    HOST_OUT_OF_MEMORY = "host out of memory"
    NODE_FAILURE = "node failure"
    RENDEZVOUS = "nodes did not meet"
    COMMUNICATION = "communication failure"
    KILLED = "a process was killed"
    NON_FINITE = "non-finite loss"
    USER_ERROR = "error in the training"
    LOST = "lost without a trace"


@dataclass(frozen=True)
class Evidence:
    """What an attempt left behind."""

    finished: bool
    """The receipt is there."""
    stop_file: bool
    """Somebody created the run's stop file."""
    stopped: bool
    """The ranks saved and stopped because they were asked to."""
    job_word: str
    """Slurm's last word on the job, bare; empty if there was none."""
    exits: Sequence[NodeExit]
    errors: Sequence[RankError]
    """Earliest first."""


@dataclass(frozen=True)
class Outcome:
    """Why the attempt ended."""

    end: End
    sentence: str
    error: RankError | None = None
    host: str | None = None
    """The node to blame, where there is one."""


class Action(Enum):
    """What the driver does next."""

    FINISH = "finish"
    RESUME = "resume"
    EXCLUDE_AND_RESUME = "resume without the node"
    NEXT_RUNG = "take the next rung of the ladder"
    STOP = "stop"


_ERROR_PATTERNS: tuple[tuple[End, str], ...] = (
    (End.GPU_OUT_OF_MEMORY, r"OutOfMemoryError|CUDA out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
    (End.HOST_OUT_OF_MEMORY, r"^MemoryError|can't allocate memory|Cannot allocate memory|unable to mmap"),
    (End.NON_FINITE, r"NonFinite"),
    (
        End.COMMUNICATION,
        r"DistNetworkError|DistBackendError|DistStoreError|NCCL|[Gg]loo|Connection (closed|reset)|Broken pipe"
        r"|recvValue failed|Timed out waiting|heartbeat|timed out after",
    ),
)
_BY_WORD = {
    "CANCELLED": End.CANCELLED,
    "TIMEOUT": End.TIME_LIMIT,
    "DEADLINE": End.TIME_LIMIT,
    "PREEMPTED": End.PREEMPTED,
    "NODE_FAIL": End.NODE_FAILURE,
    "BOOT_FAIL": End.NODE_FAILURE,
    "LAUNCH_FAILED": End.NODE_FAILURE,
    "OUT_OF_MEMORY": End.HOST_OUT_OF_MEMORY,
}
_BY_SIGNAL = {"SIGUSR2": End.TIME_LIMIT, "SIGTERM": End.PREEMPTED, "SIGINT": End.CANCELLED}


def error_end(error: RankError) -> End:
    """Which kind of end a rank's exception speaks for."""
    text = f"{error.kind}: {error.message}"
    return next((end for end, pattern in _ERROR_PATTERNS if re.search(pattern, text)), End.USER_ERROR)


def classify(evidence: Evidence) -> Outcome:
    """Why the attempt ended.

    A rank's own error comes before Slurm's word, and Slurm's word before the connection errors that a dying peer
    leaves on every other rank.
    """
    if evidence.finished:
        return Outcome(End.FINISHED, "Training finished.")
    own = next((error for error in evidence.errors if error_end(error) is not End.COMMUNICATION), None)
    if own is not None:
        sentence = f"Rank {own.rank} on {own.host} failed: {own.kind}: {own.message}"
        return Outcome(error_end(own), sentence, own, own.host)
    if evidence.stop_file and evidence.stopped:
        return Outcome(End.STOP_REQUESTED, "Training saved and stopped because somebody created the stop file.")
    return (
        _by_slurm(evidence.job_word)
        or _by_signal(evidence.exits)
        or _by_rendezvous(evidence.exits)
        or _by_connection(evidence.errors)
        or _by_exit_status(evidence.exits)
        or Outcome(End.LOST, "The job ended and left no record.")
    )


def _by_slurm(word: str) -> Outcome | None:
    end = _BY_WORD.get(word)
    return Outcome(end, f"Slurm ended the job: {word}.") if end else None


def _by_signal(exits: Sequence[NodeExit]) -> Outcome | None:
    told = next((node for node in exits if node.stop_signal), None)
    if told is None or told.stop_signal is None:
        return None
    end = _BY_SIGNAL[told.stop_signal]
    return Outcome(end, f"{told.host} was told to stop by {told.stop_signal} ({end.value}).")


def _by_rendezvous(exits: Sequence[NodeExit]) -> Outcome | None:
    failed = [node for node in exits if node.phase == "rendezvous" and node.message]
    # Where one node could not be reached the others only waited; the most telling message is the last node's.
    return Outcome(End.RENDEZVOUS, failed[-1].message, host=failed[-1].host) if failed else None


def _by_connection(errors: Sequence[RankError]) -> Outcome | None:
    if not errors:
        return None
    first = errors[0]
    return Outcome(
        End.COMMUNICATION, f"Rank {first.rank} on {first.host} lost its peers: {first.message.splitlines()[0]}", first
    )


def _by_exit_status(exits: Sequence[NodeExit]) -> Outcome | None:
    failed = next((node for node in exits if node.returncode or node.message), None)
    if failed is None:
        return None
    if failed.message:
        return Outcome(End.KILLED, f"The worker on {failed.host} could not run the ranks: {failed.message}")
    return Outcome(
        End.KILLED,
        f"The ranks on {failed.host} ended with status {failed.returncode} and left no traceback; they were killed, "
        "by the kernel if the node ran out of memory.",
        host=failed.host,
    )


_ACTIONS = {
    End.FINISHED: Action.FINISH,
    End.STOP_REQUESTED: Action.STOP,
    End.TIME_LIMIT: Action.RESUME,
    End.PREEMPTED: Action.RESUME,
    End.CANCELLED: Action.STOP,
    End.GPU_OUT_OF_MEMORY: Action.NEXT_RUNG,
    End.HOST_OUT_OF_MEMORY: Action.NEXT_RUNG,
    End.NODE_FAILURE: Action.RESUME,
    End.RENDEZVOUS: Action.EXCLUDE_AND_RESUME,
    End.COMMUNICATION: Action.RESUME,
    End.KILLED: Action.RESUME,
    End.NON_FINITE: Action.STOP,
    End.USER_ERROR: Action.STOP,
    End.LOST: Action.RESUME,
}


def decide(outcome: Outcome, *, idle_attempts: int, cap: int, rungs_left: int) -> Action:
    """What follows an outcome.

    Args:
        outcome: why the last attempt ended.
        idle_attempts: attempts since the newest checkpoint last advanced, the last one included.
        cap: idle attempts after which to stop.
        rungs_left: rungs of the ladder below the present choice.
    """
    action = _ACTIONS[outcome.end]
    if action is Action.NEXT_RUNG:
        return Action.NEXT_RUNG if rungs_left else Action.STOP
    if action in (Action.RESUME, Action.EXCLUDE_AND_RESUME) and idle_attempts >= cap:
        return Action.STOP
    return action

"""Why an attempt ended, and what follows: two pure functions over the records that the attempt left."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from shardmake.run.attempt import Hang, NodeExit, RankError
from shardmake.run.attempt_history import EndReason


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
    nodes: int = 1
    """How many there were; one whose worker is killed leaves no record."""
    hang: Hang | None = None
    """What the workers found if the ranks hung."""
    cancelled_by: str = ""
    """Who cancelled the job, if Slurm's accounting says so."""
    last_words: str = ""
    """The last line that Slurm's step printed; where no node left a record, it often says why."""


@dataclass(frozen=True)
class Outcome:
    """Why the attempt ended."""

    end: EndReason
    sentence: str
    error: RankError | None = None
    host: str | None = None
    """The node to blame, where there is one."""


class Action(Enum):
    """What the driver does next."""

    FINISH = "finish"
    RESUME = "resume"
    EXCLUDE_AND_RESUME = "resume without the node"
    NEXT_FALLBACK = "take the next fallback"
    MORE_MEMORY = "ask for all of a node's memory"
    STOP = "stop"
    GIVE_UP = "stop, for want of progress"


FAILING_NODES = 5
_ERROR_PATTERNS: tuple[tuple[EndReason, str], ...] = (
    (EndReason.GPU_OUT_OF_MEMORY, r"OutOfMemoryError|CUDA out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
    (EndReason.HOST_OUT_OF_MEMORY, r"^MemoryError|can't allocate memory|Cannot allocate memory|unable to mmap"),
    (EndReason.NON_FINITE, r"NonFinite"),
    (EndReason.PREFLIGHT, r"^NetworkCheckError: Rank"),
    (
        EndReason.NODE_FAILURE,
        r"uncorrectable (ECC|NVLink)|GPU is lost|fallen off the bus|CUDA-capable device\(s\) is/are busy"
        r"|Stale file handle|Input/output error|Remote I/O error|Transport endpoint is not connected",
    ),
    (
        EndReason.COMMUNICATION,
        r"^NetworkCheckError|DistNetworkError|DistBackendError|DistStoreError|NCCL|[Gg]loo|Connection (closed|reset)"
        r"|Broken pipe|recvValue failed|Timed out waiting|heartbeat|timed out after",
    ),
)
_BY_WORD = {
    "CANCELLED": EndReason.CANCELLED,
    "TIMEOUT": EndReason.TIME_LIMIT,
    "DEADLINE": EndReason.TIME_LIMIT,
    "PREEMPTED": EndReason.PREEMPTED,
    "NODE_FAIL": EndReason.NODE_FAILURE,
    "BOOT_FAIL": EndReason.NODE_FAILURE,
    "LAUNCH_FAILED": EndReason.NODE_FAILURE,
    "OUT_OF_MEMORY": EndReason.HOST_OUT_OF_MEMORY,
}
_BY_SIGNAL = {"SIGUSR2": EndReason.TIME_LIMIT, "SIGTERM": EndReason.PREEMPTED, "SIGINT": EndReason.CANCELLED}


def error_end(error: RankError) -> EndReason:
    """Which kind of end a rank's exception speaks for."""
    text = f"{error.kind}: {error.message}"
    return next((end for end, pattern in _ERROR_PATTERNS if re.search(pattern, text)), EndReason.USER_ERROR)


def classify(evidence: Evidence) -> Outcome:
    """Why the attempt ended.

    A person's word comes first, but for an error in the training, which says more. A rank's own error comes before a
    hang, that before Slurm's word, and Slurm's word before the connection errors that a dying peer leaves on every
    other rank.
    """
    if evidence.finished:
        return Outcome(EndReason.FINISHED, "Training finished.")
    if evidence.stop_file and evidence.stopped:
        return Outcome(EndReason.STOP_REQUESTED, "Training saved and stopped because somebody created the stop file.")
    return (
        _by_person(evidence)
        or _by_own_error(evidence)
        or _by_preflight(evidence.exits)
        or _by_hang(evidence.hang)
        or _by_oom_kill(evidence.exits)
        or _by_slurm(evidence.job_word, evidence.cancelled_by)
        or _by_missing_worker(evidence)
        or _by_signal(evidence.exits)
        or _by_rendezvous(evidence.exits)
        or _by_silence(evidence.exits, evidence.errors)
        or _by_connection(evidence.errors)
        or _by_exit_status(evidence.exits)
        or _without_record(evidence.last_words)
    )


def _by_person(evidence: Evidence) -> Outcome | None:
    """Who cancels a job because its ranks hang, or because it runs out of memory, does not want it back."""
    if evidence.job_word != "CANCELLED":
        return None
    own = _by_own_error(evidence)
    return own if own and own.end is EndReason.USER_ERROR else _by_slurm(evidence.job_word, evidence.cancelled_by)


def _by_own_error(evidence: Evidence) -> Outcome | None:
    """An error that names no cause of its own may be what the kernel's kill of another process left behind."""
    own = next((error for error in evidence.errors if error_end(error) is not EndReason.COMMUNICATION), None)
    if own is None:
        return None
    end, sentence = error_end(own), f"Rank {own.rank} on {own.host} failed: {own.kind}: {own.message}"
    killed = _by_oom_kill(evidence.exits) if end is EndReason.USER_ERROR else None
    return killed or Outcome(end, sentence, own, own.blamed)


def _by_hang(hang: Hang | None) -> Outcome | None:
    return Outcome(EndReason.HANG, hang.sentence, host=hang.host) if hang else None


def _by_oom_kill(exits: Sequence[NodeExit]) -> Outcome | None:
    node = next((node for node in exits if node.oom_kills), None)
    if node is None:
        return None
    sentence = f"The kernel killed {node.oom_kills} process(es) on {node.host}: the job's memory was used up."
    return Outcome(EndReason.HOST_OUT_OF_MEMORY, sentence, host=node.host)


def _by_preflight(exits: Sequence[NodeExit]) -> Outcome | None:
    """A node is to blame only if another node of the same job passed, or there was none to compare with."""
    failed = [node for node in exits if node.phase.endswith("preflight")]
    if not failed:
        return None
    first = failed[0]
    blame_node = first.phase == "preflight" and (len(failed) < len(exits) or len(exits) == 1)
    sentence = f"{first.host} did not pass its checks: {first.message}."
    return Outcome(EndReason.PREFLIGHT, sentence, host=first.host if blame_node else None)


def _by_slurm(word: str, cancelled_by: str) -> Outcome | None:
    end = _BY_WORD.get(word)
    by = f" by {cancelled_by}" if cancelled_by else ""
    return Outcome(end, f"Slurm ended the job: {word}{by}.") if end else None


def _by_missing_worker(evidence: Evidence) -> Outcome | None:
    """Where a worker is killed, Slurm ends those on the other nodes with SIGTERM, as if it preempted them."""
    missing = evidence.nodes - len(evidence.exits)
    if evidence.job_word != "FAILED" or not missing or not any(node.stop_signal for node in evidence.exits):
        return None
    sentence = f"{missing} of {evidence.nodes} nodes left no record, and Slurm ended the others: a worker was killed."
    return Outcome(EndReason.KILLED, sentence)


def _by_signal(exits: Sequence[NodeExit]) -> Outcome | None:
    """A node that failed without having been told to stop makes the signals on the others its echo."""
    if any(node.returncode and not node.stop_signal for node in exits):
        return None
    told = next((node for node in exits if node.stop_signal), None)
    if told is None or told.stop_signal is None:
        return None
    end = _BY_SIGNAL[told.stop_signal]
    return Outcome(end, f"{told.host} was told to stop by {told.stop_signal} ({end.value}).")


def _by_rendezvous(exits: Sequence[NodeExit]) -> Outcome | None:
    failed = [node for node in exits if node.phase == "rendezvous" and node.message]
    # Where one node could not be reached the others only waited; the most telling message is the last node's.
    return Outcome(EndReason.RENDEZVOUS, failed[-1].message, host=failed[-1].blamed) if failed else None


def _by_silence(exits: Sequence[NodeExit], errors: Sequence[RankError]) -> Outcome | None:
    """A node whose ranks ended without a word, while those of others lost their peers, is where it began."""
    told = {error.host for error in errors}
    silent = [node for node in exits if node.returncode and node.host not in told]
    return _by_exit_status(silent) if errors else None


def _by_connection(errors: Sequence[RankError]) -> Outcome | None:
    if not errors:
        return None
    first = errors[0]
    said = first.message.partition("\n")[0]
    return Outcome(EndReason.COMMUNICATION, f"Rank {first.rank} on {first.host} lost its peers: {said}", first)


def _by_exit_status(exits: Sequence[NodeExit]) -> Outcome | None:
    failed = min((node for node in exits if node.returncode or node.message), key=lambda node: node.ended, default=None)
    if failed is None:
        return None
    if failed.message:
        return Outcome(EndReason.KILLED, f"The worker on {failed.host} could not run the ranks: {failed.message}")
    return Outcome(
        EndReason.KILLED,
        f"The ranks on {failed.host} ended with status {failed.returncode} and left no traceback; they were killed, "
        "by the kernel if the node ran out of memory.",
        host=failed.host,
    )


def _without_record(last_words: str) -> Outcome:
    said = f" The last that Slurm's step printed: {last_words}" if last_words else ""
    return Outcome(EndReason.LOST, f"The job ended and left no record.{said}")


_ACTIONS = {
    EndReason.FINISHED: Action.FINISH,
    EndReason.STOP_REQUESTED: Action.STOP,
    EndReason.TIME_LIMIT: Action.RESUME,
    EndReason.PREEMPTED: Action.RESUME,
    EndReason.CANCELLED: Action.STOP,
    EndReason.NODE_FAILURE: Action.RESUME,
    EndReason.RENDEZVOUS: Action.EXCLUDE_AND_RESUME,
    EndReason.COMMUNICATION: Action.RESUME,
    EndReason.HANG: Action.RESUME,
    EndReason.KILLED: Action.RESUME,
    EndReason.NON_FINITE: Action.STOP,
    EndReason.USER_ERROR: Action.STOP,
    EndReason.LOST: Action.RESUME,
}


@dataclass(frozen=True)
class RetryState:
    """What the story so far says about another attempt."""

    idle_attempts: int
    """Attempts since the newest checkpoint last advanced, the last one included; failed preflights do not count."""
    has_rung: bool
    """The fallbacks has a fallback below that needs less of the memory that ran out."""
    has_memory: bool = False
    """A node has more host RAM than the job had asked for, and the job was killed for reaching what it had."""
    host_hung_before: bool = False
    """The node that held up the others did so in an earlier attempt too."""
    unfit_nodes: int = 0
    """Nodes that failed the preflight, one after the other, up to and with the last attempt."""
    has_others: bool = True
    """There are other nodes to go to."""
    may_rewind: bool = False
    """The run wants to rewind, and this step's loss was never before not finite."""


def decide(outcome: Outcome, history: RetryState, *, cap: int, unfit_cap: int = FAILING_NODES) -> Action:
    """What follows an outcome.

    Args:
        outcome: why the last attempt ended.
        history: what happened before.
        cap: idle attempts after which to stop.
        unfit_cap: nodes that may fail the preflight one after the other; more, and it is not the nodes.
    """
    match outcome.end:
        case EndReason.HOST_OUT_OF_MEMORY if history.has_memory:
            return Action.MORE_MEMORY
        case EndReason.GPU_OUT_OF_MEMORY | EndReason.HOST_OUT_OF_MEMORY:
            return Action.NEXT_FALLBACK if history.has_rung else Action.STOP
        case EndReason.PREFLIGHT:
            others = outcome.host is not None and history.has_others and history.unfit_nodes <= unfit_cap
            return Action.EXCLUDE_AND_RESUME if others else Action.STOP
        case EndReason.NODE_FAILURE if outcome.error:
            action = Action.EXCLUDE_AND_RESUME  # Slurm takes nodes out of use by itself, and knows nothing of this one
        case EndReason.NON_FINITE if history.may_rewind:
            action = Action.RESUME
        case EndReason.HANG if history.host_hung_before:
            action = Action.EXCLUDE_AND_RESUME
        case _:
            action = _ACTIONS[outcome.end]
    resumes = action in (Action.RESUME, Action.EXCLUDE_AND_RESUME)
    return Action.GIVE_UP if resumes and history.idle_attempts >= cap else action

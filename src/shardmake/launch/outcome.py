"""Determine why an attempt ended, and decide what follows: two pure functions over the attempt's records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from shardmake.launch.error_texts import error_end, text_end
from shardmake.launch.service import SERVING, STARTING
from shardmake.launch.slurm_states import FORGOTTEN
from shardmake.launch.step_output import StepFailure
from shardmake.run.attempt import Hang, NodeExit, RankError
from shardmake.run.attempt_history import EndReason


@dataclass(frozen=True)
class Evidence:
    """Everything an attempt left behind."""

    finished: bool
    """The receipt exists."""
    stop_file: bool
    """Somebody created the run's stop file."""
    stopped: bool
    """The ranks saved and stopped because they were asked to."""
    slurm_state: str
    """Slurm's name of the job's last state, or `slurm_states.FORGOTTEN`; empty if there is none."""
    exits: Sequence[NodeExit]
    errors: Sequence[RankError]
    """Earliest first."""
    nodes: int = 1
    """Nodes of the job; a node whose worker is killed leaves no record."""
    service_nodes: int = 0
    """Those of them, the last ones, that run the service."""
    hosts: Sequence[str] = ()
    """Slurm's names of these nodes; empty if unknown."""
    down_hosts: Sequence[str] = ()
    """Those of them that Slurm reports as down or without an answer."""
    damage: str = ""
    """A sentence about the checkpoint, if a node found it damaged and the driver does, too."""
    hang: Hang | None = None
    cancelled_by: str = ""
    """The user who cancelled the job, if Slurm's accounting has the name."""
    container: str | None = None
    """The image of the job's container, if there is one."""
    start_failure: str = ""
    """A line of the output of Slurm's step that says why the container could not start the worker."""
    step_failure: StepFailure | None = None
    """A worker that Slurm could not start or that a signal ended, if Slurm's step reports one."""
    launcher_errors: Mapping[int, str] = field(default_factory=dict)
    """The last exception in the logs of nodes whose ranks reported none, by the node's rank."""
    last_output: str = ""
    """The last line that Slurm's step printed. It often has the reason if no node left a record."""

    @property
    def training_nodes(self) -> int:
        """Return the number of nodes that run ranks, which are the first ones."""
        return self.nodes - self.service_nodes

    @property
    def silent_hosts(self) -> list[str]:
        """Return the nodes that left no exit record, as far as their names are known."""
        return sorted(set(self.hosts) - {node.host for node in self.exits})

    @property
    def killed_worker(self) -> StepFailure | None:
        """Return the worker that a signal ended before it wrote its record, and before Slurm ended the others."""
        found = self.step_failure
        recorded = {node.node_rank for node in self.exits}
        return None if found is None or found.node_rank is None or found.node_rank in recorded else found


@dataclass(frozen=True)
class Outcome:
    """Why the attempt ended."""

    end: EndReason
    message: str
    error: RankError | None = None
    host: str | None = None
    """The node to blame, if there is one."""
    log: int = 0
    """Rank of the node whose log may explain it."""


class Action(Enum):
    """Next step of the driver."""

    FINISH = "finish"
    RESUME = "resume"
    EXCLUDE_AND_RESUME = "exclude the node and resume"
    NEXT_FALLBACK = "take the next fallback"
    MORE_MEMORY = "request all of a node's memory"
    STOP = "stop"
    GIVE_UP = "stop, because there is no progress"


IDLE_ATTEMPTS = 3
"""Idle attempts after which the training stops."""
FAILING_NODES = 5
"""Nodes in a row that may fail the preflight; with more, the run itself is assumed to be at fault."""
_BY_SLURM_STATE = {
    "CANCELLED": EndReason.CANCELLED,
    "TIMEOUT": EndReason.TIME_LIMIT,
    "DEADLINE": EndReason.TIME_LIMIT,
    "PREEMPTED": EndReason.PREEMPTED,
    "NODE_FAIL": EndReason.NODE_FAILURE,
    "BOOT_FAIL": EndReason.NODE_FAILURE,
    "LAUNCH_FAILED": EndReason.NODE_FAILURE,
    "OUT_OF_MEMORY": EndReason.HOST_OUT_OF_MEMORY,
}
NODE_FAILURES = {state for state, end in _BY_SLURM_STATE.items() if end is EndReason.NODE_FAILURE}
"""Slurm's states of a job whose node failed."""
_IMAGE_GONE = "Transport endpoint is not connected"
"""The kernel's message for a file of an image whose FUSE process ended."""
_BY_SIGNAL = {
    "SIGUSR2": (EndReason.TIME_LIMIT, "before the job's time limit"),
    "SIGURG": (EndReason.TIME_LIMIT, "before the job's time limit"),
    "SIGTERM": (EndReason.TERMINATED, "from Slurm before it preempts or ends a job, or from a person"),
    "SIGINT": (EndReason.CANCELLED, "from a person"),
}


def classify(evidence: Evidence) -> Outcome:
    """Return why the attempt ended.

    A person's scancel has priority, unless a rank failed with an error in the training. A damaged checkpoint comes
    next, because it keeps the ranks from training. A service that ended has priority over the ranks' errors, which
    their failed requests cause. A rank's own error has priority over a hang, a hang over Slurm's state, and Slurm's
    state over the connection errors that a dying rank causes on all others. What Slurm's step reports of a worker has
    priority over conclusions from records that are missing.
    """
    if evidence.finished:
        return Outcome(EndReason.FINISHED, "Training finished.")
    if evidence.stop_file and evidence.stopped:
        return Outcome(EndReason.STOP_REQUESTED, "Training saved and stopped because somebody created the stop file.")
    found = (
        _by_person(evidence)
        or _by_checkpoint(evidence)
        or _by_service(evidence)
        or _by_lost_image(evidence)
        or _by_own_error(evidence)
        or _by_preflight(evidence.exits)
        or _by_hang(evidence)
        or _by_oom_kill(evidence.exits)
        or _by_slurm(evidence)
        or _by_step(evidence)
        or _by_missing_worker(evidence)
        or _by_container(evidence)
        or _by_signal(evidence.exits)
        or _by_rendezvous(evidence.exits)
        or _by_killed_ranks(evidence)
        or _by_connection(evidence.errors)
        or _by_exit_status(evidence, evidence.exits)
        or _unknown(evidence)
    )
    late = next((_received(node.host, node.later_signal) for node in evidence.exits if node.later_signal), None)
    return replace(found, message=f"{found.message} After that, {late}") if late else found


def _received(host: str, signal_name: str) -> str:
    return f"{host} received {signal_name}, which comes {_BY_SIGNAL[signal_name][1]}."


def _by_person(evidence: Evidence) -> Outcome | None:
    """A person may cancel a job because it hangs or runs out of memory; it must not come back."""
    if evidence.slurm_state != "CANCELLED":
        return None
    own = _by_own_error(evidence)
    return own if own and own.end is EndReason.USER_ERROR else _by_slurm(evidence)


def _by_checkpoint(evidence: Evidence) -> Outcome | None:
    """Blame a node that read the checkpoint differently than the driver, which found it as recorded."""
    if evidence.damage:
        return Outcome(EndReason.DAMAGED_CHECKPOINT, evidence.damage)
    node = next((node for node in evidence.exits if node.damaged), None)
    if node is None:
        return None
    message = f"{node.host} read the checkpoint differently than the driver, which found it intact: {node.message}."
    return Outcome(EndReason.PREFLIGHT, message, host=node.host)


def _by_service(evidence: Evidence) -> Outcome | None:
    """Recognize a service that did not start or ended before the training; the ranks then fail for lack of it."""
    failed = [node for node in evidence.exits if node.phase in (STARTING, SERVING) and node.message]
    if not failed:
        return _by_missing_service(evidence)
    node = max(failed, key=lambda node: node.node_rank)  # the nodes of the service come last
    if node.stop_signal:
        message = f"{_received(node.host, node.stop_signal)} {node.message}"
        return Outcome(_BY_SIGNAL[node.stop_signal][0], message)
    end = EndReason.SERVICE_START if node.phase == STARTING else EndReason.SERVICE
    memory = f" The kernel killed {node.oom_kills} process(es) on {node.host} because the job ran out of memory."
    return Outcome(end, node.message + memory * bool(node.oom_kills), host=node.host, log=node.node_rank)


def _by_missing_service(evidence: Evidence) -> Outcome | None:
    """Recognize a service whose worker a signal ended, or left no record although all nodes of the ranks did.

    Without Slurm's report of the signal, a failed rank must show that the service was missing.
    """
    killed = evidence.killed_worker
    if killed and killed.node_rank is not None and killed.node_rank >= evidence.training_nodes:
        message = f"The worker of the service on {killed.host} was killed: Slurm's step reports {killed.reason!r}."
        return _by_slurm(evidence) or Outcome(EndReason.KILLED, message, log=killed.node_rank)
    missing = set(range(evidence.nodes)) - {node.node_rank for node in evidence.exits}
    if not missing or min(missing) < evidence.training_nodes or not evidence.errors:
        return None
    where = f" on {', '.join(evidence.silent_hosts)}" if evidence.silent_hosts else ""
    message = f"The worker of the service{where} was killed: it left no exit record, and the ranks failed after that."
    return _by_slurm(evidence) or Outcome(EndReason.KILLED, message, log=evidence.training_nodes)


def _by_lost_image(evidence: Evidence) -> Outcome | None:
    """Recognize that SIGTERM ended the process that serves the image: the errors of the ranks are its consequence."""
    node = next((node for node in evidence.exits if node.stop_signal == "SIGTERM"), None)
    own = _by_own_error(evidence)
    if evidence.container is None or node is None or own is None or own.error is None:
        return None
    if own.end is not EndReason.USER_ERROR and _IMAGE_GONE not in own.error.message:
        return None
    message = (
        f"{_received(node.host, 'SIGTERM')} After that, {own.message[:1].lower()}{own.message[1:]}. "
        "If Apptainer is installed without setuid, SIGTERM also ends squashfuse_ll, which serves a .sif file. The "
        "folder of a sandbox as slurm.container.image needs no such process."
    )
    return Outcome(_BY_SLURM_STATE.get(evidence.slurm_state, EndReason.TERMINATED), message)


def _by_own_error(evidence: Evidence) -> Outcome | None:
    """Prefer a kill by the kernel over an error in the training, which may be its consequence."""
    own = next((error for error in evidence.errors if error_end(error) is not EndReason.COMMUNICATION), None)
    if own is None:
        return None
    end, message = error_end(own), f"Rank {own.rank} on {own.host} failed: {own.kind}: {own.message}"
    killed = _by_oom_kill(evidence.exits) if end is EndReason.USER_ERROR else None
    return killed or Outcome(end, message, own, own.culprit)


def _by_hang(evidence: Evidence) -> Outcome | None:
    """A hang is the consequence of a failed node, if Slurm reports one and the stacks name no rank of another node."""
    hang = evidence.hang
    failed_node = _BY_SLURM_STATE.get(evidence.slurm_state) is EndReason.NODE_FAILURE
    if hang is None or (failed_node and (hang.rank is None or hang.host in evidence.down_hosts)):
        return None
    return Outcome(EndReason.HANG, hang.message, host=hang.host)


def _by_oom_kill(exits: Sequence[NodeExit]) -> Outcome | None:
    node = next((node for node in exits if node.oom_kills), None)
    if node is None:
        return None
    message = f"The kernel killed {node.oom_kills} process(es) on {node.host} because the job ran out of memory."
    return Outcome(EndReason.HOST_OUT_OF_MEMORY, message, host=node.host)


def _by_preflight(exits: Sequence[NodeExit]) -> Outcome | None:
    """Blame a node only if another node of the same job passed, or if the job has one node."""
    failed = [node for node in exits if node.phase.endswith("preflight")]
    if not failed:
        return None
    first = failed[0]
    blame_node = first.phase == "preflight" and (len(failed) < len(exits) or len(exits) == 1)
    message = f"{first.host} failed its preflight checks: {first.message}."
    return Outcome(EndReason.PREFLIGHT, message, host=first.host if blame_node else None)


def _by_slurm(evidence: Evidence) -> Outcome | None:
    end = _BY_SLURM_STATE.get(evidence.slurm_state)
    if end is None:
        return None
    by = f" by {evidence.cancelled_by}" if evidence.cancelled_by else ""
    message = f"Slurm ended the job: {evidence.slurm_state}{by}."
    return Outcome(end, f"{message}{_failed_nodes(evidence)}" if end is EndReason.NODE_FAILURE else message)


def _failed_nodes(evidence: Evidence) -> str:
    """Return a sentence that names the failed nodes, or those of the job if none stands out."""
    silent, hosts = evidence.silent_hosts, evidence.hosts
    if evidence.down_hosts:
        return f" Slurm reports {', '.join(evidence.down_hosts)} as down."
    if silent and len(silent) < len(hosts):
        return f" No record came from {', '.join(silent)}."
    return f" It ran on {', '.join(hosts)}." if hosts else ""


def _by_step(evidence: Evidence) -> Outcome | None:
    """Recognize a worker that Slurm could not start or that a signal ended; Slurm then ended all others."""
    failed, killed = evidence.step_failure, evidence.killed_worker
    if failed and failed.node_rank is None:
        return Outcome(
            EndReason.NODE_FAILURE, f"Slurm could not start the worker on {failed.host}: {failed.reason.rstrip('.')}."
        )
    if killed is None:
        return None
    message = f"The worker on {killed.host} was killed: Slurm's step reports {killed.reason!r}."
    return Outcome(EndReason.KILLED, message, log=killed.node_rank or 0)


def _by_missing_worker(evidence: Evidence) -> Outcome | None:
    """Recognize a killed worker: the other nodes lose their peers, or Slurm ends them with SIGTERM.

    Slurm may end the other workers before they write their records. Their ranks then have reported the lost peers.
    """
    missing = evidence.nodes - len(evidence.exits)
    stopped = bool(evidence.errors) or any(node.stop_signal for node in evidence.exits)
    if evidence.slurm_state != "FAILED" or missing <= 0 or not stopped:
        return None
    if not evidence.exits:
        lost = sorted({error.host for error in evidence.errors})
        killed = ", ".join(sorted(set(evidence.hosts) - set(lost)))
        message = (
            f"The worker on {killed} was killed: it left no record, and ranks on {', '.join(lost)} lost their peers."
        )
        return Outcome(EndReason.KILLED, message) if killed else None
    where = f" on {', '.join(evidence.silent_hosts)}" if evidence.silent_hosts else ""
    message = (
        f"The worker{where} was killed: {missing} of {evidence.nodes} nodes left no exit record, and the others ended "
        "after that."
    )
    return Outcome(EndReason.KILLED, message)


def _by_container(evidence: Evidence) -> Outcome | None:
    """Recognize an image without what the worker needs: every node of the job has the same one."""
    if evidence.exits or not evidence.start_failure:
        return None
    return Outcome(EndReason.SETUP, f"The container could not start the worker: {evidence.start_failure}.")


def _by_signal(exits: Sequence[NodeExit]) -> Outcome | None:
    """Ignore the signals if a node failed without one: they are then its consequence."""
    if any(node.returncode and not node.stop_signal for node in exits):
        return None
    stopped = next((node for node in exits if node.stop_signal), None)
    if stopped is None or stopped.stop_signal is None:
        return None
    return Outcome(_BY_SIGNAL[stopped.stop_signal][0], _received(stopped.host, stopped.stop_signal))


def _by_rendezvous(exits: Sequence[NodeExit]) -> Outcome | None:
    failed = [node for node in exits if node.phase == "rendezvous" and node.message]
    # If one node could not be reached, the others only waited, so the last node's message is the most specific.
    return Outcome(EndReason.RENDEZVOUS, failed[-1].message, host=failed[-1].culprit) if failed else None


def _by_killed_ranks(evidence: Evidence) -> Outcome | None:
    """Blame a node whose ranks ended without an error, while the ranks of other nodes lost their peers."""
    reported = {error.host for error in evidence.errors}
    unreported = [node for node in evidence.exits if node.returncode and node.host not in reported]
    return _by_exit_status(evidence, unreported) if evidence.errors else None


def _by_connection(errors: Sequence[RankError]) -> Outcome | None:
    if not errors:
        return None
    first = errors[0]
    line = first.message.partition("\n")[0]
    return Outcome(EndReason.COMMUNICATION, f"Rank {first.rank} on {first.host} lost its peers: {line}", first)


def _by_exit_status(evidence: Evidence, exits: Sequence[NodeExit]) -> Outcome | None:
    failed = min((node for node in exits if node.returncode or node.message), key=lambda node: node.ended, default=None)
    if failed is None:
        return None
    if failed.message:
        return Outcome(EndReason.KILLED, f"The worker on {failed.host} could not start the ranks: {failed.message}")
    if raised := evidence.launcher_errors.get(failed.node_rank):
        end = text_end(raised) or EndReason.KILLED
        return Outcome(end, f"The launcher of the ranks on {failed.host} failed: {raised}", log=failed.node_rank)
    return Outcome(
        EndReason.KILLED,
        f"The ranks on {failed.host} ended with status {failed.returncode} and left no traceback. Most likely they "
        f"were killed, {_KILLERS[failed.oom_kills is None]}.",
        host=failed.host,
    )


_KILLERS = {
    True: "by the kernel if the node ran out of memory",
    False: "and not because memory ran out: the kernel counts no such kill in this job. A person, a program or the "
    "site's limits did, or they crashed",
}
"""By whether the kernel's count of its kills is unknown."""


def _unknown(evidence: Evidence) -> Outcome:
    output = f" The last output of Slurm's step: {evidence.last_output}" if evidence.last_output else ""
    gone = "Slurm does not know the job any more" if evidence.slurm_state == FORGOTTEN else "The reason is unknown"
    return Outcome(EndReason.LOST, f"The job ended. {gone}, and no node left an exit record.{output}")


@dataclass(frozen=True)
class RetryState:
    """Facts from the run's history that decide about another attempt."""

    idle_attempts: int
    """Attempts since the newest checkpoint last advanced, the last one included; failed preflights do not count."""
    has_fallback: bool
    """The plan has a further fallback that needs less of the memory that ran out."""
    has_memory: bool = False
    """A node has more host RAM than the job requested, and the job was killed at its limit."""
    host_failed_alike: bool = False
    """The blamed node ended an earlier attempt for the same reason."""
    failing_nodes: int = 0
    """Attempts in a row that failed the preflight, the last one included."""
    has_other_nodes: bool = True
    has_progress: bool = False
    """An attempt of the run has left a checkpoint, so its service started before."""
    may_rewind: bool = False
    """The run is configured to rewind, and this step's loss was finite in all earlier attempts."""


def decide(outcome: Outcome, state: RetryState) -> Action:
    """Return what follows the ``outcome`` of the last attempt."""
    match outcome.end:
        case EndReason.HOST_OUT_OF_MEMORY if state.has_memory:
            return Action.MORE_MEMORY
        case EndReason.GPU_OUT_OF_MEMORY | EndReason.HOST_OUT_OF_MEMORY:
            return Action.NEXT_FALLBACK if state.has_fallback else Action.STOP
        case EndReason.PREFLIGHT:
            others = outcome.host is not None and state.has_other_nodes and state.failing_nodes <= FAILING_NODES
            return Action.EXCLUDE_AND_RESUME if others else Action.STOP
        case EndReason.FINISHED:
            return Action.FINISH
        case EndReason.STOP_REQUESTED | EndReason.CANCELLED | EndReason.SETUP | EndReason.USER_ERROR:
            return Action.STOP
        case EndReason.SERVICE_START if not state.has_progress:
            return Action.STOP
        case EndReason.NON_FINITE if not state.may_rewind:
            return Action.STOP
    if state.idle_attempts >= IDLE_ATTEMPTS:
        return Action.GIVE_UP
    # Slurm drains failed nodes itself, but cannot detect a failure that only a rank's error shows.
    excludes = (
        outcome.end is EndReason.RENDEZVOUS
        or (outcome.end is EndReason.NODE_FAILURE and outcome.error is not None)
        or (outcome.end in (EndReason.HANG, EndReason.GPU_FAULT) and state.host_failed_alike)
    )
    return Action.EXCLUDE_AND_RESUME if excludes else Action.RESUME

"""Classification of attempts, the decisions that follow, and error texts as users of torch, NCCL, DeepSpeed and Slurm report them."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardmake.launch.error_texts import ERROR_TEXTS, error_advice, error_end, find_error_text
from shardmake.launch.outcome import Action, Evidence, Outcome, RetryState, classify, decide
from shardmake.launch.slurm_states import FORGOTTEN
from shardmake.launch.step_output import StepFailure
from shardmake.run.attempt import Hang, NodeExit, RankError
from shardmake.run.attempt_history import EndReason
from shardmake.run.attempt_history import EndReason as End
from tests.finished_run import make_exit
from tests.unit.wording import Wording


def node(rank: int = 0, **values: object) -> NodeExit:
    return make_exit(rank, **{"returncode": 1} | values)


def service_node(**values: object) -> NodeExit:
    ended = dict(phase="service", returncode=None, message="The service on c2 ended with status 1 before the training.")
    return node(1, **(ended | values))


def error(kind: str, message: str, **changes: object) -> RankError:
    values = {"rank": 0, "host": "c1", "culprit": "c1", "time": 1.0, "traceback": "Traceback ..."} | changes
    return RankError(kind=kind, message=message, **values)  # type: ignore[arg-type]


def evidence(**values: object) -> Evidence:
    base: dict[str, object] = dict(finished=False, stop_file=False, stopped=False, exits=[], errors=[])
    return Evidence(**(base | {"slurm_state": "FAILED"} | values))  # type: ignore[arg-type]


PEER_GONE = error("DistBackendError", "[../gloo/transport/tcp/pair.cc] Connection closed by peer [10.0.0.2]", time=2.0)
STOPPED = node(stop_signal="SIGTERM", returncode=0)
DAMAGED = node(phase="checkpoint", returncode=None, damaged=["a"])
HUNG = Hang(rank=1, host="c2", message="no progress")
LABEL, REFUSED = error("ValueError", "bad label"), error("ConnectionError", "refused")
SAVED = {"slurm_state": "COMPLETED", "stopped": True}
SERVED = {"nodes": 2, "service_nodes": 1}


@pytest.mark.parametrize(("found", "end"), [
    (evidence(finished=True, slurm_state="COMPLETED"), End.FINISHED),
    (evidence(finished=True, slurm_state="NODE_FAIL"), End.FINISHED),
    (evidence(stop_file=True, stopped=True, slurm_state="COMPLETED"), End.STOP_REQUESTED),
    (evidence(slurm_state="TIMEOUT"), End.TIME_LIMIT),
    (evidence(slurm_state="CANCELLED", exits=[node(stop_signal="SIGTERM")]), End.CANCELLED),
    (evidence(slurm_state="PREEMPTED"), End.PREEMPTED),
    (evidence(slurm_state="NODE_FAIL", errors=[PEER_GONE]), End.NODE_FAILURE),
    (evidence(slurm_state="OUT_OF_MEMORY", errors=[PEER_GONE]), End.HOST_OUT_OF_MEMORY),
    (evidence(**SAVED, exits=[node(stop_signal="SIGUSR2", returncode=0)]), End.TIME_LIMIT),
    (evidence(**SAVED, exits=[node(stop_signal="SIGURG", returncode=0)]), End.TIME_LIMIT),
    (evidence(**SAVED, exits=[STOPPED]), End.TERMINATED),
    (evidence(damage="damaged", exits=[DAMAGED], errors=[PEER_GONE]), End.DAMAGED_CHECKPOINT),
    (evidence(damage="damaged", slurm_state="CANCELLED"), End.CANCELLED),
    (evidence(exits=[DAMAGED], errors=[error("NetworkCheckError", "Rank 0 did not join")]), End.PREFLIGHT),
    (evidence(**SAVED, exits=[STOPPED, node(1, stop_signal="SIGTERM", returncode=0)]), End.TERMINATED),
    (evidence(exits=[node(stop_signal="SIGTERM", returncode=-9), node(1, returncode=1)]), End.KILLED),
    (evidence(nodes=2, exits=[STOPPED]), End.KILLED),
    (evidence(nodes=2, slurm_state="PREEMPTED", exits=[STOPPED]), End.PREEMPTED),
    (evidence(nodes=2, slurm_state="COMPLETED", exits=[STOPPED] * 2), End.TERMINATED),
    (evidence(hang=HUNG, exits=[node(returncode=-9), node(1, stop_signal="SIGTERM")]), End.HANG),
    (evidence(hang=HUNG, errors=[PEER_GONE]), End.HANG),
    (evidence(hang=Hang(rank=0, host="c1", message="no progress"), errors=[LABEL]), End.USER_ERROR),
    (evidence(exits=[node(), node(1, returncode=1)], errors=[PEER_GONE]), End.KILLED),
    (evidence(exits=[node(), node(1, returncode=0)], errors=[PEER_GONE]), End.COMMUNICATION),
    (evidence(exits=[node(oom_kills=1)], errors=[PEER_GONE]), End.HOST_OUT_OF_MEMORY),
    (evidence(exits=[node(phase="preflight", returncode=None, message="GPU 1 is in use: 40.0 GiB"), node(1, stop_signal="SIGTERM")]), End.PREFLIGHT),
    (evidence(slurm_state="CANCELLED", cancelled_by="user root"), End.CANCELLED),
    (evidence(slurm_state="CANCELLED", hang=HUNG), End.CANCELLED),
    (evidence(slurm_state="CANCELLED", errors=[error("OutOfMemoryError", "CUDA out of memory")]), End.CANCELLED),
    (evidence(slurm_state="CANCELLED", errors=[LABEL]), End.USER_ERROR),
    (evidence(exits=[node(oom_kills=2)], errors=[error("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.")]), End.HOST_OUT_OF_MEMORY),
    (evidence(exits=[node(oom_kills=2)], errors=[error("OutOfMemoryError", "CUDA out of memory")]), End.GPU_OUT_OF_MEMORY),
    (evidence(errors=[error("DistBackendError", "")]), End.COMMUNICATION),
    (evidence(slurm_state="DEADLINE"), End.TIME_LIMIT),
    (evidence(**SERVED, exits=[node(), service_node()], errors=[REFUSED]), End.SERVICE),
    (evidence(**SERVED, exits=[node(returncode=1), service_node(phase="service start")]), End.SERVICE_START),
    (evidence(**SERVED, exits=[node(), service_node(stop_signal="SIGTERM")], errors=[REFUSED]), End.TERMINATED),
    (evidence(**SERVED, slurm_state="CANCELLED", exits=[node(), service_node()]), End.CANCELLED),
    (evidence(**SERVED, exits=[node()], errors=[REFUSED]), End.KILLED),
    (evidence(**SERVED, slurm_state="NODE_FAIL", exits=[node()], errors=[REFUSED]), End.NODE_FAILURE),
    (evidence(**SERVED, exits=[node(), service_node(returncode=0, message="")], errors=[LABEL]), End.USER_ERROR),
    (evidence(**SERVED, exits=[node(phase="preflight", returncode=None, message="GPU 1 is in use"), service_node(returncode=0, message="")]), End.PREFLIGHT),
    (evidence(slurm_state="BOOT_FAIL"), End.NODE_FAILURE),
    (evidence(slurm_state="COMPLETED", exits=[node(started=0.0, ended=150.0, returncode=1)]), End.KILLED),
    (evidence(exits=[node(phase="rendezvous", returncode=None, message="c2 cannot connect")]), End.RENDEZVOUS),
    (evidence(exits=[node(returncode=-9)]), End.KILLED),
    (evidence(exits=[node(returncode=None, message="OSError: no memory to fork")]), End.KILLED),
    (evidence(nodes=2, exits=[node()], errors=[PEER_GONE]), End.KILLED),
    (evidence(slurm_state="NODE_FAIL", hang=Hang(rank=None, host=None, message="no progress")), End.NODE_FAILURE),
    (evidence(slurm_state="NODE_FAIL", hang=HUNG), End.HANG),
    (evidence(exits=[node(returncode=1)], launcher_errors={0: "torch.distributed.DistNetworkError: address already in use"}), End.COMMUNICATION),
    (evidence(exits=[node(returncode=1)], launcher_errors={0: "ImportError: no module named train"}), End.KILLED),
    (evidence(errors=[error("OSError", "[Errno 30] Read-only file system: 'a.pt'")]), End.NODE_FAILURE),
    (evidence(errors=[error("FileNotFoundError", "node-1.json was written by another node and is not visible on this node")]), End.NODE_FAILURE),
    (evidence(), End.LOST),
])  # fmt: skip
def test_classification(found: Evidence, end: End) -> None:
    assert classify(found).end is end


@pytest.mark.parametrize("gone", [
    error("OSError", "[Errno 107] Transport endpoint is not connected: '/usr/lib/python3.11/pickle.py'"),
    error("ModuleNotFoundError", "No module named 'torch.distributed.checkpoint'"),
])  # fmt: skip
def test_ranks_that_lose_their_image_by_sigterm_resume_and_no_node_is_blamed(gone: RankError) -> None:
    values = {"exits": [node(stop_signal="SIGTERM")], "errors": [gone], "container": "/images/train.sif"}
    outcome = classify(evidence(**values))
    assert (outcome.end, outcome.host, outcome.error) == (End.TERMINATED, None, None)
    assert f"After that, rank 0 on c1 failed: {gone.kind}: {gone.message}. If Apptainer" in outcome.message
    assert decide(outcome, RetryState(idle_attempts=1, has_fallback=True)) is Action.RESUME
    assert classify(evidence(**values, slurm_state="PREEMPTED")).end is End.PREEMPTED
    assert classify(evidence(**values | {"container": None})).end is not End.TERMINATED
    assert classify(evidence(**values | {"exits": [node()]})).end is not End.TERMINATED
    full = error("OSError", "[Errno 28] No space left on device")
    assert classify(evidence(**values | {"errors": [full]})).end is End.DISK_FULL


def test_the_cause_is_reported_instead_of_its_consequence() -> None:
    cause = error("ValueError", "token id 9 is out of range", rank=3, time=1.5)
    earlier_consequence = PEER_GONE.model_copy(update={"time": 1.0})
    outcome = classify(evidence(errors=[earlier_consequence, cause], exits=[node(returncode=1)]))
    assert outcome.error == cause
    assert "Rank 3" in outcome.message and "token id 9" in outcome.message


@pytest.mark.parametrize("found", [
    {"slurm_state": "NODE_FAIL", "hosts": ["c1", "c2", "c3"], "exits": [node(0), node(2)]},
    {"errors": [PEER_GONE], "hosts": ["c1", "c2", "c3"], "exits": [node(0), node(2)]},
    {"errors": [PEER_GONE], "hosts": ["c1", "c3"]},
    {"errors": [PEER_GONE, PEER_GONE.model_copy(update={"host": "c3"})], "hosts": ["c1", "c3"]},
    {"slurm_state": "NODE_FAIL", "hosts": ["c1", "c2"]},
    {"slurm_state": "NODE_FAIL", "hosts": ["c1", "c2"], "exits": [node(0), node(1)], "down_hosts": ["c2"]},
], ids=["failed", "killed", "all killed", "connection", "silent", "down"])  # fmt: skip
def test_nodes_without_a_record_are_named(found: dict[str, list[str]], wording: Wording) -> None:
    outcome = classify(evidence(nodes=len(found["hosts"]), **found))
    wording(f"{outcome.end}: {outcome.message}")


@pytest.mark.parametrize("found", [
    {"service_nodes": 1, "errors": [error("URLError", "refused")]}, {"exits": [node(0)], "errors": [PEER_GONE]},
    {"errors": [error("ValueError", "bad label")]}, {"slurm_state": "NODE_FAIL"}, {"exits": [node(2, returncode=-9)]},
    {"step_failure": StepFailure("c2", "Socket timed out on send/recv operation", None), "last_output": "Killed"},
], ids=["service", "training", "error", "node", "record", "not started"])  # fmt: skip
def test_a_worker_that_slurms_step_reports_as_killed_is_named(found: dict[str, object], wording: Wording) -> None:
    """Unless an error or its record has the reason, or Slurm could not start it."""
    outcome = classify(evidence(**{"nodes": 3, "step_failure": StepFailure("c3", "Killed", 2)} | found))
    wording(f"{outcome.end}, log {outcome.log}: {outcome.message}")
    assert outcome.end is not End.NODE_FAILURE or decide(outcome, state()) is Action.RESUME


WAITED = node(phase="rendezvous", returncode=None, message="Node 1 did not connect", culprit="c2")
OLD_TORCH = {"phase": "preflight", "message": "old torch"}
NOT_JOINED = error("NetworkCheckError", "Rank 3 did not join: timeout", culprit=None)


@pytest.mark.parametrize(("found", "end", "host"), [
    ({"exits": [node(1, **OLD_TORCH), node(0, returncode=0)]}, End.PREFLIGHT, "c2"),
    ({"exits": [node(0, **OLD_TORCH)]}, End.PREFLIGHT, "c1"),
    ({"exits": [node(0, **OLD_TORCH), node(1, **OLD_TORCH)]}, End.PREFLIGHT, None),
    ({"exits": [node(0, phase="run preflight", message="no room"), node(1, returncode=0)]}, End.PREFLIGHT, None),
    ({"nodes": 2, "exits": [WAITED]}, End.RENDEZVOUS, "c2"),
    ({"nodes": 2, "exits": [WAITED.model_copy(update={"culprit": None})]}, End.RENDEZVOUS, None),
    ({"errors": [NOT_JOINED]}, End.PREFLIGHT, None),
])  # fmt: skip
def test_a_node_is_blamed_if_missing_or_others_pass(found: dict[str, object], end: End, host: str | None) -> None:
    outcome = classify(evidence(**found))
    assert (outcome.end, outcome.host) == (end, host)


def state(**values: object) -> RetryState:
    return RetryState(**(dict(idle_attempts=1, has_fallback=False) | values))  # type: ignore[arg-type]


RESUME, STOP, GIVE_UP, EXCLUDE = Action.RESUME, Action.STOP, Action.GIVE_UP, Action.EXCLUDE_AND_RESUME
FALLBACK, MEMORY = {"has_fallback": True}, {"has_memory": True}
IDLE, REWINDS = {"idle_attempts": 3}, {"may_rewind": True}
DECISIONS: dict[End, list[tuple[dict[str, object], Action]]] = {
    End.FINISHED: [({"idle_attempts": 0}, Action.FINISH)], End.TIME_LIMIT: [(FALLBACK, RESUME)],
    End.PREEMPTED: [({"idle_attempts": 2}, RESUME), (IDLE, GIVE_UP)], End.RENDEZVOUS: [({}, EXCLUDE)],
    End.GPU_OUT_OF_MEMORY: [({"idle_attempts": 5} | FALLBACK, Action.NEXT_FALLBACK), ({}, STOP), (MEMORY, STOP)],
    End.HOST_OUT_OF_MEMORY: [(FALLBACK, Action.NEXT_FALLBACK), (FALLBACK | MEMORY, Action.MORE_MEMORY), ({}, STOP)],
    End.USER_ERROR: [(FALLBACK, STOP)], End.CANCELLED: [(FALLBACK, STOP)], End.STOP_REQUESTED: [(FALLBACK, STOP)],
    End.HANG: [({}, RESUME), ({"host_failed_alike": True}, EXCLUDE), (IDLE, GIVE_UP)],
    End.PREFLIGHT: [
        ({"idle_attempts": 9, "failing_nodes": 5}, EXCLUDE), ({"failing_nodes": 6}, STOP),
        ({"failing_nodes": 1, "has_other_nodes": False}, STOP),
    ],
    End.NODE_FAILURE: [({}, RESUME)], End.DISK_FULL: [({}, RESUME), (IDLE, GIVE_UP)], End.TERMINATED: [({}, RESUME)],
    End.SERVICE: [({}, RESUME), (IDLE, GIVE_UP)], End.SERVICE_START: [({}, STOP), ({"has_progress": True}, RESUME)],
    End.NON_FINITE: [({}, STOP), (REWINDS, RESUME), (REWINDS | IDLE, GIVE_UP)],
}  # fmt: skip


@pytest.mark.parametrize("end", DECISIONS)
def test_decision(end: End) -> None:
    for before, action in DECISIONS[end]:
        assert decide(Outcome(end, "why", host="c2"), state(**before)) is action, before
        if end is End.PREFLIGHT:
            assert decide(Outcome(end, "no node is to blame"), state(**before)) is STOP


@pytest.mark.parametrize("found", [
    {"exits": [node(oom_kills=0)]}, {"exits": [node()]}, {"exits": [node(later_signal="SIGUSR2")]},
    {"slurm_state": FORGOTTEN}, {"slurm_state": "CANCELLED", "cancelled_by": "user root"},
    {"last_output": "Task launch failed on node c2"},
    {"nodes": 2, "service_nodes": 1, "exits": [node(), service_node(oom_kills=1)]},
], ids=["no kill", "exit", "signal", "forgotten", "cancelled", "launch", "service"])  # fmt: skip
def test_what_is_known_and_what_is_assumed_is_said(found: dict[str, object], wording: Wording) -> None:
    outcome = classify(evidence(**found))
    wording(outcome.message)
    assert (outcome.host, outcome.log) == ("c2", 1) or "service_nodes" not in found


@given(end=st.sampled_from(End), has=st.tuples(*[st.booleans()] * 4))
def test_no_outcome_is_retried_forever(end: End, has: tuple[bool, ...]) -> None:
    """Without progress, the driver takes the next fallback, requests all memory once, or stops."""
    fallback, memory, hung, rewind = has
    before = state(
        idle_attempts=3, has_fallback=fallback, has_memory=memory, failing_nodes=6, host_failed_alike=hung,
        may_rewind=rewind,
    )  # fmt: skip
    action = decide(Outcome(end, "why", host="c2"), before)
    more = [*[Action.NEXT_FALLBACK] * fallback, *[Action.MORE_MEMORY] * memory]
    assert action in (Action.STOP, Action.GIVE_UP, Action.FINISH, *more)


GPU, HOST, SETUP = EndReason.GPU_OUT_OF_MEMORY, EndReason.HOST_OUT_OF_MEMORY, EndReason.SETUP
FAULT, NODE, PEERS = EndReason.GPU_FAULT, EndReason.NODE_FAILURE, EndReason.COMMUNICATION
TABLE: dict[str, list[list[str]]] = yaml.safe_load(Path(__file__).with_name("error_texts.yaml").read_text())
CASES = [(kind, message, EndReason[end]) for end, rows in TABLE.items() for kind, message in rows]


PINNED = error("AcceleratorError", "CUDA error: out of memory", traceback=(
    'Traceback:\n  File "stage3.py", line 9, in __init__\n  File "cuda_accelerator.py", line 296, in pin_memory\n    return ...'
))  # fmt: skip
"""DeepSpeed pins host memory for offload."""


def test_every_pattern_has_a_case() -> None:
    errors = [error(kind, message) for kind, message, _ in CASES]
    assert {known for one in (*errors, PINNED) if (known := find_error_text(one))} == set(ERROR_TEXTS)


def test_memory_that_cannot_be_pinned_is_host_memory() -> None:
    assert error_end(PINNED) is HOST
    assert error_end(PINNED.model_copy(update={"traceback": 'File "pin_memory.py"\n  File "x.py"'})) is GPU


def test_an_unsuitable_setup_comes_with_advice_of_its_own() -> None:
    advice = {known.advice for known in ERROR_TEXTS if known.end is SETUP}
    assert "" not in advice and len(advice) == sum(known.end is SETUP for known in ERROR_TEXTS)
    assert "ulimit -l" in error_advice(error("RuntimeError", "fi_mr_reg failed, ret is:-12, Cannot allocate memory"))
    assert error_advice(error("ValueError", "labels are missing")) == ""


ACTIONS = {
    GPU: (Action.NEXT_FALLBACK, Action.NEXT_FALLBACK), HOST: (Action.NEXT_FALLBACK, Action.NEXT_FALLBACK),
    SETUP: (Action.STOP, Action.STOP), FAULT: (Action.RESUME, Action.EXCLUDE_AND_RESUME),
    NODE: (Action.EXCLUDE_AND_RESUME, Action.EXCLUDE_AND_RESUME), PEERS: (Action.RESUME, Action.RESUME),
    EndReason.PREFLIGHT: (Action.EXCLUDE_AND_RESUME, Action.EXCLUDE_AND_RESUME),
    EndReason.DISK_FULL: (Action.RESUME, Action.RESUME), EndReason.NON_FINITE: (Action.STOP, Action.STOP),
    EndReason.USER_ERROR: (Action.STOP, Action.STOP),
}  # fmt: skip
"""Actions after a text: for the first time, and for the second time on the same node."""


@pytest.mark.parametrize(("kind", "message", "end"), CASES, ids=lambda value: str(value)[:40])
def test_a_text_indicates_its_cause_and_the_driver_answers_it(kind: str, message: str, end: EndReason) -> None:
    assert error_end(error(kind, message)) is end
    outcome = classify(evidence(errors=[error(kind, message)]))
    assert outcome.end is end
    for failed_alike, action in zip((False, True), ACTIONS[end], strict=True):
        before = state(has_fallback=True, failing_nodes=1, host_failed_alike=failed_alike)
        assert decide(outcome, before) is action

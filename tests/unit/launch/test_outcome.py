"""Classification of attempts and the decisions that follow, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.launch.outcome import Action, Evidence, Outcome, RetryState, classify, decide
from shardmake.launch.slurm_states import FORGOTTEN
from shardmake.launch.step_output import StepFailure
from shardmake.run.attempt import Hang, NodeExit, RankError
from shardmake.run.attempt_history import EndReason
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


@pytest.mark.parametrize(("found", "end"), [
    (evidence(finished=True, slurm_state="COMPLETED"), EndReason.FINISHED),
    (evidence(finished=True, slurm_state="NODE_FAIL"), EndReason.FINISHED),
    (evidence(stop_file=True, stopped=True, slurm_state="COMPLETED"), EndReason.STOP_REQUESTED),
    (evidence(slurm_state="TIMEOUT"), EndReason.TIME_LIMIT),
    (evidence(slurm_state="CANCELLED", exits=[node(stop_signal="SIGTERM")]), EndReason.CANCELLED),
    (evidence(slurm_state="PREEMPTED"), EndReason.PREEMPTED),
    (evidence(slurm_state="NODE_FAIL", errors=[PEER_GONE]), EndReason.NODE_FAILURE),
    (evidence(slurm_state="OUT_OF_MEMORY", errors=[PEER_GONE]), EndReason.HOST_OUT_OF_MEMORY),
    (evidence(slurm_state="COMPLETED", stopped=True, exits=[node(stop_signal="SIGUSR2", returncode=0)]), EndReason.TIME_LIMIT),
    (evidence(slurm_state="COMPLETED", stopped=True, exits=[node(stop_signal="SIGURG", returncode=0)]), EndReason.TIME_LIMIT),
    (evidence(slurm_state="COMPLETED", stopped=True, exits=[node(stop_signal="SIGTERM", returncode=0)]), EndReason.TERMINATED),
    (evidence(damage="checkpoint-20 is damaged", exits=[node(phase="checkpoint", returncode=None, damaged=["a"])], errors=[PEER_GONE]), EndReason.DAMAGED_CHECKPOINT),
    (evidence(damage="checkpoint-20 is damaged", slurm_state="CANCELLED"), EndReason.CANCELLED),
    (evidence(exits=[node(phase="checkpoint", returncode=None, damaged=["a"])], errors=[error("NetworkCheckError", "Rank 0 did not join")]), EndReason.PREFLIGHT),
    (evidence(slurm_state="COMPLETED", stopped=True, exits=[node(stop_signal="SIGTERM", returncode=0), node(1, stop_signal="SIGTERM", returncode=0)]), EndReason.TERMINATED),
    (evidence(exits=[node(stop_signal="SIGTERM", returncode=-9), node(1, returncode=1)]), EndReason.KILLED),
    (evidence(nodes=2, exits=[node(stop_signal="SIGTERM", returncode=0)]), EndReason.KILLED),
    (evidence(nodes=2, slurm_state="PREEMPTED", exits=[node(stop_signal="SIGTERM", returncode=0)]), EndReason.PREEMPTED),
    (evidence(nodes=2, slurm_state="COMPLETED", exits=[node(stop_signal="SIGTERM", returncode=0)] * 2), EndReason.TERMINATED),
    (evidence(hang=Hang(rank=1, host="c2", message="no progress"), exits=[node(returncode=-9), node(1, stop_signal="SIGTERM")]), EndReason.HANG),
    (evidence(hang=Hang(rank=1, host="c2", message="no progress"), errors=[PEER_GONE]), EndReason.HANG),
    (evidence(hang=Hang(rank=0, host="c1", message="no progress"), errors=[error("ValueError", "bad label")]), EndReason.USER_ERROR),
    (evidence(exits=[node(), node(1, returncode=1)], errors=[PEER_GONE]), EndReason.KILLED),
    (evidence(exits=[node(), node(1, returncode=0)], errors=[PEER_GONE]), EndReason.COMMUNICATION),
    (evidence(exits=[node(oom_kills=1)], errors=[PEER_GONE]), EndReason.HOST_OUT_OF_MEMORY),
    (evidence(exits=[node(phase="preflight", returncode=None, message="GPU 1 is in use: 40.0 GiB"), node(1, stop_signal="SIGTERM")]), EndReason.PREFLIGHT),
    (evidence(slurm_state="CANCELLED", cancelled_by="user root"), EndReason.CANCELLED),
    (evidence(slurm_state="CANCELLED", hang=Hang(rank=1, host="c2", message="no progress")), EndReason.CANCELLED),
    (evidence(slurm_state="CANCELLED", errors=[error("OutOfMemoryError", "CUDA out of memory")]), EndReason.CANCELLED),
    (evidence(slurm_state="CANCELLED", errors=[error("ValueError", "bad label")]), EndReason.USER_ERROR),
    (evidence(exits=[node(oom_kills=2)], errors=[error("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.")]), EndReason.HOST_OUT_OF_MEMORY),
    (evidence(exits=[node(oom_kills=2)], errors=[error("OutOfMemoryError", "CUDA out of memory")]), EndReason.GPU_OUT_OF_MEMORY),
    (evidence(errors=[error("DistBackendError", "")]), EndReason.COMMUNICATION),
    (evidence(slurm_state="DEADLINE"), EndReason.TIME_LIMIT),
    (evidence(nodes=2, service_nodes=1, exits=[node(), service_node()], errors=[error("ConnectionError", "refused")]), EndReason.SERVICE),
    (evidence(nodes=2, service_nodes=1, exits=[node(returncode=1), service_node(phase="service start")]), EndReason.SERVICE_START),
    (evidence(nodes=2, service_nodes=1, exits=[node(), service_node(stop_signal="SIGTERM")], errors=[error("ConnectionError", "refused")]), EndReason.TERMINATED),
    (evidence(nodes=2, service_nodes=1, slurm_state="CANCELLED", exits=[node(), service_node()]), EndReason.CANCELLED),
    (evidence(nodes=2, service_nodes=1, exits=[node()], errors=[error("ConnectionError", "refused")]), EndReason.KILLED),
    (evidence(nodes=2, service_nodes=1, slurm_state="NODE_FAIL", exits=[node()], errors=[error("ConnectionError", "refused")]), EndReason.NODE_FAILURE),
    (evidence(nodes=2, service_nodes=1, exits=[node(), service_node(returncode=0, message="")], errors=[error("ValueError", "bad label")]), EndReason.USER_ERROR),
    (evidence(nodes=2, service_nodes=1, exits=[node(phase="preflight", returncode=None, message="GPU 1 is in use"), service_node(returncode=0, message="")]), EndReason.PREFLIGHT),
    (evidence(slurm_state="BOOT_FAIL"), EndReason.NODE_FAILURE),
    (evidence(slurm_state="COMPLETED", exits=[node(started=0.0, ended=150.0, returncode=1)]), EndReason.KILLED),
    (evidence(exits=[node(phase="rendezvous", returncode=None, message="c2 cannot connect")]), EndReason.RENDEZVOUS),
    (evidence(exits=[node(returncode=-9)]), EndReason.KILLED),
    (evidence(exits=[node(returncode=None, message="OSError: no memory to fork")]), EndReason.KILLED),
    (evidence(nodes=2, exits=[node()], errors=[PEER_GONE]), EndReason.KILLED),
    (evidence(slurm_state="NODE_FAIL", hang=Hang(rank=None, host=None, message="no progress")), EndReason.NODE_FAILURE),
    (evidence(slurm_state="NODE_FAIL", hang=Hang(rank=1, host="c2", message="no progress")), EndReason.HANG),
    (evidence(exits=[node(returncode=1)], launcher_errors={0: "torch.distributed.DistNetworkError: address already in use"}), EndReason.COMMUNICATION),
    (evidence(exits=[node(returncode=1)], launcher_errors={0: "ImportError: no module named train"}), EndReason.KILLED),
    (evidence(errors=[error("OSError", "[Errno 30] Read-only file system: 'a.pt'")]), EndReason.NODE_FAILURE),
    (evidence(errors=[error("FileNotFoundError", "node-1.json was written by another node and is not visible on this node")]), EndReason.NODE_FAILURE),
    (evidence(), EndReason.LOST),
])  # fmt: skip
def test_classification(found: Evidence, end: EndReason) -> None:
    assert classify(found).end is end


@pytest.mark.parametrize("gone", [
    error("OSError", "[Errno 107] Transport endpoint is not connected: '/usr/lib/python3.11/pickle.py'"),
    error("ModuleNotFoundError", "No module named 'torch.distributed.checkpoint'"),
])  # fmt: skip
def test_ranks_that_lose_their_image_by_sigterm_resume_and_no_node_is_blamed(gone: RankError) -> None:
    values = {"exits": [node(stop_signal="SIGTERM")], "errors": [gone], "container": "/images/train.sif"}
    outcome = classify(evidence(**values))
    assert (outcome.end, outcome.host, outcome.error) == (EndReason.TERMINATED, None, None)
    assert f"After that, rank 0 on c1 failed: {gone.kind}: {gone.message}. If Apptainer" in outcome.message
    assert decide(outcome, RetryState(idle_attempts=1, has_fallback=True)) is Action.RESUME
    assert classify(evidence(**values, slurm_state="PREEMPTED")).end is EndReason.PREEMPTED
    assert classify(evidence(**values | {"container": None})).end is not EndReason.TERMINATED
    assert classify(evidence(**values | {"exits": [node()]})).end is not EndReason.TERMINATED
    full = error("OSError", "[Errno 28] No space left on device")
    assert classify(evidence(**values | {"errors": [full]})).end is EndReason.DISK_FULL


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
    assert outcome.end is not EndReason.NODE_FAILURE or decide(outcome, state()) is Action.RESUME


WAITED = node(phase="rendezvous", returncode=None, message="Node 1 did not connect", culprit="c2")
OLD_TORCH = {"phase": "preflight", "message": "old torch"}
NOT_JOINED = error("NetworkCheckError", "Rank 3 did not join: timeout", culprit=None)


@pytest.mark.parametrize(("found", "end", "host"), [
    ({"exits": [node(1, **OLD_TORCH), node(0, returncode=0)]}, EndReason.PREFLIGHT, "c2"),
    ({"exits": [node(0, **OLD_TORCH)]}, EndReason.PREFLIGHT, "c1"),
    ({"exits": [node(0, **OLD_TORCH), node(1, **OLD_TORCH)]}, EndReason.PREFLIGHT, None),
    ({"exits": [node(0, phase="run preflight", message="no room"), node(1, returncode=0)]}, EndReason.PREFLIGHT, None),
    ({"nodes": 2, "exits": [WAITED]}, EndReason.RENDEZVOUS, "c2"),
    ({"nodes": 2, "exits": [WAITED.model_copy(update={"culprit": None})]}, EndReason.RENDEZVOUS, None),
    ({"errors": [NOT_JOINED]}, EndReason.PREFLIGHT, None),
])  # fmt: skip
def test_a_node_is_blamed_if_missing_or_others_pass(found: dict[str, object], end: EndReason, host: str | None) -> None:
    outcome = classify(evidence(**found))
    assert (outcome.end, outcome.host) == (end, host)


def state(**values: object) -> RetryState:
    return RetryState(**(dict(idle_attempts=1, has_fallback=False) | values))  # type: ignore[arg-type]


RESUME, STOP, GIVE_UP, EXCLUDE = Action.RESUME, Action.STOP, Action.GIVE_UP, Action.EXCLUDE_AND_RESUME
FALLBACK, MEMORY = {"has_fallback": True}, {"has_memory": True}
IDLE, REWINDS = {"idle_attempts": 3}, {"may_rewind": True}
DECISIONS: dict[EndReason, list[tuple[dict[str, object], Action]]] = {
    EndReason.FINISHED: [({"idle_attempts": 0}, Action.FINISH)], EndReason.TIME_LIMIT: [(FALLBACK, RESUME)],
    EndReason.PREEMPTED: [({"idle_attempts": 2}, RESUME), (IDLE, GIVE_UP)], EndReason.RENDEZVOUS: [({}, EXCLUDE)],
    EndReason.GPU_OUT_OF_MEMORY: [({"idle_attempts": 5} | FALLBACK, Action.NEXT_FALLBACK), ({}, STOP), (MEMORY, STOP)],
    EndReason.HOST_OUT_OF_MEMORY: [
        (FALLBACK, Action.NEXT_FALLBACK), (FALLBACK | MEMORY, Action.MORE_MEMORY), ({}, STOP),
    ],
    EndReason.USER_ERROR: [(FALLBACK, STOP)], EndReason.CANCELLED: [(FALLBACK, STOP)],
    EndReason.STOP_REQUESTED: [(FALLBACK, STOP)],
    EndReason.HANG: [({}, RESUME), ({"host_failed_alike": True}, EXCLUDE), (IDLE, GIVE_UP)],
    EndReason.PREFLIGHT: [
        ({"idle_attempts": 9, "failing_nodes": 5}, EXCLUDE), ({"failing_nodes": 6}, STOP),
        ({"failing_nodes": 1, "has_other_nodes": False}, STOP),
    ],
    EndReason.NODE_FAILURE: [({}, RESUME)], EndReason.DISK_FULL: [({}, RESUME), (IDLE, GIVE_UP)],
    EndReason.TERMINATED: [({}, RESUME)], EndReason.SERVICE: [({}, RESUME), (IDLE, GIVE_UP)],
    EndReason.SERVICE_START: [({}, STOP), ({"has_progress": True}, RESUME)],
    EndReason.NON_FINITE: [({}, STOP), (REWINDS, RESUME), (REWINDS | IDLE, GIVE_UP)],
}  # fmt: skip


@pytest.mark.parametrize("end", DECISIONS)
def test_decision(end: EndReason) -> None:
    for before, action in DECISIONS[end]:
        assert decide(Outcome(end, "why", host="c2"), state(**before)) is action, before
        if end is EndReason.PREFLIGHT:
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


@given(end=st.sampled_from(EndReason), has=st.tuples(*[st.booleans()] * 4))
def test_no_outcome_is_retried_forever(end: EndReason, has: tuple[bool, ...]) -> None:
    """Without progress, the driver takes the next fallback, requests all memory once, or stops."""
    fallback, memory, hung, rewind = has
    before = state(
        idle_attempts=3, has_fallback=fallback, has_memory=memory, failing_nodes=6, host_failed_alike=hung,
        may_rewind=rewind,
    )  # fmt: skip
    action = decide(Outcome(end, "why", host="c2"), before)
    more = [*[Action.NEXT_FALLBACK] * fallback, *[Action.MORE_MEMORY] * memory]
    assert action in (Action.STOP, Action.GIVE_UP, Action.FINISH, *more)

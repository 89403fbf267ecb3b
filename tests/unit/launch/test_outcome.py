"""Why an attempt ended, and what follows, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.launch.outcome import Action, Evidence, Outcome, RetryState, classify, decide
from shardmake.run.attempt import Hang, NodeExit, RankError
from shardmake.run.attempt_history import EndReason


def node(rank: int = 0, **values: object) -> NodeExit:
    base = dict(
        node_rank=rank, host=f"c{rank + 1}", started=0.0, ended=9.0, phase="training", returncode=1, stop_signal=None
    )
    return NodeExit.model_validate(base | values)


def error(kind: str, message: str, rank: int = 0, time: float = 1.0) -> RankError:
    return RankError(
        rank=rank, host="c1", blamed="c1", time=time, kind=kind, message=message, traceback="Traceback ..."
    )


def evidence(**values: object) -> Evidence:
    base: dict[str, object] = dict(
        finished=False, stop_file=False, stopped=False, job_word="FAILED", exits=[], errors=[]
    )
    return Evidence(**(base | values))  # type: ignore[arg-type]


PEER_GONE = error("DistBackendError", "[../gloo/transport/tcp/pair.cc] Connection closed by peer [10.0.0.2]", 0, 2.0)


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (evidence(finished=True, job_word="COMPLETED"), EndReason.FINISHED),
        (evidence(finished=True, job_word="NODE_FAIL"), EndReason.FINISHED),
        (evidence(stop_file=True, stopped=True, job_word="COMPLETED"), EndReason.STOP_REQUESTED),
        (evidence(job_word="TIMEOUT"), EndReason.TIME_LIMIT),
        (evidence(job_word="CANCELLED", exits=[node(stop_signal="SIGTERM")]), EndReason.CANCELLED),
        (evidence(job_word="PREEMPTED"), EndReason.PREEMPTED),
        (evidence(job_word="NODE_FAIL", errors=[PEER_GONE]), EndReason.NODE_FAILURE),
        (evidence(job_word="OUT_OF_MEMORY", errors=[PEER_GONE]), EndReason.HOST_OUT_OF_MEMORY),
        (evidence(job_word="COMPLETED", stopped=True, exits=[node(stop_signal="SIGUSR2", returncode=0)]), EndReason.TIME_LIMIT),
        (evidence(job_word="COMPLETED", stopped=True, exits=[node(stop_signal="SIGTERM", returncode=0)]), EndReason.PREEMPTED),
        (evidence(errors=[error("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")]), EndReason.GPU_OUT_OF_MEMORY),
        (evidence(errors=[error("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory")]), EndReason.HOST_OUT_OF_MEMORY),
        (evidence(errors=[error("MemoryError", "")]), EndReason.HOST_OUT_OF_MEMORY),
        (evidence(errors=[PEER_GONE]), EndReason.COMMUNICATION),
        (evidence(errors=[error("ValueError", "labels are missing")]), EndReason.USER_ERROR),
        (evidence(job_word="COMPLETED", stopped=True, exits=[node(stop_signal="SIGTERM", returncode=0), node(1, stop_signal="SIGTERM", returncode=0)]), EndReason.PREEMPTED),
        (evidence(exits=[node(stop_signal="SIGTERM", returncode=-9), node(1, returncode=1)]), EndReason.KILLED),
        (evidence(nodes=2, exits=[node(stop_signal="SIGTERM", returncode=0)]), EndReason.KILLED),
        (evidence(nodes=2, job_word="PREEMPTED", exits=[node(stop_signal="SIGTERM", returncode=0)]), EndReason.PREEMPTED),
        (evidence(nodes=2, job_word="COMPLETED", exits=[node(stop_signal="SIGTERM", returncode=0)] * 2), EndReason.PREEMPTED),
        (evidence(hang=Hang(rank=1, host="c2", sentence="no progress"), exits=[node(returncode=-9), node(1, stop_signal="SIGTERM")]), EndReason.HANG),
        (evidence(hang=Hang(rank=1, host="c2", sentence="no progress"), errors=[PEER_GONE]), EndReason.HANG),
        (evidence(hang=Hang(rank=0, host="c1", sentence="no progress"), errors=[error("ValueError", "bad label")]), EndReason.USER_ERROR),
        (evidence(exits=[node(), node(1, returncode=1)], errors=[PEER_GONE]), EndReason.KILLED),
        (evidence(exits=[node(), node(1, returncode=0)], errors=[PEER_GONE]), EndReason.COMMUNICATION),
        (evidence(exits=[node(oom_kills=1)], errors=[PEER_GONE]), EndReason.HOST_OUT_OF_MEMORY),
        (evidence(exits=[node(phase="preflight", returncode=None, message="GPU 1 is in use: 40.0 GiB"), node(1, stop_signal="SIGTERM")]), EndReason.PREFLIGHT),
        (evidence(errors=[error("NetworkCheckError", "Rank(s) [3] did not join: timeout")]), EndReason.PREFLIGHT),
        (evidence(errors=[error("NetworkCheckError", "All ranks joined, but the network check failed: timeout")]), EndReason.COMMUNICATION),
        (evidence(errors=[error("NonFiniteError", "Step 7: the loss of rank 1 is nan.")]), EndReason.NON_FINITE),
        (evidence(job_word="CANCELLED", cancelled_by="user root"), EndReason.CANCELLED),
        (evidence(job_word="CANCELLED", hang=Hang(rank=1, host="c2", sentence="no progress")), EndReason.CANCELLED),
        (evidence(job_word="CANCELLED", errors=[error("OutOfMemoryError", "CUDA out of memory")]), EndReason.CANCELLED),
        (evidence(job_word="CANCELLED", errors=[error("ValueError", "bad label")]), EndReason.USER_ERROR),
        (evidence(exits=[node(oom_kills=2)], errors=[error("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.")]), EndReason.HOST_OUT_OF_MEMORY),
        (evidence(exits=[node(oom_kills=2)], errors=[error("OutOfMemoryError", "CUDA out of memory")]), EndReason.GPU_OUT_OF_MEMORY),
        (evidence(errors=[error("AcceleratorError", "CUDA error: uncorrectable ECC error encountered")]), EndReason.NODE_FAILURE),
        (evidence(errors=[error("OSError", "[Errno 116] Stale file handle: 'train.bin'")]), EndReason.NODE_FAILURE),
        (evidence(errors=[error("DistBackendError", "")]), EndReason.COMMUNICATION),
        (evidence(job_word="DEADLINE"), EndReason.TIME_LIMIT),
        (evidence(job_word="BOOT_FAIL"), EndReason.NODE_FAILURE),
        (evidence(job_word="COMPLETED", exits=[node(started=0.0, ended=150.0, returncode=1)]), EndReason.KILLED),
        (evidence(exits=[node(phase="rendezvous", returncode=None, message="c2 cannot connect")]), EndReason.RENDEZVOUS),
        (evidence(exits=[node(returncode=-9)]), EndReason.KILLED),
        (evidence(exits=[node(returncode=None, message="OSError: no memory to fork")]), EndReason.KILLED),
        (evidence(), EndReason.LOST),
    ],
)  # fmt: skip
def test_why_it_ended(found: Evidence, end: EndReason) -> None:
    assert classify(found).end is end


def test_the_cause_is_named_not_its_echo() -> None:
    cause = error("ValueError", "token id 9 is out of range", rank=3, time=1.5)
    earlier_echo = PEER_GONE.model_copy(update={"time": 1.0})
    outcome = classify(evidence(errors=[earlier_echo, cause], exits=[node(returncode=1)]))
    assert outcome.error == cause
    assert "Rank 3" in outcome.sentence and "token id 9" in outcome.sentence


def test_who_cancelled_and_what_slurm_printed_are_told() -> None:
    assert "CANCELLED by user root" in classify(evidence(job_word="CANCELLED", cancelled_by="user root")).sentence
    assert "Task launch failed on node c2" in classify(evidence(last_words="Task launch failed on node c2")).sentence


@pytest.mark.parametrize(
    ("exits", "host"),
    [
        ([node(1, phase="preflight", message="old torch"), node(0, returncode=0)], "c2"),
        ([node(0, phase="preflight", message="old torch")], "c1"),
        ([node(0, phase="preflight", message="old torch"), node(1, phase="preflight", message="old torch")], None),
        ([node(0, phase="run preflight", message="no room"), node(1, returncode=0)], None),
    ],
)
def test_a_node_is_to_blame_only_where_another_passed(exits: list[NodeExit], host: str | None) -> None:
    assert classify(evidence(exits=exits)).host == host


def history(**values: object) -> RetryState:
    return RetryState(**(dict(idle_attempts=1, has_rung=False) | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "before", "action"),
    [
        (EndReason.FINISHED, history(idle_attempts=0), Action.FINISH),
        (EndReason.TIME_LIMIT, history(has_rung=True), Action.RESUME),
        (EndReason.PREEMPTED, history(idle_attempts=2), Action.RESUME),
        (EndReason.PREEMPTED, history(idle_attempts=3), Action.GIVE_UP),
        (EndReason.RENDEZVOUS, history(), Action.EXCLUDE_AND_RESUME),
        (EndReason.GPU_OUT_OF_MEMORY, history(idle_attempts=5, has_rung=True), Action.NEXT_FALLBACK),
        (EndReason.GPU_OUT_OF_MEMORY, history(), Action.STOP),
        (EndReason.GPU_OUT_OF_MEMORY, history(has_memory=True), Action.STOP),
        (EndReason.HOST_OUT_OF_MEMORY, history(has_rung=True), Action.NEXT_FALLBACK),
        (EndReason.HOST_OUT_OF_MEMORY, history(has_rung=True, has_memory=True), Action.MORE_MEMORY),
        (EndReason.HOST_OUT_OF_MEMORY, history(), Action.STOP),
        (EndReason.USER_ERROR, history(has_rung=True), Action.STOP),
        (EndReason.CANCELLED, history(has_rung=True), Action.STOP),
        (EndReason.STOP_REQUESTED, history(has_rung=True), Action.STOP),
        (EndReason.HANG, history(), Action.RESUME),
        (EndReason.HANG, history(host_hung_before=True), Action.EXCLUDE_AND_RESUME),
        (EndReason.HANG, history(idle_attempts=3), Action.GIVE_UP),
        (EndReason.PREFLIGHT, history(idle_attempts=9, unfit_nodes=5), Action.EXCLUDE_AND_RESUME),
        (EndReason.PREFLIGHT, history(unfit_nodes=6), Action.STOP),
        (EndReason.PREFLIGHT, history(unfit_nodes=1, has_others=False), Action.STOP),
        (EndReason.NODE_FAILURE, history(), Action.RESUME),
        (EndReason.NON_FINITE, history(), Action.STOP),
        (EndReason.NON_FINITE, history(may_rewind=True), Action.RESUME),
        (EndReason.NON_FINITE, history(may_rewind=True, idle_attempts=3), Action.GIVE_UP),
    ],
)  # fmt: skip
def test_what_follows(end: EndReason, before: RetryState, action: Action) -> None:
    assert decide(Outcome(end, "why", host="c2"), before, cap=3) is action


def test_who_waited_in_vain_is_not_to_blame() -> None:
    waited = node(phase="rendezvous", returncode=None, message="No word from node(s) [1]", blamed="c2")
    outcome = classify(evidence(nodes=2, exits=[waited]))
    assert (outcome.end, outcome.host) == (EndReason.RENDEZVOUS, "c2")
    assert classify(evidence(nodes=2, exits=[waited.model_copy(update={"blamed": None})])).host is None


def test_a_broken_node_that_a_rank_met_is_left_out() -> None:
    outcome = classify(evidence(errors=[error("AcceleratorError", "CUDA error: uncorrectable ECC error encountered")]))
    assert outcome.host == "c1" and decide(outcome, history(), cap=3) is Action.EXCLUDE_AND_RESUME


def test_who_did_not_come_is_not_mixed_up_with_who_says_so() -> None:
    unknown = error("NetworkCheckError", "Rank(s) [3] did not join: timeout").model_copy(update={"blamed": None})
    outcome = classify(evidence(errors=[unknown]))
    assert (outcome.end, outcome.host) == (EndReason.PREFLIGHT, None)


def test_a_preflight_that_speaks_against_the_run_stops_it() -> None:
    assert decide(Outcome(EndReason.PREFLIGHT, "no room"), history(unfit_nodes=1), cap=3) is Action.STOP


@given(end=st.sampled_from(EndReason), has=st.tuples(*[st.booleans()] * 4))
def test_nothing_goes_on_for_ever(end: EndReason, has: tuple[bool, ...]) -> None:
    """Without progress, the fallbacks gets shorter, the job gets all of the node's memory, once, or the driver stops."""
    fallback, memory, hung, rewind = has
    before = history(
        idle_attempts=3, has_rung=fallback, has_memory=memory, unfit_nodes=6, host_hung_before=hung, may_rewind=rewind
    )
    action = decide(Outcome(end, "why", host="c2"), before, cap=3)
    assert action in (
        Action.STOP, Action.GIVE_UP, Action.FINISH, *[Action.NEXT_FALLBACK] * fallback, *[Action.MORE_MEMORY] * memory
    )  # fmt: skip

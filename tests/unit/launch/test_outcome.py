"""Why an attempt ended, and what follows, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.launch.outcome import Action, Evidence, History, Outcome, classify, decide
from shardmake.run.attempt import Hang, NodeExit, RankError
from shardmake.run.attempt_history import End


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
        (evidence(finished=True, job_word="COMPLETED"), End.FINISHED),
        (evidence(finished=True, job_word="NODE_FAIL"), End.FINISHED),
        (evidence(stop_file=True, stopped=True, job_word="COMPLETED"), End.STOP_REQUESTED),
        (evidence(job_word="TIMEOUT"), End.TIME_LIMIT),
        (evidence(job_word="CANCELLED", exits=[node(stop_signal="SIGTERM")]), End.CANCELLED),
        (evidence(job_word="PREEMPTED"), End.PREEMPTED),
        (evidence(job_word="NODE_FAIL", errors=[PEER_GONE]), End.NODE_FAILURE),
        (evidence(job_word="OUT_OF_MEMORY", errors=[PEER_GONE]), End.HOST_OUT_OF_MEMORY),
        (evidence(job_word="COMPLETED", stopped=True, exits=[node(stop_signal="SIGUSR2", returncode=0)]), End.TIME_LIMIT),
        (evidence(job_word="COMPLETED", stopped=True, exits=[node(stop_signal="SIGTERM", returncode=0)]), End.PREEMPTED),
        (evidence(errors=[error("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")]), End.GPU_OUT_OF_MEMORY),
        (evidence(errors=[error("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory")]), End.HOST_OUT_OF_MEMORY),
        (evidence(errors=[error("MemoryError", "")]), End.HOST_OUT_OF_MEMORY),
        (evidence(errors=[PEER_GONE]), End.COMMUNICATION),
        (evidence(errors=[error("ValueError", "labels are missing")]), End.USER_ERROR),
        (evidence(job_word="COMPLETED", stopped=True, exits=[node(stop_signal="SIGTERM", returncode=0), node(1, stop_signal="SIGTERM", returncode=0)]), End.PREEMPTED),
        (evidence(exits=[node(stop_signal="SIGTERM", returncode=-9), node(1, returncode=1)]), End.KILLED),
        (evidence(nodes=2, exits=[node(stop_signal="SIGTERM", returncode=0)]), End.KILLED),
        (evidence(nodes=2, job_word="PREEMPTED", exits=[node(stop_signal="SIGTERM", returncode=0)]), End.PREEMPTED),
        (evidence(nodes=2, job_word="COMPLETED", exits=[node(stop_signal="SIGTERM", returncode=0)] * 2), End.PREEMPTED),
        (evidence(hang=Hang(rank=1, host="c2", sentence="no progress"), exits=[node(returncode=-9), node(1, stop_signal="SIGTERM")]), End.HANG),
        (evidence(hang=Hang(rank=1, host="c2", sentence="no progress"), errors=[PEER_GONE]), End.HANG),
        (evidence(hang=Hang(rank=0, host="c1", sentence="no progress"), errors=[error("ValueError", "bad label")]), End.USER_ERROR),
        (evidence(exits=[node(), node(1, returncode=1)], errors=[PEER_GONE]), End.KILLED),
        (evidence(exits=[node(), node(1, returncode=0)], errors=[PEER_GONE]), End.COMMUNICATION),
        (evidence(exits=[node(oom_kills=1)], errors=[PEER_GONE]), End.HOST_OUT_OF_MEMORY),
        (evidence(exits=[node(phase="preflight", returncode=None, message="GPU 1 is in use: 40.0 GiB"), node(1, stop_signal="SIGTERM")]), End.PREFLIGHT),
        (evidence(errors=[error("MeetingError", "Rank(s) [3] did not come: timeout")]), End.PREFLIGHT),
        (evidence(errors=[error("MeetingError", "All ranks came, and the network failed them: timeout")]), End.COMMUNICATION),
        (evidence(errors=[error("NonFiniteError", "Step 7: the loss of rank 1 is nan.")]), End.NON_FINITE),
        (evidence(job_word="CANCELLED", cancelled_by="user root"), End.CANCELLED),
        (evidence(job_word="CANCELLED", hang=Hang(rank=1, host="c2", sentence="no progress")), End.CANCELLED),
        (evidence(job_word="CANCELLED", errors=[error("OutOfMemoryError", "CUDA out of memory")]), End.CANCELLED),
        (evidence(job_word="CANCELLED", errors=[error("ValueError", "bad label")]), End.USER_ERROR),
        (evidence(exits=[node(oom_kills=2)], errors=[error("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.")]), End.HOST_OUT_OF_MEMORY),
        (evidence(exits=[node(oom_kills=2)], errors=[error("OutOfMemoryError", "CUDA out of memory")]), End.GPU_OUT_OF_MEMORY),
        (evidence(errors=[error("AcceleratorError", "CUDA error: uncorrectable ECC error encountered")]), End.NODE_FAILURE),
        (evidence(errors=[error("OSError", "[Errno 116] Stale file handle: 'train.bin'")]), End.NODE_FAILURE),
        (evidence(errors=[error("DistBackendError", "")]), End.COMMUNICATION),
        (evidence(job_word="DEADLINE"), End.TIME_LIMIT),
        (evidence(job_word="BOOT_FAIL"), End.NODE_FAILURE),
        (evidence(job_word="COMPLETED", exits=[node(started=0.0, ended=150.0, returncode=1)]), End.KILLED),
        (evidence(exits=[node(phase="rendezvous", returncode=None, message="c2 cannot connect")]), End.RENDEZVOUS),
        (evidence(exits=[node(returncode=-9)]), End.KILLED),
        (evidence(exits=[node(returncode=None, message="OSError: no memory to fork")]), End.KILLED),
        (evidence(), End.LOST),
    ],
)  # fmt: skip
def test_why_it_ended(found: Evidence, end: End) -> None:
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


def history(**values: object) -> History:
    return History(**(dict(idle_attempts=1, has_rung=False) | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "before", "action"),
    [
        (End.FINISHED, history(idle_attempts=0), Action.FINISH),
        (End.TIME_LIMIT, history(has_rung=True), Action.RESUME),
        (End.PREEMPTED, history(idle_attempts=2), Action.RESUME),
        (End.PREEMPTED, history(idle_attempts=3), Action.GIVE_UP),
        (End.RENDEZVOUS, history(), Action.EXCLUDE_AND_RESUME),
        (End.GPU_OUT_OF_MEMORY, history(idle_attempts=5, has_rung=True), Action.NEXT_RUNG),
        (End.GPU_OUT_OF_MEMORY, history(), Action.STOP),
        (End.GPU_OUT_OF_MEMORY, history(has_memory=True), Action.STOP),
        (End.HOST_OUT_OF_MEMORY, history(has_rung=True), Action.NEXT_RUNG),
        (End.HOST_OUT_OF_MEMORY, history(has_rung=True, has_memory=True), Action.MORE_MEMORY),
        (End.HOST_OUT_OF_MEMORY, history(), Action.STOP),
        (End.USER_ERROR, history(has_rung=True), Action.STOP),
        (End.CANCELLED, history(has_rung=True), Action.STOP),
        (End.STOP_REQUESTED, history(has_rung=True), Action.STOP),
        (End.HANG, history(), Action.RESUME),
        (End.HANG, history(host_hung_before=True), Action.EXCLUDE_AND_RESUME),
        (End.HANG, history(idle_attempts=3), Action.GIVE_UP),
        (End.PREFLIGHT, history(idle_attempts=9, unfit_nodes=5), Action.EXCLUDE_AND_RESUME),
        (End.PREFLIGHT, history(unfit_nodes=6), Action.STOP),
        (End.PREFLIGHT, history(unfit_nodes=1, has_others=False), Action.STOP),
        (End.NODE_FAILURE, history(), Action.RESUME),
        (End.NON_FINITE, history(), Action.STOP),
        (End.NON_FINITE, history(may_rewind=True), Action.RESUME),
        (End.NON_FINITE, history(may_rewind=True, idle_attempts=3), Action.GIVE_UP),
    ],
)  # fmt: skip
def test_what_follows(end: End, before: History, action: Action) -> None:
    assert decide(Outcome(end, "why", host="c2"), before, cap=3) is action


def test_who_waited_in_vain_is_not_to_blame() -> None:
    waited = node(phase="rendezvous", returncode=None, message="No word from node(s) [1]", blamed="c2")
    outcome = classify(evidence(nodes=2, exits=[waited]))
    assert (outcome.end, outcome.host) == (End.RENDEZVOUS, "c2")
    assert classify(evidence(nodes=2, exits=[waited.model_copy(update={"blamed": None})])).host is None


def test_a_broken_node_that_a_rank_met_is_left_out() -> None:
    outcome = classify(evidence(errors=[error("AcceleratorError", "CUDA error: uncorrectable ECC error encountered")]))
    assert outcome.host == "c1" and decide(outcome, history(), cap=3) is Action.EXCLUDE_AND_RESUME


def test_who_did_not_come_is_not_mixed_up_with_who_says_so() -> None:
    unknown = error("MeetingError", "Rank(s) [3] did not come: timeout").model_copy(update={"blamed": None})
    outcome = classify(evidence(errors=[unknown]))
    assert (outcome.end, outcome.host) == (End.PREFLIGHT, None)


def test_a_preflight_that_speaks_against_the_run_stops_it() -> None:
    assert decide(Outcome(End.PREFLIGHT, "no room"), history(unfit_nodes=1), cap=3) is Action.STOP


@given(end=st.sampled_from(End), has=st.tuples(*[st.booleans()] * 4))
def test_nothing_goes_on_for_ever(end: End, has: tuple[bool, ...]) -> None:
    """Without progress, the ladder gets shorter, the job gets all of the node's memory, once, or the driver stops."""
    rung, memory, hung, rewind = has
    before = history(
        idle_attempts=3, has_rung=rung, has_memory=memory, unfit_nodes=6, host_hung_before=hung, may_rewind=rewind
    )
    action = decide(Outcome(end, "why", host="c2"), before, cap=3)
    assert action in (
        Action.STOP, Action.GIVE_UP, Action.FINISH, *[Action.NEXT_RUNG] * rung, *[Action.MORE_MEMORY] * memory
    )  # fmt: skip

"""Why an attempt ended, and what follows, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.attempt import NodeExit, RankError
from shardmake.launch.outcome import Action, End, Evidence, Outcome, classify, decide


def node(rank: int = 0, **values: object) -> NodeExit:
    base = dict(
        node_rank=rank, host=f"c{rank + 1}", started=0.0, ended=9.0, phase="training", returncode=1, stop_signal=None
    )
    return NodeExit.model_validate(base | values)


def error(kind: str, message: str, rank: int = 0, time: float = 1.0) -> RankError:
    return RankError(rank=rank, host="c1", time=time, kind=kind, message=message, traceback="Traceback ...")


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


@pytest.mark.parametrize(
    ("end", "idle", "rungs", "action"),
    [
        (End.FINISHED, 0, 0, Action.FINISH),
        (End.TIME_LIMIT, 1, 2, Action.RESUME),
        (End.PREEMPTED, 2, 2, Action.RESUME),
        (End.PREEMPTED, 3, 2, Action.STOP),
        (End.RENDEZVOUS, 1, 0, Action.EXCLUDE_AND_RESUME),
        (End.GPU_OUT_OF_MEMORY, 5, 1, Action.NEXT_RUNG),
        (End.GPU_OUT_OF_MEMORY, 1, 0, Action.STOP),
        (End.USER_ERROR, 1, 4, Action.STOP),
        (End.CANCELLED, 1, 4, Action.STOP),
        (End.STOP_REQUESTED, 1, 4, Action.STOP),
    ],
)
def test_what_follows(end: End, idle: int, rungs: int, action: Action) -> None:
    assert decide(Outcome(end, "why"), idle_attempts=idle, cap=3, rungs_left=rungs) is action


@given(end=st.sampled_from(End), rungs=st.integers(0, 9))
def test_nothing_goes_on_for_ever(end: End, rungs: int) -> None:
    """Without progress, either the ladder gets shorter or the driver stops."""
    action = decide(Outcome(end, "why"), idle_attempts=3, cap=3, rungs_left=rungs)
    assert action in (Action.STOP, Action.FINISH) or (action is Action.NEXT_RUNG and rungs > 0)

"""Error texts as users of torch, NCCL, DeepSpeed and Slurm report them, and the decision that follows each."""

from pathlib import Path

import pytest
import yaml

from shardmake.launch.error_texts import ERROR_TEXTS, error_advice, error_end, find_error_text
from shardmake.launch.outcome import Action, classify, decide
from shardmake.run.attempt_history import EndReason
from tests.unit.launch.test_outcome import error, evidence, state

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

"""A loss or gradient norm that is not finite, seen before anything is saved."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from shardmake.run.attempt_history import may_rewind
from shardmake.train.non_finite import NonFiniteCheck, NonFiniteError
from tests.unit.run.test_attempt_history import attempt_record


def step(tmp_path: Path, guard: NonFiniteCheck, **arguments: Any) -> None:
    state = TrainerState(global_step=7)
    guard.on_step_end(TrainingArguments(str(tmp_path), use_cpu=True, **arguments), state, TrainerControl())


@pytest.mark.parametrize(
    ("losses", "norm", "words"),
    [
        ([1.0, 2.0], 3.0, None),
        ([1.0, 2.0], None, None),
        ([1.0, math.nan], 3.0, "Step 7: the loss of rank 3 is nan"),
        ([math.inf, 1.0], 3.0, "Step 7: the loss of rank 3 is inf"),
        ([1.0, 2.0], math.inf, "Step 7: the gradient norm is inf, though the losses of all ranks are finite"),
    ],
)
def test_the_step_and_the_cause_are_named(
    tmp_path: Path, losses: list[float], norm: float | None, words: str | None
) -> None:
    guard = NonFiniteCheck(rank=3)
    for loss in losses:
        guard.see_loss(torch.tensor(loss))
    guard.see_norm(norm)
    if words is None:
        step(tmp_path, guard)
        return
    with pytest.raises(NonFiniteError, match=words) as error:
        step(tmp_path, guard)
    assert error.value.step == 7


def test_an_overflow_under_loss_scaling_is_no_error(tmp_path: Path) -> None:
    guard = NonFiniteCheck(rank=0)
    guard.see_norm(math.inf)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    arguments.fp16 = True
    guard.on_step_end(arguments, TrainerState(global_step=1), TrainerControl())


def test_a_step_is_rewound_once() -> None:
    assert may_rewind([attempt_record(failed_step=7)])
    assert may_rewind([attempt_record(failed_step=7), attempt_record(failed_step=9)])
    assert not may_rewind([attempt_record(failed_step=7), attempt_record(), attempt_record(failed_step=7)])
    assert not may_rewind([attempt_record()])

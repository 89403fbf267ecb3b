"""A loss or gradient norm that is not finite stops training before anything is saved."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from shardmake.run.attempt_history import may_rewind
from shardmake.train.callbacks.non_finite import NonFiniteCheck, NonFiniteError
from tests.unit.run.test_attempt_history import make_record


@pytest.mark.parametrize(("losses", "norm", "message"), [
    ([1.0, 2.0], 3.0, None), ([1.0, 2.0], None, None), ([1.0, math.nan], 3.0, "Step 7: the loss of rank 3 is nan"),
    ([math.inf, 1.0], 3.0, "Step 7: the loss of rank 3 is inf"),
    ([1.0, 2.0], math.inf, "Step 7: the gradient norm is inf, although the losses of all ranks are finite"),
])  # fmt: skip
def test_error_names_step_and_cause(losses: list[float], norm: float | None, message: str | None) -> None:
    check = NonFiniteCheck(rank=3)
    for loss in losses:
        check.add_loss(torch.tensor(loss))
    check.set_norm(norm)
    with pytest.raises(NonFiniteError, match=message) if message else nullcontext() as error:
        check.on_step_end(SimpleNamespace(fp16=False), TrainerState(global_step=7), TrainerControl())
    assert error is None or error.value.step == 7


def test_overflow_under_loss_scaling_is_no_error_and_a_step_is_rewound_once() -> None:
    check = NonFiniteCheck(rank=0)
    check.set_norm(math.inf)
    check.on_step_end(SimpleNamespace(fp16=True), TrainerState(global_step=1), TrainerControl())
    assert may_rewind([make_record(failed_step=7)])
    assert may_rewind([make_record(failed_step=7), make_record(failed_step=9)])
    assert not may_rewind([make_record(failed_step=7), make_record(), make_record(failed_step=7)])
    assert not may_rewind([make_record()])

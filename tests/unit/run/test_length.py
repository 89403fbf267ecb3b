"""The length of a training is transformers' own, and one that learns nothing is refused with what helps."""

import re
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from shardmake.core.errors import ConfigError
from shardmake.run.length import Length, optimizer_steps, warmup_steps
from tests.unit.plans import make_run

SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")


def length_of(sequences: int, *, is_estimate: bool = False, **changes: Any) -> Length:
    run = make_run(**{"max_steps": None, "epochs": 1.0, **changes})
    return Length(run, 2 * sequences, 30 * sequences, sequences, ranks=2, is_estimate=is_estimate)


@pytest.mark.parametrize(("schedule", "steps", "ratio"), product(SCHEDULES, (1, 2, 3, 20), (0.0, 0.05, 0.5, 1.0)))
def test_only_one_step_of_warm_up_has_no_learning_rate(schedule: str, steps: int, ratio: float) -> None:
    run = make_run(scheduler=schedule, max_steps=steps, warmup_ratio=ratio)
    warmup = warmup_steps(run, steps)
    if schedule != "constant" and ratio < 1:
        assert warmup == TrainingArguments(warmup_steps=ratio, use_cpu=True).get_warmup_steps(steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler: Any = get_scheduler(schedule, optimizer, warmup, steps)
    learns = any(scheduler.lr_lambdas[0](step) > 0 for step in range(steps))
    assert learns == (not (steps == 1 and warmup > 0))


@pytest.mark.parametrize(("epochs", "sequences", "batch", "steps"), [
    (1, 21, 64, 1), (1, 21, 8, 2), (40, 98, 8, 480), (1.5, 25, 8, 5), (0.1, 5, 8, 1), (2, 16, 8, 4),
])  # fmt: skip
def test_each_epoch_has_whole_batches(epochs: float, sequences: int, batch: int, steps: int) -> None:
    assert optimizer_steps(epochs, sequences, batch) == steps


FEW = "each sequence 1.14 times. Set global_batch_size: 4 or less"


@pytest.mark.parametrize(("length", "refusal", "warnings"), [
    (length_of(21, global_batch_size=64), "warm-up). Set global_batch_size: 2.", []),
    (length_of(21, global_batch_size=64, is_estimate=True), "learns nothing", []),
    (length_of(60, global_batch_size=64, is_estimate=True), "", ["learns nothing", "larger than the data of 60 seq"]),
    (length_of(500, max_steps=1, epochs=None), "Set max_steps: 10 or more, or warmup_ratio: 0.", []),
    (length_of(500, max_steps=1, epochs=None, warmup_ratio=0), "", ["only 1 optimizer step. Set max_steps: 10 or"]),
    (length_of(500, max_steps=1, epochs=None, scheduler="constant"), "", ["only 1 optimizer step. "]),
    (length_of(500, learning_rate=10.0), "", ["learning_rate: 10 is more than 1,000 times a usual rate of method"]),
    (length_of(500, learning_rate=10.0, optimizer="sgd"), "", []), (length_of(500), "", []),
    (length_of(500, eval_every_steps=99), "", ["eval_every_steps: 99 is beyond the last of 31 steps"]),
    (length_of(21, global_batch_size=8), "", ["only 2 optimizer steps. Set global_batch_size: 2 or epochs: 5."]),
    (length_of(7, global_batch_size=8), "This training learns nothing", []),
    (length_of(7, global_batch_size=8, epochs=20), FEW, []),
    (length_of(7, global_batch_size=8, epochs=None, max_steps=20), "", [FEW]),
    (length_of(1, global_batch_size=8, epochs=20), "Add data", []), (length_of(1, script="mine.py"), "", []),
    (length_of(3, global_batch_size=8, epochs=20, objective="kto"), "Add data", []),
])  # fmt: skip
def test_a_training_that_learns_little_is_named(length: Length, refusal: str, warnings: list[str]) -> None:
    with pytest.raises(ConfigError, match=re.escape(refusal)) if refusal else nullcontext():
        found = length.check()
        assert len(found) == len(warnings)
        assert all(words in line for words, line in zip(warnings, found, strict=True)), found


def test_the_line_of_the_plan() -> None:
    assert length_of(21, global_batch_size=8, epochs=2).describe() == (
        "42 training examples, 630 tokens in 21 sequences; epochs: 2 is 4 optimizer steps of 8 sequences, each "
        "sequence used 1.52 times, 1 of the steps for warm-up; an epoch leaves out 5 sequences, too few for a batch, "
        "others each time"
    )
    assert "optimizer" not in length_of(21, script="mine.py").describe()

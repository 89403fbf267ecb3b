"""The plan tries a schedule with its arguments."""

from typing import Any

import pytest

from shardmake.core.errors import ConfigError
from shardmake.plan import schedule
from tests.unit.plans import make_run


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "cached_helper", lambda _module, request, _doing: schedule.answer(request))


def check(name: str, arguments: dict[str, Any], **changes: Any) -> str | None:
    changes = {"max_steps": 100, "warmup_ratio": 0.1} | changes
    return schedule.check_schedule(make_run(scheduler=name, scheduler_arguments=arguments, **changes), 40)


def test_the_rates_of_a_sound_schedule_are_stated() -> None:
    assert check("cosine", {}) is None
    assert check("warmup_stable_decay", {"num_decay_steps": 20}) == (
        "scheduler warmup_stable_decay (num_decay_steps: 20): learning rate 0 at the first step, 0.001 at most, "
        "6.16e-06 at the last of 100 steps"
    )
    by_epochs = check("cosine_with_min_lr", {"min_lr_rate": 0.5}, max_steps=None, epochs=2)
    assert by_epochs and "0.000501 at the last of about 40 steps" in by_epochs


@pytest.mark.parametrize(("name", "arguments", "words"), [
    ("warmup_stable_decay", {}, "'num_decay_steps'"),
    ("warmup_stable_decay", {"num_decay_steps": 500}, "0.0009 at most.*these, so it never reaches learning_rate"),
    ("cosine_with_min_lr", {}, "min_lr or min_lr_rate"),
    ("cosine_with_min_lr", {"min_lr_rate": 3}, "0.003 at most.*above learning_rate"),
    ("polynomial", {"powr": 2}, "'powr'"), ("cosine", {"num_cycles": "many"}, "could not convert"),
])  # fmt: skip
def test_arguments_that_do_not_suit_it_are_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler: {name} .*{words}.*Correct scheduler_arguments"):
        check(name, arguments)

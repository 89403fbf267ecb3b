"""Counts in an Accelerate file with which other ranks would start than it says."""

from typing import Any

import pytest

from shardmake.render.comparison import EngineSettings
from shardmake.render.launcher_settings import refuse_counts

FILE = {"num_processes": 4, "num_machines": 1, "machine_rank": 0}


@pytest.mark.parametrize(("changes", "key", "effect"), [
    ({"num_processes": 0}, "num_processes", "`accelerate launch` needs a whole number from 1 on."),
    ({"num_processes": "-2"}, "num_processes", "`accelerate launch` needs a whole number from 1 on."),
    ({"num_processes": 2.5}, "num_processes", "`accelerate launch` needs a whole number from 1 on."),
    ({"num_processes": True}, "num_processes", "`accelerate launch` needs a whole number from 1 on."),
    ({"num_machines": 0}, "num_machines", "`accelerate launch` needs a whole number from 1 on."),
    ({"num_machines": 3}, "num_processes", "Each of the 3 machines starts 1, silently. Write a multiple of 3."),
    ({"machine_rank": 1}, "machine_rank", "The machines are numbered from 0 to 0."),
    ({"main_process_port": 70000}, "main_process_port", "The largest port is 65535."),
])  # fmt: skip
def test_a_count_that_cannot_be_used_is_one_error(changes: dict[str, Any], key: str, effect: str) -> None:
    found = EngineSettings()
    values = FILE | changes
    refuse_counts(values, found)
    assert [(problem.key, problem.value, problem.effect) for problem in found.problems] == [
        (key, (FILE | changes)[key], effect)
    ]
    assert key not in values


@pytest.mark.parametrize("changes", [{}, {"num_machines": "2"}, {"main_process_port": 0}, {"machine_rank": "0"}])
def test_other_counts_pass(changes: dict[str, Any]) -> None:
    found = EngineSettings()
    refuse_counts(FILE | changes, found)
    assert found.problems == []

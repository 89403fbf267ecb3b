"""The table of objectives decides which examples a run may learn from."""

from typing import get_args

import pytest

from shardmake.config import objectives
from shardmake.config.formats import DataFormat
from shardmake.config.objectives import OBJECTIVES, ObjectiveSpec
from shardmake.core.errors import ConfigError
from tests.unit.config.samples import make_run


def test_supervised_fine_tuning_is_the_default_and_reads_every_format() -> None:
    assert make_run().objective == "sft"
    assert set(OBJECTIVES["sft"].data_formats) == set(get_args(DataFormat))


def test_an_unknown_objective_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"runs\.chat\.objective: 'stf' is not allowed\. Did you mean 'sft'"):
        make_run(objective="stf")


def test_data_of_a_format_that_the_objective_does_not_read_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objectives.OBJECTIVES, "sft", ObjectiveSpec("chat only", ("chat",)))
    with pytest.raises(ConfigError, match=r"objective 'sft' cannot learn from data\.format 'text'\. Use chat\."):
        make_run(data={"train": "org/data", "format": "text"})

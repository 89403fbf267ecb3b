"""The record of an engine: planned, found, compared and described."""

import dataclasses
from pathlib import Path
from typing import Annotated

import pytest

from shardmake.core.errors import EngineMismatchError
from shardmake.report.records import Records
from shardmake.report.training_facts import training_facts
from shardmake.run.engine import Engine
from shardmake.run.training_settings import ScriptProgram
from shardmake.train.engine_check import check_engine
from tests.finished_run import SETTINGS, make_run, make_rundir

PLANNED = Engine(engine="deepspeed", zero_stage=3, world_size=2, dtype="float32", offload_optimizer="cpu")


class PipelinedEngine(Engine):
    """An engine with a field that exists in this test only."""

    pipeline_stages: Annotated[int, "pipeline of {} stages"] = 1


def test_a_new_field_is_compared_checked_and_reported(tmp_path: Path) -> None:
    planned, found = (PipelinedEngine(**dict(PLANNED), pipeline_stages=stages) for stages in (4, 2))
    assert planned.differences(found) == {"pipeline_stages": (4, 2)}
    with pytest.raises(EngineMismatchError, match="pipeline_stages: planned 4, found 2"):
        check_engine(found, planned)
    records = Records.read(make_run(), make_rundir(tmp_path))
    script = ScriptProgram(path="train.py", args=[], sha256="e" * 64)
    settings = SETTINGS.model_copy(update={"program": script})
    training = records.training.model_copy(update={"trained": found})
    records = dataclasses.replace(records, run=make_run(script="train.py"), settings=settings, training=training)
    assert training_facts(records)["Engine"] == "DeepSpeed ZeRO-3, optimizer states on cpu, pipeline of 2 stages"


def test_a_value_that_is_not_planned_is_neither_written_nor_compared() -> None:
    names = ["engine", "zero_stage", "world_size", "dtype", "offload_optimizer", "offload_param"]
    assert list(PLANNED.as_json()) == names
    assert PLANNED.differences(PLANNED.model_copy(update={"replicas": 2})) == {}
    assert PLANNED.differences(PLANNED.model_copy(update={"offload_param": "cpu"})) == {"offload_param": (None, "cpu")}

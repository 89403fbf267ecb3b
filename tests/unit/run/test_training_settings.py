"""Packages that the ranks of a training do not import, and the record of its engine."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest

from shardmake.core.atomic import write_json
from shardmake.core.errors import EngineMismatchError
from shardmake.report.records import Records
from shardmake.report.training_facts import training_facts
from shardmake.run.attempt import AttemptDir
from shardmake.run.engine import Engine
from shardmake.run.training_settings import ScriptProgram
from shardmake.train.engine_check import check_engine
from tests.finished_run import SETTINGS, make_run, make_rundir
from tests.unit.plans import make_training_settings

DATA, ALL = ["datasets", "pandas"], ["datasets", "pandas", "deepspeed", "peft"]
RANK = """
import json, sys
from pathlib import Path
from shardmake.train.__main__ import load_program
load_program(Path(sys.argv[1]))
from accelerate.utils import extract_model_from_parallel
import torch
extract_model_from_parallel(torch.nn.Linear(1, 1))
print(json.dumps([name for name in sys.modules if sys.modules[name] is not None]))
"""


@pytest.mark.parametrize(("strategy", "run", "unused"), [
    ("ddp", {}, ALL), ("fsdp", {}, ALL), ("zero3", {}, [*DATA, "peft"]),
    ("ddp", {"method": "lora"}, [*DATA, "deepspeed"]), ("ddp", {"report_to": ["tensorboard"]}, ["deepspeed", "peft"]),
    ("ddp", {"objective": "dpo"}, []), ("ddp", {"trust_remote_code": True}, []), ("ddp", {"script": "train.py"}, []),
])  # fmt: skip
def test_only_packages_that_no_part_of_a_training_uses_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any, run: dict[str, Any], unused: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert make_training_settings(strategy, **{"model": str(tmp_path), **run}).unused_packages == unused


def test_adapters_beside_a_base_model_are_not_left_out(tmp_path: Path) -> None:
    """transformers would load the model without them if PEFT were not installed."""
    assert "peft" not in make_training_settings("ddp", model="org/on-the-hub").unused_packages
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "peft" not in make_training_settings("ddp", model=str(tmp_path)).unused_packages


def test_a_rank_does_not_import_them(tmp_path: Path) -> None:
    settings = make_training_settings("ddp", model=str(tmp_path))
    write_json(AttemptDir(tmp_path).training, settings.as_json())
    done = subprocess.run([sys.executable, "-c", RANK, str(tmp_path)], capture_output=True, text=True, check=True)
    imported = json.loads(done.stdout)
    assert not {*ALL, "boto3", "mlflow", "scipy", "sklearn"} & {*imported}
    assert "shardmake.train.trainer" in imported


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

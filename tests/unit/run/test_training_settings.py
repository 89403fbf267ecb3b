"""Packages that the ranks of a training do not import."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardmake.core.atomic import write_json
from shardmake.run.attempt import AttemptDir
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
    settings = make_training_settings(strategy, **{"model": str(tmp_path), **run})
    assert settings.unused_packages == unused


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

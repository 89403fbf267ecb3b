"""Optimizers and methods are one row each: a new row is found everywhere, and no other file names a row."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import shardmake
from shardmake.config.methods import METHODS
from shardmake.config.models import Method, Optimizer
from shardmake.config.optimizers import OPTIMIZERS, TRIED

PACKAGE = Path(shardmake.__file__).parent
TABLES = ("config/methods.py", "config/optimizers.py")
NAMES = {*METHODS, *OPTIMIZERS} | {name for spec in OPTIMIZERS.values() for name in (spec.optim, spec.fused) if name}
OTHER_MEANINGS = {
    *(
        (path, "lora") for path in ("commands/estimate.py", "config/checks.py", "run/sources.py")
    ),  # the section of a run
    ("launch/gpus.py", "full"),  # the width of a PCIe link
    *((path, "full") for path in ("core/stores.py", "push/object_store.py")),  # an error of a store that has no space
    ("commands/init.py", "lora"),  # the section of a run
    *(("config/foreign_files.py", name) for name in ("full", "lora", "qlora")),  # of files of other tools
    *((path, "muon") for path in ("train/muon.py", "render/settings_table.py")),  # torch's module, DeepSpeed's name
    ("run/training_settings.py", "full"),  # the record of a training without adapters
    *(("render/engine_values.py", name) for name in ("adamw", "adamw_torch", "adamw_torch_fused")),  # of users' files
}


def test_only_the_tables_name_optimizers_and_methods() -> None:
    found = {(str(path.relative_to(PACKAGE)), text) for path in PACKAGE.rglob("*.py") for text in literals(path)}
    assert {(path, text) for path, text in found if path not in TABLES} == OTHER_MEANINGS


def literals(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES:
            yield node.value


def test_the_types_of_the_configuration_are_the_tables() -> None:
    assert get_args(Optimizer) == (*OPTIMIZERS, *TRIED) and get_args(Method) == tuple(METHODS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rows")
    subprocess.run([sys.executable, "-m", "tests.unit.config.added_rows", str(folder)], check=True)
    answer: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answer


def test_an_optimizer_is_one_row(found: dict[str, Any]) -> None:
    row = found["optimizer"]
    states, trained = row["estimate"]["optimizer states"], row["estimate"]["trainable"]
    assert states == pytest.approx(4 * trained, rel=0.02)  # one moment in fp32, in whole blocks
    assert row["optim"] == "rmsprop" and "| Optimizer | RMSprop of PyTorch |" in row["card"]
    assert row["refusal"].startswith("optimizer: rmsprop cannot train under fsdp: ddp, zero1")
    assert row["doctor"][-1] == "`optimizer: rmsprop`"
    assert "`rmsprop` needs bitsandbytes and a GPU" in row["readme"] and '"rmsprop"' in row["schema"]


def test_a_method_is_one_row(found: dict[str, Any]) -> None:
    row = found["method"]
    assert row["estimate"]["rslora"] == row["estimate"]["lora"]
    assert row["kind"] == "rslora" and row["scaled"]
    assert "| Method | rsLoRA: rank 16, alpha 32, dropout 0, on all-linear;" in row["card"]
    assert "or scaled adapters." in row["readme"] and '"rslora"' in row["schema"]

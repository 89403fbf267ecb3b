"""Each kind of thing is the rows of one table: a new row is found everywhere, and no other file names a row."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

import shardmake
from shardmake.config.methods import METHODS
from shardmake.config.models import STRATEGIES, Method, Optimizer, Strategy
from shardmake.config.optimizers import OPTIMIZERS, TRIED
from shardmake.config.settings import SETTINGS, TOTAL_BATCH
from shardmake.config.strategies import STRATEGY_SPECS

PACKAGE = Path(shardmake.__file__).parent
ROOT = PACKAGE.parents[1]
KEYS = {key for row in SETTINGS.values() for key in row.deepspeed_keys} - {
    *(argument for row in SETTINGS.values() for argument in row.trainer),
    *("optimizer.type", "scheduler.type"),  # keys that name what a whole section is about
}
NAMES = {*METHODS, *OPTIMIZERS} | {name for spec in OPTIMIZERS.values() for name in (spec.optim, spec.fused) if name}
STRATEGY = re.compile(r"(ddp|zero[123]?|fsdp)(-[a-z-]*)?")
"""A strategy's name or the start of one."""
TABLES: dict[str, tuple[Callable[[str], object], set[tuple[str, str]]]] = {
    "config/settings.py": (KEYS.__contains__, set()),
    "config/strategies.py": (STRATEGY.fullmatch, {
        *((f"render/{module}.py", "fsdp") for module in ("engine_settings", "settings_table", "trainer_settings")),
        ("render/training_file.py", "fsdp"),  # as above, the argument of TrainingArguments
        *((path, "zero") for path in ("checkpoint/formats/zero.py", "checkpoint/reshard/states.py")),  # a folder of universal checkpoints
        ("train/optimizer_states.py", "zero"),  # the same folder
    }),
    "config/methods.py config/optimizers.py": (NAMES.__contains__, {
        *((path, "lora") for path in ("commands/estimate.py", "config/checks.py", "run/sources.py")),  # a run's section
        ("launch/gpus.py", "full"),  # the width of a PCIe link
        *((path, "full") for path in ("core/stores.py", "push/object_store.py")),  # an error of a store without space
        ("commands/init.py", "lora"),  # the section of a run
        *(("config/foreign_files.py", name) for name in ("full", "lora", "qlora")),  # of files of other tools
        *(("config/translate.py", name) for name in ("full", "lora")),  # sections of a run
        *((path, "muon") for path in ("train/muon.py", "render/settings_table.py")),  # torch's module, DeepSpeed's name
        ("run/training_settings.py", "full"),  # the record of a training without adapters
        *(("render/engine_values.py", name) for name in ("adamw", "adamw_torch", "adamw_torch_fused")),  # of users' files
    }),
}  # fmt: skip
"""By the files of a table: whether a text names one of its rows, and such texts elsewhere that have another meaning."""


@pytest.fixture(scope="module")
def texts() -> set[tuple[str, str]]:
    """Every string of the package, with its file."""
    return {
        (str(path.relative_to(PACKAGE)), node.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("tables", TABLES)
def test_only_the_table_names_its_rows(texts: set[tuple[str, str]], tables: str) -> None:
    names_row, elsewhere = TABLES[tables]
    found = {(file, text) for file, text in texts if names_row(text)}
    assert {(file, text) for file, text in found if file not in tables.split()} == elsewhere
    assert {file for file, _ in found} >= set(tables.split()), "the table itself has its names"


def test_the_types_of_the_configuration_are_the_tables() -> None:
    assert get_args(Optimizer) == (*OPTIMIZERS, *TRIED) and get_args(Method) == tuple(METHODS)
    assert get_args(Strategy) == STRATEGIES == tuple(STRATEGY_SPECS)


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
    assert row["estimate"]["rslora"] == row["estimate"]["lora"] and row["kind"] == "rslora" and row["scaled"]
    assert "| Method | rsLoRA: rank 16, alpha 32, dropout 0, on all-linear;" in row["card"]
    assert "or scaled adapters." in row["readme"] and '"rslora"' in row["schema"]


def test_a_setting_is_one_row(tmp_path: Path) -> None:
    """It exists in `tests.new_setting` alone."""
    program = [sys.executable, "-m", "tests.new_setting", str(tmp_path)]
    answer = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    name = "dataloader_drop_last"
    assert json.loads(answer.stdout.splitlines()[-1]) == {
        "rendered": [True, True],
        "own file": [f"{name}: False in {tmp_path / 'ds.json'}, True in the plan. {SETTINGS['precision'].effect}"],
        "comparison": ["differs", 'False runs, silently. Write "auto" in the DeepSpeed file.'],
        "rank": [f"{name}: planned True, found False"], "digest": "true", "changes": ["plan", "render", "train"],
        "value": "true", "report": ["| Last rows dropped | True |"],
        "reference": [f"| `drop_last` | `{name}` in deepspeed.json, and the training argument |"],
    }  # fmt: skip


def test_a_key_of_deepspeed_stands_in_one_row() -> None:
    names = Counter(name for row in SETTINGS.values() for name in (row.key, *row.deepspeed_keys, *row.accelerate))
    assert [name for name, count in names.items() if name and count > 1] == []
    assert [name for name, row in SETTINGS.items() if row.filled and TOTAL_BATCH in row.filled] == []
    assert {"gradient_clipping", "train_micro_batch_size_per_gpu", "zero_optimization.stage"} <= KEYS


@pytest.mark.parametrize("is_fsdp", [False, True])
def test_fallback_order_is_strict_within_a_family(is_fsdp: bool) -> None:
    orders = [spec.fallback_order for spec in STRATEGY_SPECS.values() if spec.is_fsdp == is_fsdp]
    assert len(set(orders)) == len(orders)


def test_offload_to_the_host_follows_its_stage_and_is_of_its_checkpoint_family() -> None:
    """ZeRO-1 with offload keeps full gradients on the GPU, so ZeRO-2 without offload comes first: it is faster."""
    specs = (spec for spec in STRATEGY_SPECS.values() if spec.zero_stage in (1, 2))
    order = sorted(specs, key=lambda spec: spec.fallback_order)
    assert [(spec.zero_stage, spec.offload_optimizer) for spec in order] == [
        (1, None), (2, None), (1, "cpu"), (2, "cpu"),
    ]  # fmt: skip
    families = {
        "zero1-offload": "zero1", "zero3-offload": "zero3", "zero3-hpz": "zero3", "zero3-nvme": "zero3-nvme",
        "fsdp-hybrid": "fsdp",
    }  # fmt: skip
    assert {name: STRATEGY_SPECS[name].checkpoint_family for name in families} == families

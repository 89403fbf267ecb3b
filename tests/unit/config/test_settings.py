"""The table of settings is the only place that names DeepSpeed's keys, and a row is all that a new setting needs."""

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import shardmake
from shardmake.config.settings import SETTINGS, TOTAL_BATCH

PACKAGE = Path(shardmake.__file__).parent
ROOT = PACKAGE.parents[1]
SECTIONS = {"optimizer.type", "scheduler.type"}
"""Keys that name what a whole section is about."""


def test_only_the_table_names_the_keys_of_deepspeed() -> None:
    arguments = {argument for row in SETTINGS.values() for argument in row.trainer}
    keys = {key for row in SETTINGS.values() for key in row.deepspeed_keys} - arguments - SECTIONS
    assert {"gradient_clipping", "train_micro_batch_size_per_gpu", "zero_optimization.stage"} <= keys
    found = {
        (str(path.relative_to(PACKAGE)), node.value)
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "config/settings.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in keys
    }
    assert found == set()


def test_a_key_stands_in_one_row() -> None:
    names = Counter(name for row in SETTINGS.values() for name in (row.key, *row.deepspeed_keys, *row.accelerate))
    assert [name for name, count in names.items() if name and count > 1] == []
    assert [name for name, row in SETTINGS.items() if row.filled and TOTAL_BATCH in row.filled] == []


def test_a_new_row_is_found_by_every_reader(tmp_path: Path) -> None:
    """The setting exists in `tests.new_setting` alone."""
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

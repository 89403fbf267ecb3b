"""The table of strategies is the only place that names them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import shardmake
from shardmake.config.models import STRATEGIES, Strategy
from shardmake.config.strategies import STRATEGY_SPECS

PACKAGE = Path(shardmake.__file__).parent
TABLE = PACKAGE / "config/strategies.py"
NAME = re.compile(r"(ddp|zero[123]|fsdp)(-[a-z-]*)?")
ARGUMENT_NAMES = {
    (f"render/{module}.py", "fsdp")
    for module in ("engine_settings", "lint", "settings_table", "trainer_settings", "training_file")
}
"""Names of TrainingArguments' own arguments."""


def test_only_the_table_names_strategies() -> None:
    found = {(str(path.relative_to(PACKAGE)), text) for path in PACKAGE.rglob("*.py") for text in names(path)}
    assert {(path, text) for path, text in found if PACKAGE / path != TABLE} <= ARGUMENT_NAMES


def names(path: Path) -> Iterator[str]:
    """String literals that are a strategy's name or the start of one, or that a name is searched for."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            yield node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            yield from (argument.value for argument in node.args if is_family(argument))  # type: ignore[attr-defined]


def is_family(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in ("zero", "fsdp", "ddp")


def test_the_type_of_the_configuration_is_the_table() -> None:
    assert get_args(Strategy) == STRATEGIES == tuple(STRATEGY_SPECS)


@pytest.mark.parametrize("is_fsdp", [False, True])
def test_fallback_order_is_strict_within_a_family(is_fsdp: bool) -> None:
    orders = [spec.fallback_order for spec in STRATEGY_SPECS.values() if spec.is_fsdp == is_fsdp]
    assert len(set(orders)) == len(orders)


def test_offload_to_the_host_follows_its_stage() -> None:
    """ZeRO-1 with offload keeps full gradients on the GPU, so ZeRO-2 without offload comes first: it is faster."""
    specs = (spec for spec in STRATEGY_SPECS.values() if spec.zero_stage in (1, 2))
    order = sorted(specs, key=lambda spec: spec.fallback_order)
    assert [(spec.zero_stage, spec.offload_optimizer) for spec in order] == [
        (1, None), (2, None), (1, "cpu"), (2, "cpu"),
    ]  # fmt: skip


@pytest.mark.parametrize(("strategy", "family"), [
    ("zero1-offload", "zero1"), ("zero3-offload", "zero3"), ("zero3-hpz", "zero3"), ("zero3-nvme", "zero3-nvme"),
    ("fsdp-hybrid", "fsdp"),
])  # fmt: skip
def test_checkpoint_families(strategy: str, family: str) -> None:
    assert STRATEGY_SPECS[strategy].checkpoint_family == family

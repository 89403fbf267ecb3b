"""The table of family errors against the benchmark's result."""

import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from shardmake.plan.family_errors import FAMILY_ERRORS

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "memory_accuracy.txt"
ROW = re.compile(r"A-? +(.{26}) (.{34}) s=\S+ +b=\S+ +(\w+) +[\d.]+ +[\d.]+ +([+-][\d.]+) %")


def family(strategy: str) -> str:
    if "offload" in strategy:
        return "offloaded"
    if "QLo" in strategy:
        return "quantized"
    return "unsharded" if "single GPU" in strategy or "NO_SHARD" in strategy else "sharded"


def test_the_table_is_that_of_the_benchmark() -> None:
    """Rows of one layer, of host memory and without a model are no trainings."""
    errors = defaultdict(list)
    for model, strategy, figure, error in ROW.findall(RESULT.read_text()):
        if figure in ("device", "reserved") and "(none)" not in model:
            errors[family(strategy)].append(float(error))
    assert set(errors) == set(FAMILY_ERRORS)
    for name, found in errors.items():
        more = sorted(max(0.0, -error) for error in found)
        row = FAMILY_ERRORS[name]
        assert row.name == name and row.runs == len(found)
        assert 100 * row.typical == pytest.approx(median(map(abs, found)), abs=0.06)
        assert 100 * row.largest == pytest.approx(more[min(len(more) - 1, int(0.9 * len(more)))], abs=0.06)

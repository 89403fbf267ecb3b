"""The table of family errors against the benchmark's result."""

import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from shardmake.plan.family_errors import FAMILY_ERRORS

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "memory_accuracy.txt"
FAMILIES = "|".join(FAMILY_ERRORS)
ROW = re.compile(rf"A-? +.{{26}} .{{34}} s=\S+ +b=\S+ +({FAMILIES}) +\w+ +[\d.]+ +[\d.]+ +([+-][\d.]+) %")


def test_the_table_is_that_of_the_benchmark() -> None:
    errors = defaultdict(list)
    for family, error in ROW.findall(RESULT.read_text()):
        errors[family].append(float(error))
    assert set(errors) == set(FAMILY_ERRORS)
    for name, found in errors.items():
        more = sorted(max(0.0, -error) for error in found)
        row = FAMILY_ERRORS[name]
        assert row.name == name and row.runs == len(found)
        assert 100 * row.typical == pytest.approx(median(map(abs, found)), abs=0.06)
        assert 100 * row.largest == pytest.approx(more[min(len(more) - 1, int(0.9 * len(more)))], abs=0.06)

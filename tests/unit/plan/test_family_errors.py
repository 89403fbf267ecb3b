"""The table of family errors against the benchmark's result."""

import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from shardmake.plan.family_errors import FAMILY_ERRORS

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "memory_accuracy.txt"
FEW = 10
FAMILIES = "|".join(FAMILY_ERRORS)
ROW = re.compile(rf"A-? +.{{26}} .{{34}} s=\S+ +b=\S+ +({FAMILIES}) +\w+ +[\d.]+ +[\d.]+ +([+-][\d.]+) %")


def test_the_table_is_that_of_the_benchmark() -> None:
    errors = defaultdict(list)
    for family, error in ROW.findall(RESULT.read_text()):
        errors[family].append(float(error))
    assert set(errors) == set(FAMILY_ERRORS)
    everything = [error for found in errors.values() for error in found]
    for name, found in errors.items():
        row = FAMILY_ERRORS[name]
        assert row.name == name and row.runs == len(found)
        samples = [found] if len(found) >= FEW else [found, everything]
        assert 100 * row.typical == pytest.approx(max(median(map(abs, sample)) for sample in samples), abs=0.06)
        assert 100 * row.largest == pytest.approx(max(nine_in_ten(sample) for sample in samples), abs=0.06)


def nine_in_ten(errors: list[float]) -> float:
    more = sorted(max(0.0, -error) for error in errors)
    return more[min(len(more) - 1, int(0.9 * len(more)))]

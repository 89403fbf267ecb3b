"""The comparison with torch's own memory trackers, and the estimates with old libraries."""

import csv
import re
from pathlib import Path

import pytest

from benchmarks.memory_accuracy import TRUTH, report
from benchmarks.memory_tracker import CASES, Case, estimated
from shardmake.core.units import GIB

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_estimate_is_within_three_percent_of_torchs_tracker(case: Case) -> None:
    (line,) = [
        line for line in (RESULTS / "memory_tracker.txt").read_text().splitlines() if line.startswith(f"{case.name} ")
    ]
    theirs, ours = map(float, re.findall(r"[\d.]+", line.removeprefix(case.name))[:2])
    assert estimated(case) / GIB == pytest.approx(ours, abs=0.006)
    assert ours == pytest.approx(theirs, rel=0.03)


def test_the_estimates_of_published_trainings_are_the_recorded_ones() -> None:
    with TRUTH.open() as file:
        found = "\n".join(report(csv.DictReader(file)))
    assert (RESULTS / "memory_accuracy.txt").read_text().startswith(found)

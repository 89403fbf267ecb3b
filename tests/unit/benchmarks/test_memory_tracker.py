"""The comparison with torch's own memory trackers."""

import re
from pathlib import Path

import pytest

from benchmarks.memory_tracker import CASES, Case, estimated
from shardmake.core.units import GIB

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "memory_tracker.txt"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_estimate_is_within_three_percent_of_torchs_tracker(case: Case) -> None:
    (line,) = [line for line in RESULT.read_text().splitlines() if line.startswith(f"{case.name} ")]
    theirs, ours = map(float, re.findall(r"[\d.]+", line.removeprefix(case.name))[:2])
    assert estimated(case) / GIB == pytest.approx(ours, abs=0.006)
    assert ours == pytest.approx(theirs, rel=0.03)

"""The estimates with old libraries."""

import csv

from benchmarks.memory_accuracy import TRUTH, report

RESULT = TRUTH.parents[1] / "results" / "memory_accuracy.txt"


def test_the_estimates_of_published_trainings_are_the_recorded_ones() -> None:
    with TRUTH.open() as file:
        assert RESULT.read_text().startswith("\n".join(report(csv.DictReader(file))))

"""The modelled step times against the published throughputs, and against those of a CPU."""

import csv
import statistics

import pytest

from benchmarks.step_time_accuracy import FITTED, RESULTS, ROWS, predict, rank_correlation, summary
from benchmarks.step_time_cpu import Row, report, strategies

with ROWS.open() as file:
    PUBLISHED = list(csv.DictReader(file))
MODELLED = [predict(row) for row in PUBLISHED]


@pytest.mark.parametrize("fitted", [True, False], ids=["fitted", "held out"])
def test_the_median_error_is_at_most_fifteen_percent(fitted: bool) -> None:
    errors = [
        abs(value / float(row["tokens_per_second_per_gpu"]) - 1)
        for row, value in zip(PUBLISHED, MODELLED, strict=True)
        if (row["source"] in FITTED) is fitted
    ]
    assert statistics.median(errors) <= 0.15


@pytest.mark.parametrize(
    "source", ["mosaicml", "torchtitan", "fms-fsdp", "shardmake", "deepspeed-3901", "deepspeed-zenflow"]
)
def test_the_order_within_a_source_is_right(source: str) -> None:
    pairs = [
        (float(row["tokens_per_second_per_gpu"]), value)
        for row, value in zip(PUBLISHED, MODELLED, strict=True)
        if row["source"] == source
    ]
    measured, modelled = zip(*pairs, strict=True)
    assert round(rank_correlation(measured, modelled), 2) >= 0.9


def test_rank_correlation_is_that_of_the_order() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [9, 5, 1]) == pytest.approx(-1)
    assert rank_correlation([10, 10, 30, 40], [2, 1, 3, 4]) == pytest.approx(0.9**0.5)


def test_the_kept_results_are_those_of_this_code() -> None:
    assert RESULTS.read_text().endswith("\n".join(summary(PUBLISHED, MODELLED)) + "\n")


def test_every_strategy_that_a_cpu_can_run_is_measured() -> None:
    assert {"ddp", "zero1", "zero1-offload", "zero2", "zero3", "zero3-offload"} <= set(strategies())
    assert not {"fsdp", "zero3-nvme"} & set(strategies())


def test_the_table_has_ratios_and_the_correlation_of_each_size() -> None:
    times = {"ddp": (1.0, 2.0), "zero2": (2.0, 4.0), "zero3": (4.0, 4.0)}
    rows = [Row("small", name, *both) for name, both in times.items()]
    text = report(rows, (0.1, 2.0))
    ratios = [line.split()[-2:] for line in text.splitlines()[1:4]]
    assert ratios == [["2.00", "1.00"], ["2.00", "1.00"], ["1.00", "0.50"]]
    assert "small: median ratio 2.00, median deviation from it 0.0%, rank correlation 0.87" in text
    assert "load of the machine before and after: 0.1, 2.0" in text
    assert rows[0].ratio == pytest.approx(2)

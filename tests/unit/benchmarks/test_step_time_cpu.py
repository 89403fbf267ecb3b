"""The table of modelled and measured step times on the CPU."""

import pytest

from benchmarks.step_time_cpu import Row, report, strategies


def test_every_strategy_that_a_cpu_can_run_is_measured() -> None:
    assert {"ddp", "zero1", "zero1-offload", "zero2", "zero3", "zero3-offload"} <= set(strategies())
    assert not {"fsdp", "zero3-nvme"} & set(strategies())


def test_the_table_has_ratios_and_the_correlation_of_each_size() -> None:
    rows = [
        Row("small", name, seconds, 2 * seconds) for name, seconds in (("ddp", 1.0), ("zero2", 2.0), ("zero3", 4.0))
    ]
    rows[2] = Row("small", "zero3", 4.0, 4.0)
    text = report(rows, (0.1, 2.0))
    assert [line.split()[-2:] for line in text.splitlines()[1:4]] == [
        ["2.00", "1.00"],
        ["2.00", "1.00"],
        ["1.00", "0.50"],
    ]
    assert "small: median ratio 2.00, median deviation from it 0.0%, rank correlation 0.87" in text
    assert "load of the machine before and after: 0.1, 2.0" in text
    assert rows[0].ratio == pytest.approx(2)

"""Findings as rows: broken checks, equal findings of nodes, the table."""

import pytest

from shardmake.run.findings import (
    Finding,
    Verdict,
    merge_nodes,
    not_checked,
    ok,
    print_table,
    run_checks,
    stops,
    summarize,
    warning,
    would_stop,
)


def broken() -> list[Finding]:
    raise RuntimeError("a library failed")


def test_a_check_that_raises_is_not_checked_and_the_others_run() -> None:
    found = run_checks({"first": broken, "second": lambda: [ok("second", "fine")]})
    assert found == [not_checked("first", "RuntimeError: a library failed"), ok("second", "fine")]


def test_equal_findings_of_two_nodes_are_one_row() -> None:
    rows = [
        ok("scratch", "/tmp").model_copy(update={"nodes": ("c1",)}),
        warning("GPUs", "slow", "exclude").model_copy(update={"nodes": ("c1",)}),
        ok("scratch", "/tmp").model_copy(update={"nodes": ("c2",)}),
    ]
    merged = merge_nodes(rows)
    assert [(row.check, row.nodes) for row in merged] == [("scratch", ("c1", "c2")), ("GPUs", ("c1",))]


def test_only_one_verdict_stops_a_run() -> None:
    harmless = [ok("a", "b"), warning("a", "b", "c"), not_checked("a", "b")]
    assert not would_stop(harmless)
    assert would_stop([*harmless, stops("a", "b", "c")])
    assert summarize([*harmless, ok("x", "y")]) == "2 ok, 1 warning, 1 not checked"


def test_the_table_has_every_column_and_prints_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    row = stops("qos", "not [bold]yours", "Set it").model_copy(update={"nodes": ("c1",)})
    print_table("Nodes", [row])
    text = capsys.readouterr().out
    assert "what to do" in text and "c1: not [bold]yours" in text and Verdict.STOPS in text

"""Findings as rows: broken checks, equal findings of nodes, the table."""

from unittest.mock import Mock

import pytest

from shardmake.run import findings
from shardmake.run.findings import Finding, Verdict, not_checked, ok, stops, warning


def on_node(row: Finding, node: str) -> Finding:
    return row.model_copy(update={"nodes": (node,)})


def test_a_check_that_raises_is_not_checked_and_the_others_run() -> None:
    broken = Mock(side_effect=RuntimeError("a library failed"))
    found = findings.run_checks({"first": broken, "second": lambda: [ok("second", "fine")]})
    assert found == [not_checked("first", "RuntimeError: a library failed"), ok("second", "fine")]


def test_equal_findings_of_two_nodes_are_one_row() -> None:
    scratch, slow = ok("scratch", "/tmp"), warning("GPUs", "slow", "exclude")
    merged = findings.merge_nodes([on_node(scratch, "c1"), on_node(slow, "c1"), on_node(scratch, "c2")])
    assert [(row.check, row.nodes) for row in merged] == [("scratch", ("c1", "c2")), ("GPUs", ("c1",))]


def test_only_one_verdict_stops_a_run() -> None:
    harmless = [ok("a", "b"), warning("a", "b", "c"), not_checked("a", "b")]
    assert not findings.would_stop(harmless)
    assert findings.would_stop([*harmless, stops("a", "b", "c")])
    assert findings.summarize([*harmless, ok("x", "y")]) == "2 ok, 1 warning, 1 not checked"


def test_the_table_has_every_column_and_prints_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    findings.print_table("Nodes", [on_node(stops("qos", "not [bold]yours", "Set it"), "c1")])
    text = capsys.readouterr().out
    assert "what to do" in text and "c1: not [bold]yours" in text and Verdict.STOPS in text

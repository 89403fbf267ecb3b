"""Findings about nodes as rows, and the rule by which slow ranks are named."""

from unittest.mock import Mock

import pytest

from shardmake.run import findings
from shardmake.run.attempt import Heartbeat
from shardmake.run.findings import Finding, Verdict, not_checked, ok, stops, warning
from shardmake.run.usage import describe_stragglers


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


EVEN = [1.0, 1.02, 0.98, 1.1, 1.0]
SLOW = [1.6, 1.7, 1.5, 1.6, 1.4]


def describe(*ranks: list[float]) -> str:
    """Return the sentence about ranks with these times, two on each node."""
    values = {"pid": 1, "phase": "train", "step": 9, "time": 0.0}
    beats = [Heartbeat(rank=n, host=f"n{n // 2 + 1}", compute_seconds=one, **values) for n, one in enumerate(ranks)]
    return describe_stragglers(beats)


RULE = "as long as the median rank (reported from 1.3 times on, if it lasts for 50 steps and 60 s)"


@pytest.mark.parametrize(("ranks", "found"), [
    ([EVEN] * 3 + [SLOW], "rank 3 on n2 computes 1.6 times"), ([EVEN, SLOW], "rank 1 on n1 computes 1.6 times"),
    ([SLOW, SLOW, EVEN, EVEN], "ranks 0, 1 on n1 compute up to 1.6 times"),
    ([EVEN] * 3 + [SLOW] + [EVEN] * 2 + [[3.0] * 5], "rank 3 on n2 computes 1.6 times, rank 6 on n4 computes 3.0 times"),
])  # fmt: skip
def test_slow_ranks_are_named_with_their_nodes(ranks: list[list[float]], found: str) -> None:
    assert describe(*ranks) == f"{found} {RULE}"


@pytest.mark.parametrize("last", [EVEN, [*SLOW[:4], 1.29], SLOW[:4], []])
def test_no_rank_is_named_before_it_has_been_slow_for_all_windows(last: list[float]) -> None:
    assert describe(EVEN, EVEN, EVEN, last) == ""
    assert describe(last) == ""

"""The rule by which ranks that compute longer than the others are named."""

import pytest

from shardmake.run.attempt import Heartbeat
from shardmake.run.usage import describe_stragglers

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

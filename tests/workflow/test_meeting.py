"""Real ranks that meet over gloo, each as a node of its own."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest

from shardmake.train.meeting import describe

RANK = """
import sys
from shardmake.train.meeting import MeetingError, meet_ranks
try:
    meet_ranks(True, None, print, deadline=float(sys.argv[1]))
except MeetingError as error:
    sys.exit(f"{error} missing: {list(error.missing)}")
"""


def meet(world_size: int, deadlines: Sequence[float]) -> list[tuple[int, str, str]]:
    """Status, output and errors of the first ranks of ``world_size``, one for each of ``deadlines``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    shared |= {"GROUP_WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(deadline)],
            env={**os.environ, **shared, "RANK": str(rank), "GROUP_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, deadline in enumerate(deadlines)
    ]
    outputs = [rank.communicate() for rank in ranks]
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_three_nodes_meet_and_try_their_links() -> None:
    found = meet(3, [60, 60, 60])
    assert [code for code, _, _ in found] == [0, 0, 0], found
    assert found[0][1].startswith("preflight: all-reduce of 1 MiB over 3 ranks at ")
    assert [said for _, said, _ in found[1:]] == ["", ""], "rank 0 alone tells"


def test_a_rank_that_does_not_come_is_named_by_all_others() -> None:
    """Rank 0, whose process holds the store, gives up first."""
    for code, _, errors in meet(3, [8, 11]):
        assert code == 1 and "Rank(s) [2] did not come" in errors and "missing: [2]" in errors


@pytest.mark.parametrize(("planned", "warns"), [(50e9, True), (1e9, False), (None, False)])
def test_bandwidth_far_below_the_cluster_file_is_a_warning(planned: float | None, warns: bool) -> None:
    line = describe(0.064, 64 << 20, 2, planned)
    assert "64 MiB over 2 ranks at 1.05 GB/s" in line
    assert ("look at the network" in line) == warns

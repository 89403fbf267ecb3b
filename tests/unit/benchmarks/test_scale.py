"""The counts of the simulated save: each node pays for its own ranks, and the first node for one listing per node."""

from pathlib import Path

from benchmarks.counting import PLACE, OperationCounter, run_on_nodes
from benchmarks.scale import RANKS_PER_NODE, Phase, Rates, measure, save


def test_operations_are_counted_by_node_and_below_the_folder_only(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    counter = OperationCounter(inside)

    def run(node: int) -> None:
        for _ in range(node + 1):
            (inside / f"file-{node}").write_text("x")
        (outside / f"file-{node}").write_text("x")
        with counter.paused():
            (inside / f"other-{node}").write_text("x")

    with counter.counting():
        run_on_nodes(3, run)
    (inside / "after").touch()
    PLACE.node = 0
    assert counter.by_node == {0: 1, 1: 2, 2: 3} and counter.by_kind == {"open": 6}


def test_a_save_costs_each_rank_the_same_and_the_first_node_a_few_operations_per_node(tmp_path: Path) -> None:
    sizes = (2 * RANKS_PER_NODE, 4 * RANKS_PER_NODE, 8 * RANKS_PER_NODE)
    small, middle, large = (save(tmp_path / str(ranks), ranks) for ranks in sizes)
    more_nodes = large.operations - middle.operations, middle.operations - small.operations
    assert more_nodes[0] == 2 * more_nodes[1]
    assert large.busiest - middle.busiest <= 4 * 4
    assert large.received <= small.received + 8, "what a rank receives does not depend on the number of ranks"


FIRST_NODE = {"save": 3, "resume": 6 * RANKS_PER_NODE, "hang": 2, "absent rank": RANKS_PER_NODE}
"""Operations that each further node costs the busiest one: the first, or at a resume the login node; 1 in other phases."""


def test_a_larger_job_costs_each_rank_the_same_and_the_first_node_a_constant_per_node() -> None:
    small, middle, large = ({phase.name: phase for phase in measure(ranks, Rates())} for ranks in (32, 64, 128))
    for name in small:
        per_rank = [phase[name].operations / phase[name].ranks for phase in (small, large)]
        assert per_rank[1] <= 1.25 * per_rank[0], name
        assert large[name].busiest - middle[name].busiest <= FIRST_NODE.get(name, 1) * 8, name
        assert large[name].received <= 20 * large[name].ranks and large[name].login == 0, name
    assert large["heartbeats"].busiest == small["heartbeats"].busiest
    assert large["validate"].busiest <= small["validate"].busiest + 1


def test_the_busiest_node_or_the_file_system_sets_the_pace() -> None:
    rates = Rates(operations=100, latency=0.1, login=10)
    assert Phase("save", 8, operations=1000, busiest=2).seconds(rates) == 10
    assert Phase("save", 8, operations=10, busiest=200).seconds(rates) == 20
    assert Phase("resume", 8, operations=0, busiest=0, login=50).seconds(rates) == 5

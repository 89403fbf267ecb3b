from hypothesis import given
from hypothesis import strategies as st

from shardmake.train.network_check import MIN_NODES, rounds, slow_links


@given(st.integers(MIN_NODES, 200))
def test_each_link_is_measured_once_without_a_shared_node(nodes: int) -> None:
    assert sorted(link for links in rounds(nodes) for link in links) == list(range(nodes))
    for links in rounds(nodes):
        busy = [node for link in links for node in (link, (link + 1) % nodes)]
        assert len(busy) == len(set(busy))


def test_both_links_of_a_slow_node_are_reported_with_three_nodes() -> None:
    found = slow_links([0.001, 0.1, 0.1], 1 << 20, ["c1", "c2", "c3"])
    assert [line.partition("from ")[2].partition(" reaches")[0] for line in found] == ["c1 to c2", "c2 to c3"]
    assert "reaches 0.01 GB/s; the fastest link of this job reaches 1.05 GB/s" in found[0]
    assert slow_links([0.001, 0.0015, 0.002], 1 << 20, ["c1", "c2", "c3"]) == []

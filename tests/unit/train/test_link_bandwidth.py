from hypothesis import given
from hypothesis import strategies as st

from shardmake.train.link_bandwidth import FEWEST_NODES, rounds, slow_links


@given(st.integers(FEWEST_NODES, 200))
def test_every_link_is_tried_once_and_none_shares_a_node_with_another(nodes: int) -> None:
    assert sorted(link for links in rounds(nodes) for link in links) == list(range(nodes))
    for links in rounds(nodes):
        busy = [node for link in links for node in (link, (link + 1) % nodes)]
        assert len(busy) == len(set(busy))


def test_both_links_of_a_slow_node_are_named_also_where_there_are_three_nodes() -> None:
    found = slow_links([0.001, 0.1, 0.1], 1 << 20, ["c1", "c2", "c3"])
    assert [line.partition("from ")[2].partition(" the network")[0] for line in found] == ["c1 to c2", "c2 to c3"]
    assert "carries 0.01 GB/s, the fastest link of this job 1.05 GB/s" in found[0]
    assert slow_links([0.001, 0.0015, 0.002], 1 << 20, ["c1", "c2", "c3"]) == []

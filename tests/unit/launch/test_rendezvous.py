"""Nodes meet over real sockets on loopback."""

import random
import socket
import threading
from pathlib import Path

import psutil
import pytest

from shardmake.launch import rendezvous
from shardmake.launch.rendezvous import RendezvousError, choose_address, listen, meet, port_candidates


def test_ports_lie_outside_the_ephemeral_range() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = list(port_candidates(random.Random(1)))
    assert len(ports) > 50
    assert not any(low <= port <= high for port in ports)


def test_a_taken_port_is_passed_over() -> None:
    first = next(iter(port_candidates(random.Random(5))))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        with listen("127.0.0.1", random.Random(5)) as listener:
            assert listener.getsockname()[1] != first


def test_one_node_meets_on_loopback_and_several_never_do() -> None:
    assert choose_address(None, nodes=1) == ("lo", "127.0.0.1")
    assert "lo" not in rendezvous._addresses()


def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(RendezvousError, match=r"no address on the interface 'ib7'.*network_interface"):
        choose_address("ib7", nodes=2)


def test_a_named_interface_is_taken() -> None:
    usable = rendezvous._addresses()
    if not usable:
        pytest.fail("this machine has no interface but loopback")
    name, address = next(iter(usable.items()))
    assert choose_address(name, nodes=2) == (name, address)
    assert address in {a.address for a in psutil.net_if_addrs()[name]}


def _meet_in_threads(folder: Path, nodes: int, seconds: float, interface: str | None = None) -> list[object]:
    results: list[object] = [None] * nodes

    def one(rank: int) -> None:
        try:
            results[rank] = meet(folder, 0, rank, nodes, interface, seconds)
        except RendezvousError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(nodes)]
    for thread in reversed(threads):  # node 0 comes last
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several "nodes" of this machine."""
    monkeypatch.setattr(rendezvous, "choose_address", lambda interface, nodes: ("lo", "127.0.0.1"))


@pytest.mark.usefixtures("on_loopback")
def test_all_nodes_agree_and_the_port_is_free_afterwards(tmp_path: Path) -> None:
    results = _meet_in_threads(tmp_path, nodes=4, seconds=20)
    assert len({repr(result) for result in results}) == 1
    meeting = results[0]
    assert isinstance(meeting, rendezvous.Rendezvous)
    with socket.socket() as store:  # as the ranks' store will
        store.bind((meeting.address, meeting.port))
        store.listen()


@pytest.mark.parametrize(("named", "used"), [(None, "lo"), ("ib0", "ib0")])
def test_each_node_takes_its_own_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, used: str
) -> None:
    """Node 0's may have a name that no other node knows."""
    monkeypatch.setattr(rendezvous, "choose_address", lambda interface, nodes: ("enp9s0", "127.0.0.1"))
    results = _meet_in_threads(tmp_path, nodes=2, seconds=20, interface=named)
    assert [getattr(result, "interface", result) for result in results] == ["enp9s0", used]


@pytest.mark.usefixtures("on_loopback")
def test_strangers_on_the_port_do_not_count(tmp_path: Path) -> None:
    outcome: list[object] = []

    def host() -> None:
        outcome.append(rendezvous.host_rendezvous(tmp_path / "start-0.json", None, 2, seconds=20))

    thread = threading.Thread(target=host)
    thread.start()
    meeting = rendezvous._await_file(tmp_path / "start-0.json", deadline=float("inf"))
    with socket.create_connection((meeting.address, meeting.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert rendezvous.join_rendezvous(tmp_path / "start-0.json", 1, None, seconds=20) == meeting
    thread.join()
    assert outcome == [meeting]


@pytest.mark.usefixtures("on_loopback")
def test_a_missing_node_is_named(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=r"No word from node\(s\) \[1, 2\]"):
        meet(tmp_path, 0, 0, 3, None, seconds=0.3)


def test_a_node_without_node_0_says_so(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="node 0 did not publish"):
        meet(tmp_path, 0, 1, 2, None, seconds=0.3)

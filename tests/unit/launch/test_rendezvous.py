"""Rendezvous over real sockets on loopback."""

import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardmake.launch import rendezvous
from shardmake.launch.rendezvous import RendezvousError, choose_address, listen, port_candidates, run_rendezvous


def test_ports_lie_outside_the_ephemeral_range_and_one_in_use_is_skipped() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = list(port_candidates(random.Random(1)))
    assert len(ports) > 50
    assert not any(low <= port <= high for port in ports)
    first = next(iter(port_candidates(random.Random(5))))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        with listen("127.0.0.1", random.Random(5)) as listener:
            assert listener.getsockname()[1] != first


def test_only_a_job_of_one_node_uses_loopback_and_others_the_configured_interface() -> None:
    assert choose_address(None, nodes=1) == ("lo", "127.0.0.1")
    usable = rendezvous._addresses()
    assert usable and "lo" not in usable, "this machine has no interface but loopback"
    name, address = next(iter(usable.items()))
    assert choose_address(name, nodes=2) == (name, address)
    assert address in {a.address for a in psutil.net_if_addrs()[name]}
    with pytest.raises(RendezvousError, match=r"no address on the interface 'ib7'.*network_interface"):
        choose_address("ib7", nodes=2)


TITLE, ANY = "Iface\tDestination\tGateway\n", 32 * "0"


@pytest.mark.parametrize(("route", "ipv6_route", "chosen"), [
    (TITLE + "lo\t00000000\t0\nib0\t00000000\t010200C0\t0003\neth0\t000200C0\t0\n", "", "ib0"),
    (TITLE, f"fd{ANY[2:]} 40 {ANY} 00 eth0\n{ANY} 00 {ANY} 00 fd{ANY[2:]} 00000400 00000003     ib0\n", "ib0"),
    (TITLE, f"{ANY} 00 {ANY} 00 {ANY} ffffffff 00000001       lo\n", None),
])  # fmt: skip
def test_of_several_interfaces_that_of_the_default_route_is_used_also_without_ipv4(
    route: str, ipv6_route: str, chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_ROUTES", tmp_path)
    (tmp_path / "route").write_text(route)
    (tmp_path / "ipv6_route").write_text(ipv6_route)
    assert rendezvous._default_interface({"eth0": "fd00::2", "ib0": "fd00::3"}) == chosen


def in_thread(function: Callable[..., object], *arguments: object, **options: object) -> Future[object]:
    """Return the future result of a function, or its `RendezvousError`, in a thread of its own."""
    found: Future[object] = Future()

    def run() -> None:
        try:
            found.set_result(function(*arguments, **options))
        except RendezvousError as error:
            found.set_result(error)

    threading.Thread(target=run).start()
    return found


def rendezvous_of(folder: Path, nodes: int, interface: str | None = None) -> list[object]:
    """Return what each node found; node 0 comes last."""
    ranks = reversed(range(nodes))
    found = [in_thread(run_rendezvous, folder, 0, rank, nodes, interface, 20) for rank in ranks]
    return [one.result() for one in reversed(found)]


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several "nodes" of this machine."""
    monkeypatch.setattr(rendezvous, "choose_address", lambda interface, nodes: ("lo", "127.0.0.1"))


@pytest.mark.usefixtures("on_loopback")
def test_all_nodes_agree_and_the_port_is_free_afterwards(tmp_path: Path) -> None:
    results = rendezvous_of(tmp_path, nodes=4)
    assert len({repr(result) for result in results}) == 1
    found = results[0]
    assert isinstance(found, rendezvous.Rendezvous)
    with socket.socket() as store:  # as the ranks' store will
        store.bind((found.address, found.port))
        store.listen()


@pytest.mark.parametrize(("named", "used"), [(None, "lo"), ("ib0", "ib0")])
def test_nodes_use_interfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, used: str) -> None:
    """The interface of node 0 may have a name that no other node has."""
    monkeypatch.setattr(rendezvous, "choose_address", lambda interface, nodes: ("enp9s0", "127.0.0.1"))
    results = rendezvous_of(tmp_path, 2, named)
    assert [getattr(result, "interface", result) for result in results] == ["enp9s0", used]


@pytest.mark.usefixtures("on_loopback")
def test_other_connections_to_the_port_are_ignored(tmp_path: Path) -> None:
    outcome = in_thread(rendezvous.host_rendezvous, tmp_path / "start-0.json", None, 2, seconds=20)
    found = rendezvous.wait_for_address(tmp_path / "start-0.json", deadline=float("inf"))
    with socket.create_connection((found.address, found.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert rendezvous.join_rendezvous(tmp_path / "start-0.json", 1, None, seconds=20) == found
    assert outcome.result() == found


@pytest.mark.usefixtures("on_loopback")
def test_a_node_that_is_slow_to_close_has_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 waits for the end of the connection, but not for long."""
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.2)
    file = tmp_path / "start-0.json"
    outcome = in_thread(rendezvous.host_rendezvous, file, None, 2, seconds=20)
    found = rendezvous.wait_for_address(file, deadline=float("inf"))
    with socket.create_connection((found.address, found.port)) as connection:
        connection.sendall(b"shardmake 1\n")
        assert connection.recv(8) == b"ok\n"
        assert outcome.result() == found
    assert rendezvous.wait_for_address(file, deadline=float("inf")).complete


def test_a_node_that_left_a_connection_that_counts_has_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of nodes, a connection may wait longer for node 0 than the node does."""
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.2)
    file = tmp_path / "start-0.json"
    attempts, given_up, closed, connect = list[object](), threading.Event(), threading.Event(), socket.create_connection

    def connect_again(*where: Any) -> socket.socket:
        attempts.append(where)
        if len(attempts) == 2:
            given_up.set()
            closed.wait(20)
        return connect(*where)

    monkeypatch.setattr(rendezvous.socket, "create_connection", connect_again)
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        found = rendezvous.Rendezvous(address="127.0.0.1", port=port, interface="lo", host="c1")
        found.write(file)
        outcome = in_thread(rendezvous.join_rendezvous, file, 1, None, seconds=20)
        assert given_up.wait(20)
        assert rendezvous._accept_node(listener, time.monotonic() + 20, {1}) == 1
    found.model_copy(update={"complete": True}).write(file)
    closed.set()
    assert outcome.result() == found


@pytest.mark.usefixtures("on_loopback")
@pytest.mark.parametrize(("rank", "words"), [(0, "Nodes 1, 2 did not connect"), (1, "node 0 did not publish")])
def test_missing_nodes_are_listed(tmp_path: Path, rank: int, words: str) -> None:
    with pytest.raises(RendezvousError, match=words):
        run_rendezvous(tmp_path, 0, rank, 3, None, seconds=0.3)

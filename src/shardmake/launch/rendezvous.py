"""Rendezvous of a job's nodes: node 0 publishes MASTER_ADDR and MASTER_PORT, and every other node connects to it.

The port is neither fixed nor derived from the job id, because two jobs on a shared node would collide. The address is
neither loopback nor the result of a name lookup. Node 0 reads its own interfaces, test-binds a port outside the
kernel's ephemeral range, and listens there until every node has connected.
"""

import contextlib
import errno
import ipaddress
import random
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from pydantic import Field

from shardmake.core.units import numbered
from shardmake.run.record import RunFile

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ROUTES = Path("/proc/net")
_DEFAULT_ROUTES = {"route": r"^(\S+)\s+0{8}\s", "ipv6_route": r"^0{32} 00 .*\s(\S+)$"}
_POLL_SECONDS = 0.1
_LONGEST_PAUSE = 2.0
"""Seconds between two looks of a node for the address that node 0 publishes, or two attempts to connect."""
_ANSWER_SECONDS = 5.0
"""How long one side of a connection waits for the other."""


class RendezvousError(RuntimeError):
    """The rendezvous failed; ``absent`` is the rank of a node that did not connect, None if there is none."""

    def __init__(self, message: str, absent: int | None = None) -> None:
        super().__init__(message)
        self.absent = absent


class Rendezvous(RunFile):
    """Address and port at which the ranks connect."""

    address: str = Field(description="MASTER_ADDR: an address of node 0.")
    port: int = Field(description="MASTER_PORT.")
    interface: str = Field(description="Interface to that address: in the file node 0's, on another node its own.")
    host: str = Field(description="Host name of node 0.")
    complete: bool = Field(False, description="All nodes have connected, and node 0 listens no more.")


def choose_address(interface: str | None, *, nodes: int) -> tuple[str, str]:
    """Return an interface and an address of this node that the others can reach.

    Without ``interface`` it is the interface of the default route, else the only one that is up and not loopback. A
    job of one node uses loopback.

    Raises:
        RendezvousError: the interface is missing or has no address, or several interfaces qualify.
    """
    if nodes == 1 and interface is None:
        return "lo", "127.0.0.1"
    candidates = _addresses()
    if interface is not None:
        if interface not in candidates:
            raise RendezvousError(
                f"{socket.gethostname()} has no address on the interface {interface!r}. It has {_listing(candidates)}. "
                "Set network_interface in the cluster file to one of these."
            )
        return interface, candidates[interface]
    default = _default_interface(candidates)
    if default is None:
        raise RendezvousError(
            f"{socket.gethostname()} has {len(candidates)} network interfaces, and none has the default route: "
            f"{_listing(candidates)}. Set network_interface in the cluster file to one of them."
        )
    return default, candidates[default]


def _addresses() -> dict[str, str]:
    """Return addresses by interface that is up; IPv4 before IPv6, without loopback and link-local addresses."""
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    found: dict[str, str] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, addresses in psutil.net_if_addrs().items():
            usable = [a.address for a in addresses if a.family == family and _is_reachable(a.address)]
            if name in up and usable:
                found.setdefault(name, usable[0])
    return found


def _is_reachable(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def _default_interface(candidates: dict[str, str]) -> str | None:
    """Return the interface of the default route, or the only candidate."""
    for file, default in _DEFAULT_ROUTES.items():
        with contextlib.suppress(OSError):
            for interface in re.findall(default, (_ROUTES / file).read_text(), re.MULTILINE):
                if interface in candidates:
                    return str(interface)
    return next(iter(candidates)) if len(candidates) == 1 else None


def _listing(candidates: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in candidates.items()) or "no usable interface"


def port_candidates(generator: random.Random) -> Iterator[int]:
    """Yield ports in random order, from 10000 up to the kernel's ephemeral range."""
    lowest_ephemeral = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32768
    ports = range(10000, lowest_ephemeral) if lowest_ephemeral > 11000 else range(61000, 65536)
    yield from generator.sample(ports, k=min(200, len(ports)))


def listen(address: str, generator: random.Random | None = None) -> socket.socket:
    """Return a socket that listens on ``address`` at a free port of `port_candidates`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in port_candidates(generator or random.Random()):
        listener = socket.socket(family)
        try:
            listener.bind((address, port))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    raise RendezvousError(f"{socket.gethostname()} found no free port on {address}: all 200 that it tried are in use.")


def host_rendezvous(file: Path, interface: str | None, nodes: int, seconds: float) -> Rendezvous:
    """Publish address and port of node 0 in ``file``, and wait until every other node has connected.

    The other side closes each connection first, so that the port is free at once for the ranks' own store. At the end
    the file says that all have connected: a node may have given up a connection for which node 0 was too slow.
    """
    name, address = choose_address(interface, nodes=nodes)
    deadline = time.monotonic() + seconds
    with listen(address) as listener:
        found = Rendezvous(address=address, port=listener.getsockname()[1], interface=name, host=socket.gethostname())
        found.write(file)
        missing = set(range(1, nodes))
        while missing:
            missing -= {_accept_node(listener, deadline, missing)}
    found.model_copy(update={"complete": True}).write(file)
    return found


def _accept_node(listener: socket.socket, deadline: float, missing: set[int]) -> int:
    """Return the rank of the next node that connects, -1 for any other connection."""
    listener.settimeout(max(deadline - time.monotonic(), 0.01))
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        message = f"{numbered('Node', sorted(missing))} did not connect to {socket.gethostname()} before the deadline."
        raise RendezvousError(message, min(missing)) from None
    except OSError:
        return -1
    with connection:
        return _read_rank(connection)


def _read_rank(connection: socket.socket) -> int:
    """Return the rank that a node has sent, and answer; -1 for any other program.

    The node has connected, also if it is too slow to close in time, or does not wait for the answer any more.
    """
    connection.settimeout(_ANSWER_SECONDS)
    try:
        words = connection.recv(64).split()
    except OSError:
        return -1
    if len(words) != 2 or words[0] != b"shardmake" or not words[1].isdigit():
        return -1
    with contextlib.suppress(OSError):
        connection.sendall(b"ok\n")
        connection.recv(1)  # returns when the node has closed
    return int(words[1])


def join_rendezvous(file: Path, node_rank: int, interface: str | None, seconds: float) -> Rendezvous:
    """Wait for ``file``, connect to its address, and return it with this node's interface.

    Interfaces may have other names here than on node 0. Without ``interface`` it is that of the connection.
    """
    deadline = time.monotonic() + seconds
    found = wait_for_address(file, deadline)
    here, error, pause = "", None, _POLL_SECONDS
    while time.monotonic() < deadline:
        joined = False
        try:
            with socket.create_connection((found.address, found.port), _ANSWER_SECONDS) as connection:
                here = connection.getsockname()[0]
                connection.sendall(b"shardmake %d\n" % node_rank)
                joined = bool(connection.recv(8))
        except OSError as failure:
            error = failure
        if joined or (here and _read(file).complete):
            return found.model_copy(update={"interface": interface or interface_of(here) or found.interface})
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    raise RendezvousError(
        f"{socket.gethostname()} cannot connect to {found.host} at {found.address}, port {found.port}: {error}. "
        "Check network_interface in the cluster file and the nodes' firewall."
    )


def interface_of(address: str) -> str | None:
    """Return the interface of this node that has ``address``."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (found.address.partition("%")[0] for found in addresses):
            return name
    return None


def wait_for_address(file: Path, deadline: float) -> Rendezvous:
    """Return what node 0 published in ``file``, until ``deadline`` on the monotonic clock.

    Raises:
        RendezvousError: it published nothing.
    """
    pause = _POLL_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return _read(file)
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    message = f"{socket.gethostname()} timed out waiting for {file}: node 0 did not publish its address."
    raise RendezvousError(message, absent=0)


def _read(file: Path) -> Rendezvous:
    list(file.parent.iterdir())  # makes NFS refresh the folder
    if (found := Rendezvous.read_if_exists(file)) is None:
        raise FileNotFoundError(errno.ENOENT, "node 0 has not published its address", str(file))
    return found


def address_file(folder: Path, start: int) -> Path:
    """Return the file in which node 0 publishes its address after the job was requeued ``start`` times."""
    return folder / f"start-{start}.json"


def run_rendezvous(
    folder: Path, start: int, node_rank: int, nodes: int, interface: str | None, seconds: float
) -> Rendezvous:
    """Connect the nodes of a job; ``start`` counts its requeues, each of which has its own rendezvous."""
    file = address_file(folder, start)
    if node_rank == 0:
        return host_rendezvous(file, interface, nodes, seconds)
    return join_rendezvous(file, node_rank, interface, seconds)

"""How the nodes of a job meet: node 0 picks MASTER_ADDR and MASTER_PORT, publishes them, and hears from every node.

No fixed port, no port derived from the job id (two jobs on a shared node collide), no loopback across nodes, no
address that a name service guessed: node 0 reads its own interfaces, test-binds a port outside the range from which
the kernel serves others, and keeps listening there until every node has connected.
"""

import contextlib
import ipaddress
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field

from shardmake.core.atomic import write_json

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_POLL_SECONDS = 0.1


class RendezvousError(RuntimeError):
    """The nodes of the job did not meet; ``absent`` is the rank of a node that did not come, None if all did."""

    def __init__(self, message: str, absent: int | None = None) -> None:
        super().__init__(message)
        self.absent = absent


class Rendezvous(BaseModel):
    """Where the ranks meet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(description="MASTER_ADDR: an address of node 0.")
    port: int = Field(description="MASTER_PORT.")
    interface: str = Field(description="Interface for the way to it: in the file node 0's, on another node its own.")
    host: str = Field(description="Host name of node 0.")


def choose_address(interface: str | None, *, nodes: int) -> tuple[str, str]:
    """Interface and address of this node that the others can reach.

    With ``interface`` given, its address; else the interface of the default route, else the only one that is up and
    not loopback. A job of one node meets on loopback.

    Raises:
        RendezvousError: no such interface, no address on it, or several to choose from.
    """
    if nodes == 1 and interface is None:
        return "lo", "127.0.0.1"
    candidates = _addresses()
    if interface is not None:
        if interface not in candidates:
            raise RendezvousError(
                f"{socket.gethostname()} has no address on the interface {interface!r}; it has "
                f"{_listing(candidates)}. Mend network_interface in the cluster file."
            )
        return interface, candidates[interface]
    default = _default_interface(candidates)
    if default is None:
        raise RendezvousError(
            f"{socket.gethostname()} has {len(candidates)} network interfaces and no default route among them: "
            f"{_listing(candidates)}. Name one as network_interface in the cluster file."
        )
    return default, candidates[default]


def _addresses() -> dict[str, str]:
    """Address by interface, for those that are up; no loopback, no link-local; IPv4 before IPv6."""
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
    """Interface of the default route, or the only candidate."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/route").read_text().splitlines()[1:]
        for fields in map(str.split, lines):
            if fields[1] == "00000000" and fields[0] in candidates:
                return fields[0]
    return next(iter(candidates)) if len(candidates) == 1 else None


def _listing(candidates: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in candidates.items()) or "no usable interface"


def port_candidates(generator: random.Random) -> Iterator[int]:
    """Ports in random order, from 10000 up to the range from which the kernel picks ports for outgoing connections."""
    lowest_ephemeral = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32768
    ports = range(10000, lowest_ephemeral) if lowest_ephemeral > 11000 else range(61000, 65536)
    yield from generator.sample(ports, k=min(200, len(ports)))


def listen(address: str, generator: random.Random | None = None) -> socket.socket:
    """A socket listening on ``address`` at a free port of `port_candidates`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in port_candidates(generator or random.Random()):
        listener = socket.socket(family)
        try:
            listener.bind((address, port))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    raise RendezvousError(f"{socket.gethostname()}: 200 ports on {address} are all taken.")


def host_rendezvous(file: Path, interface: str | None, nodes: int, seconds: float) -> Rendezvous:
    """Node 0: publish where to meet in ``file`` and wait until every other node has connected.

    The other side closes each connection first, so the port is free at once for the ranks' own store.
    """
    name, address = choose_address(interface, nodes=nodes)
    deadline = time.monotonic() + seconds
    with listen(address) as listener:
        meeting = Rendezvous(address=address, port=listener.getsockname()[1], interface=name, host=socket.gethostname())
        write_json(file, meeting.model_dump())
        missing = set(range(1, nodes))
        while missing:
            missing -= {_hear_node(listener, deadline, missing)}
    return meeting


def _hear_node(listener: socket.socket, deadline: float, missing: set[int]) -> int:
    """Rank of the next node that connects; anything else that connects is hung up on."""
    remaining = deadline - time.monotonic()
    listener.settimeout(max(remaining, 0.01))
    try:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5)
            words = connection.recv(64).split()
            if len(words) == 2 and words[0] == b"shardmake" and words[1].isdigit():
                connection.sendall(b"ok\n")
                connection.recv(1)  # returns when the node has closed
                return int(words[1])
    except TimeoutError:
        if time.monotonic() >= deadline:
            said = f"No word from node(s) {sorted(missing)} before the deadline."
            raise RendezvousError(said, min(missing)) from None
    except OSError:
        pass
    return -1


def join_rendezvous(file: Path, node_rank: int, interface: str | None, seconds: float) -> Rendezvous:
    """Node k: wait for ``file``, connect to where it says, and return it.

    Interfaces may have other names here than on node 0: it is ``interface``, else the one that the connection has.
    """
    deadline = time.monotonic() + seconds
    meeting = _await_file(file, deadline)
    error: OSError | None = None
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((meeting.address, meeting.port), timeout=5) as connection:
                connection.sendall(b"shardmake %d\n" % node_rank)
                if connection.recv(8):
                    mine = interface or interface_of(connection.getsockname()[0]) or meeting.interface
                    return meeting.model_copy(update={"interface": mine})
        except OSError as failure:
            error = failure
        time.sleep(_POLL_SECONDS)
    raise RendezvousError(
        f"{socket.gethostname()} cannot connect to {meeting.host} at {meeting.address} port {meeting.port}: {error}. "
        "Check network_interface in the cluster file and the nodes' firewall."
    )


def interface_of(address: str) -> str | None:
    """Interface of this node that has ``address``."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (found.address.partition("%")[0] for found in addresses):
            return name
    return None


def _await_file(file: Path, deadline: float) -> Rendezvous:
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            list(file.parent.iterdir())  # makes NFS look again
            return Rendezvous.model_validate_json(file.read_text())
        time.sleep(_POLL_SECONDS)
    said = f"{socket.gethostname()} waited for {file} in vain: node 0 did not publish its address."
    raise RendezvousError(said, absent=0)


def meet(folder: Path, start: int, node_rank: int, nodes: int, interface: str | None, seconds: float) -> Rendezvous:
    """Bring the nodes of one start of a job together; ``start`` counts the requeues, each meets anew."""
    file = folder / f"start-{start}.json"
    if node_rank == 0:
        return host_rendezvous(file, interface, nodes, seconds)
    return join_rendezvous(file, node_rank, interface, seconds)

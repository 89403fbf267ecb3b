"""Check the network with one all-reduce over all ranks before the model is loaded; detect absent ranks.

The check also runs an all-reduce within each node. With three or more nodes it compares the links between them, and
names a slow one: an all-reduce is as slow as its slowest link, but does not identify it.

It runs in a forked process, over the launcher's store. That process can be killed if the network library blocks. It
also leaves the rank itself unchanged: torch's flight recorder and its splitting of groups require that the training's
process group is the first one of its process.
"""

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardmake.core.process import die_with_parent
from shardmake.core.units import numbered
from shardmake.run.attempt import host_name
from shardmake.run.findings import Finding, Verdict, ok, warning

logger = logging.getLogger(__name__)
LINGER_SECONDS = 30.0
"""Time that the store stays open after a failure, for ranks that started later and so give up later."""
_EXIT_SECONDS = 10.0
MIN_BANDWIDTH = 0.25
"""Fraction of the planned bandwidth below which a warning is logged."""
GPU_BYTES = 64 << 20
_LARGEST_GPU_BYTES = 1 << 30
"""A link of several hundred GB/s reaches its bandwidth with messages of this size."""
_LONGEST_ALL_REDUCE = 1.0
"""Seconds that one all-reduce may take; slower networks get smaller messages."""
_CPU_BYTES = 1 << 20
_REPEATS = 3
SLOW = 0.25
"""Fraction of the fastest link's rate below which a link is reported."""
MIN_NODES = 3
"""With fewer nodes there is only one link, and nothing to compare."""


class NetworkCheckError(RuntimeError):
    """The all-reduce failed; ``missing`` ranks did not join, and ``host`` is at fault if it is known."""

    def __init__(self, message: str, missing: Sequence[int] = (), host: str | None = None) -> None:
        super().__init__(message)
        self.missing = missing
        self.host = host


@dataclass(frozen=True)
class CheckSettings:
    """The rates to compare with, and the time limit."""

    on_cpu: bool
    """Use gloo, else NCCL on this rank's GPU."""
    deadline: float
    """Seconds for each of: connecting to the store, waiting for all ranks, and the network."""
    between_nodes: float | None = None
    """Planned bytes per second; a much lower bandwidth of GPUs is a warning."""
    within_node: float | None = None
    nccl_log: Path | None = None
    """File for NCCL's messages, unless the user has set `NCCL_DEBUG`."""


def check_all_reduce(settings: CheckSettings) -> None:
    """All-reduce over all ranks, and log the findings on rank 0; raise `NetworkCheckError` if that is not possible."""
    if os.environ["WORLD_SIZE"] == "1":
        return
    for finding in run_in_fork(lambda: _check(settings), 3 * settings.deadline + LINGER_SECONDS):
        advice = f". {finding.advice}" if finding.advice else ""
        level = logging.INFO if finding.verdict is Verdict.OK else logging.WARNING
        logger.log(level, "preflight: %s%s", finding.found, advice)


def run_in_fork(work: Callable[[], list[Finding]], seconds: float) -> list[Finding]:
    """Return the result of ``work`` in a fork of this process, which must not have used a GPU yet.

    Raise `NetworkCheckError` if ``work`` raised an error, ended its process, or took longer than ``seconds``.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_result, args=(work, sender), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise NetworkCheckError(f"The network check did not end within {seconds:.0f} s")
        result = receiver.recv()
        child.join(_EXIT_SECONDS)  # the child frees its GPU memory when it exits
    except EOFError:
        child.join(_EXIT_SECONDS)
        raise NetworkCheckError(f"A library ended the network check's process: status {child.exitcode}") from None
    finally:
        child.kill()
    if isinstance(result, NetworkCheckError):
        raise result
    return result


def _send_result(work: Callable[[], list[Finding]], sender: Connection) -> None:
    die_with_parent()
    try:
        sender.send(work())
    except NetworkCheckError as error:
        sender.send(error)
    except Exception as error:  # some of torch's exceptions cannot be pickled
        sender.send(NetworkCheckError(f"{type(error).__name__}: {error}"))


def _check(settings: CheckSettings) -> list[Finding]:
    rank, world_size, deadline = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), settings.deadline
    if not settings.on_cpu:
        if settings.nccl_log is not None and "NCCL_DEBUG" not in os.environ:  # this process ends with the check
            debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH"}
            os.environ |= debug | {"NCCL_DEBUG_FILE": str(settings.nccl_log)}
        _check_gpu(rank)
    store = _connect_store(deadline)
    store.set(f"joined-{rank}", "")
    if store.add("joined", 1) == world_size:
        store.set("all-joined", "")
    try:
        # NCCL may block beyond any deadline if a rank is absent.
        store.wait(["all-joined"], timedelta(seconds=deadline))
        on_cpu, timeout = settings.on_cpu, timedelta(seconds=deadline)
        group = {"backend": "gloo"} if on_cpu else {"backend": "nccl", "device_id": device_of_rank(on_cpu)}
        dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timeout, **group)
        findings = measure_network(store, settings)
    except Exception as error:
        explained = _explain(error, store, world_size)
        _keep_store_open(store)
        raise explained from error
    dist.destroy_process_group()
    return findings


def _check_gpu(rank: int) -> None:
    """Use this rank's GPU first, so that a GPU error is not taken for a network error."""
    try:
        torch.ones(GPU_BYTES // 4, device=device_of_rank(on_cpu=False)).sum().item()
    except torch.OutOfMemoryError:
        # Without torch's own words: a fallback to less memory would not help.
        raise NetworkCheckError(f"Rank {rank} found no free memory on its GPU", host=host_name()) from None
    except RuntimeError as error:
        raise NetworkCheckError(f"Rank {rank} cannot use its GPU: {error}", host=host_name()) from None


def _connect_store(deadline: float) -> Any:
    """Return the launcher's own store, under a prefix."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = not launcher_serves and os.environ["RANK"] == "0"
    store = dist.TCPStore(address, port, is_master=is_master, timeout=timedelta(seconds=deadline))
    return dist.PrefixStore("shardmake-network-check", store)


def _explain(error: Exception, store: Any, world_size: int) -> NetworkCheckError:
    """Return an error that says which of these failed: a rank, the store or the network."""
    try:
        missing = [] if store.add("joined", 0) == world_size else _missing_ranks(store, world_size)
    except dist.DistError:
        return NetworkCheckError(f"The store of node 0 cannot be reached: {error}")
    if missing:
        return NetworkCheckError(f"{numbered('Rank', missing)} did not join: {error}", missing)
    return NetworkCheckError(f"All ranks joined, but the network check failed: {error}", host=host_name())


def _missing_ranks(store: Any, world_size: int) -> list[int]:
    """Return the ranks that did not join. The first caller asks for each of them, and the others read its answer."""
    if store.add("asking", 1) == 1:
        missing = [rank for rank in range(world_size) if not store.check([f"joined-{rank}"])]
        store.set("missing", " ".join(map(str, missing)))
    store.wait(["missing"], timedelta(seconds=LINGER_SECONDS))
    return [int(rank) for rank in store.get("missing").split()]


def _keep_store_open(store: Any) -> None:
    """Wait on node 0 until all ranks that joined have read the store, which ends with node 0's ranks."""
    try:
        store.add("explained", 1)
        give_up = time.monotonic() + LINGER_SECONDS
        while os.environ.get("GROUP_RANK", "0") == "0" and time.monotonic() < give_up:
            if store.add("explained", 0) >= store.add("joined", 0):
                return
            time.sleep(0.1)
    except dist.DistError:
        return  # the store has ended, and no rank can read it any more


def device_of_rank(on_cpu: bool) -> torch.device:
    """Return the device of this rank."""
    return torch.device("cpu" if on_cpu else f"cuda:{os.environ['LOCAL_RANK']}")


def measure_network(store: Any, settings: CheckSettings) -> list[Finding]:
    """Run all-reduces, then measure each node and the links between the nodes; return the findings on rank 0."""
    rank, world_size, deadline = dist.get_rank(), dist.get_world_size(), settings.deadline
    size = _choose_size(settings.on_cpu, deadline)
    tensor = torch.ones(size // 4, device=device_of_rank(settings.on_cpu))
    seconds = all_reduce_seconds(tensor, deadline)
    findings = []
    if world_size > int(os.environ["LOCAL_WORLD_SIZE"]):
        findings.append(describe_bandwidth(seconds, size, world_size, settings.between_nodes))
    findings += _compare_nodes(store, tensor, settings)
    findings += _compare_links(store, tensor, deadline)
    _all_reduce(tensor.fill_(1), deadline)  # no rank leaves while others still measure
    return findings if rank == 0 else []


def _choose_size(on_cpu: bool, deadline: float) -> int:
    """Return the bytes of a message, the same on all ranks: as many as fill a fast link, fit and take a second."""
    if on_cpu:
        return _CPU_BYTES
    device = device_of_rank(on_cpu)
    probe = torch.ones(GPU_BYTES // 4, device=device)
    own = message_size(torch.cuda.mem_get_info(device)[0], all_reduce_seconds(probe, deadline))
    agreed = torch.tensor([own], device=device)
    _finish(dist.all_reduce(agreed, op=dist.ReduceOp.MIN, async_op=True), agreed, deadline)
    return int(agreed.item())


def message_size(free: int, probe_seconds: float) -> int:
    """Return the power of two for ``free`` bytes of a GPU, if `GPU_BYTES` took ``probe_seconds``."""
    fitting = min(free // 4, int(GPU_BYTES * _LONGEST_ALL_REDUCE / probe_seconds), _LARGEST_GPU_BYTES)
    return 1 << (max(fitting, GPU_BYTES).bit_length() - 1)


def all_reduce_seconds(tensor: torch.Tensor, deadline: float, group: Any = None) -> float:
    """Return the seconds of an all-reduce over ``group``; the first one, which opens the connections, does not count.

    Raise `ArithmeticError` for a wrong sum, and `TimeoutError` if one all-reduce takes more than ``deadline`` seconds.
    """
    _all_reduce(tensor.fill_(1), deadline, group)
    ranks, total = dist.get_world_size(group), tensor[-1].item()
    if total != ranks:
        raise ArithmeticError(f"the all-reduce over {ranks} ranks returned {total}")
    started = time.perf_counter()
    for _ in range(_REPEATS):
        _all_reduce(tensor, deadline, group)
    return (time.perf_counter() - started) / _REPEATS


def bus_bandwidth(seconds: float, size: int, ranks: int) -> float:
    """Return the bytes per second of an all-reduce of ``size`` bytes; 2 (n - 1) / n of them cross each rank's link."""
    return 2 * (ranks - 1) / ranks * size / seconds


def describe_bandwidth(seconds: float, size: int, world_size: int, planned: float | None) -> Finding:
    """Return the bus bandwidth of an all-reduce over all ranks."""
    reference, advice = "the {} GB/s of the cluster file", "Check the network of these nodes."
    return _compare(f"{world_size} ranks", seconds, size, world_size, planned, reference, advice)


def _compare(
    over: str, seconds: float, size: int, ranks: int, planned: float | None, reference: str, advice: str
) -> Finding:
    """Return the bandwidth, as a warning with the planned one in ``reference`` if it is far below that."""
    bandwidth = bus_bandwidth(seconds, size, ranks)
    line = f"all-reduce of {size >> 20} MiB over {over} at {bandwidth / 1e9:.2f} GB/s"
    if planned is None or bandwidth >= MIN_BANDWIDTH * planned:
        return ok("network", line)
    return warning("network", f"{line}, far below {reference.format(f'{planned / 1e9:.1f}')}", advice)


def _compare_nodes(store: Any, tensor: torch.Tensor, settings: CheckSettings) -> list[Finding]:
    """Return, on rank 0, the bandwidth within the slowest node; every rank must call it."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks == 1:
        return []
    nodes = dist.get_world_size() // ranks
    group = dist.new_subgroups(ranks)[0] if nodes > 1 else None
    seconds = all_reduce_seconds(tensor, settings.deadline, group)
    if os.environ["LOCAL_RANK"] == "0":
        devices = permutations(range(0 if settings.on_cpu else ranks), 2)
        pairs = sum(not torch.cuda.can_device_access_peer(one, other) for one, other in devices)
        store.set(f"within-{dist.get_rank() // ranks}", f"{seconds} {pairs} {host_name()}")
    if dist.get_rank():
        return []
    answers = [store.get(f"within-{node}").decode().split() for node in range(nodes)]
    slowest = max(answers, key=lambda words: float(words[0]))
    planned = None if settings.on_cpu else settings.within_node
    return [describe_node(float(slowest[0]), int(slowest[1]), slowest[2], tensor.nbytes, ranks, planned)]


def describe_node(seconds: float, pairs: int, host: str, size: int, ranks: int, planned: float | None) -> Finding:
    """Return the bandwidth within ``host``, the slowest node, with ``pairs`` of GPUs that lack peer-to-peer access."""
    reason = "The GPUs may exchange data over PCIe instead of NVLink."
    if pairs:
        reason = f"{pairs} pairs of GPUs have no peer-to-peer access (P2P) and exchange data through host memory."
    reference = "{} GB/s (intra_node_gbps, else that of the GPU model)"
    advice = f"{reason} `nvidia-smi topo -m` shows how the GPUs are connected."
    return _compare(f"the {ranks} ranks of {host}", seconds, size, ranks, planned, reference, advice)


def _compare_links(store: Any, tensor: torch.Tensor, deadline: float) -> list[Finding]:
    """Return warnings about slow links on rank 0; torch's launcher sets `GROUP_RANK` and similar variables."""
    node, nodes = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if nodes < MIN_NODES or os.environ["LOCAL_RANK"] != "0":
        return []
    step = int(os.environ["LOCAL_WORLD_SIZE"])
    seconds = _measure_link(tensor, node, [number * step for number in range(nodes)], deadline)
    store.set(f"link-{node}", f"{seconds} {host_name()}")
    if node:
        return []
    results = [store.get(f"link-{number}").decode().split() for number in range(nodes)]
    times, hosts = [float(words[0]) for words in results], [words[1] for words in results]
    return slow_links(times, tensor.nbytes, hosts)


def _all_reduce(tensor: torch.Tensor, deadline: float, group: Any = None) -> None:
    _finish(dist.all_reduce(tensor, group=group, async_op=True), tensor, deadline)


def _finish(work: Any, tensor: torch.Tensor, deadline: float) -> None:
    """Wait for ``work``; gloo keeps the deadline itself, NCCL must be polled."""
    give_up = time.monotonic() + deadline
    while tensor.is_cuda and not work.is_completed():
        if time.monotonic() > give_up:
            raise TimeoutError(f"the network check did not end within {deadline:.0f} s")
    work.wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def rounds(nodes: int) -> list[list[int]]:
    """Return rounds of links without a common node; a link is named by its sender, which sends to the next node."""
    return [list(range(0, nodes - 1, 2)), list(range(1, nodes - 1, 2)), [nodes - 1]]


def _measure_link(tensor: torch.Tensor, node: int, first_ranks: Sequence[int], deadline: float) -> float:
    """Return the seconds that ``tensor``, which is overwritten, takes from the previous node.

    The first rank of every node must call it; ``node`` is this node's index in ``first_ranks``.
    """
    nodes, seconds = len(first_ranks), 0.0
    for links in rounds(nodes):
        for _ in range(2):  # the first pass opens the connection
            started = time.perf_counter()
            if node in links:
                _transfer(dist.isend, tensor, first_ranks[(node + 1) % nodes], deadline)
            elif (node - 1) % nodes in links:
                _transfer(dist.irecv, tensor, first_ranks[node - 1], deadline)
                seconds = time.perf_counter() - started
    return seconds


def slow_links(seconds: Sequence[float], size: int, hosts: Sequence[str]) -> list[Finding]:
    """Return a warning for each link that is much slower than the fastest.

    ``seconds`` is the time of ``size`` bytes from the previous node, by node like the names ``hosts``.
    """
    fastest = min(seconds)
    return [
        warning(
            "network",
            f"the network from {hosts[node - 1]} to {hosts[node]} reaches {size / took / 1e9:.2f} GB/s; the fastest "
            f"link of this job reaches {size / fastest / 1e9:.2f} GB/s",
        )
        for node, took in enumerate(seconds)
        if fastest < SLOW * took
    ]


def _transfer(operation: Any, tensor: torch.Tensor, peer: int, deadline: float) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        _finish(work, tensor, deadline)

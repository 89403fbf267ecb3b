"""The ranks' first act: one all-reduce over all of them, with a deadline, before a minute is spent on loading.

From three nodes on the links between them are compared as well, to name a slow one.

It runs in a process of its own, over the launcher's store. That can be killed where the network's library blocks, and
leaves nothing behind: torch's flight recorder and its splitting of groups count on the training's process group being
the first one of its process.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from shardmake.core.process import die_with_parent
from shardmake.run.attempt import host_name
from shardmake.train import link_bandwidth

DEADLINE_SECONDS = 120.0
SLOW = 0.25
"""Part of the planned bandwidth below which a warning is due."""
LINGER_SECONDS = 30.0
"""How long the store is kept open, after a failure, for ranks that started later and so give up later."""
_REPEATS = 3
_LEAVE_SECONDS = 10.0
_CPU_BYTES, _GPU_BYTES = 1 << 20, 64 << 20


class NetworkCheckError(RuntimeError):
    """The ranks could not add up a tensor together; ``missing`` did not even come. ``host`` is to blame, if known."""

    def __init__(self, message: str, missing: Sequence[int] = (), host: str | None = None) -> None:
        super().__init__(message)
        self.missing = missing
        self.host = host


def check_all_reduce(
    on_cpu: bool, planned: float | None, tell: Callable[[str], None], deadline: float = DEADLINE_SECONDS
) -> None:
    """All-reduce over all ranks; rank 0 tells the bandwidth.

    Args:
        on_cpu: gloo, else NCCL on this rank's GPU.
        planned: bytes per second between nodes as in the cluster file; a GPU's warning is told far below.
        tell: hears one line on rank 0.
        deadline: seconds, for each of connecting to the store, waiting for all ranks, and the network.

    Raises:
        MeetingError: naming the ranks that did not come or cannot use their GPU, or saying that the network does not
            carry the data.
    """
    if os.environ["WORLD_SIZE"] == "1":
        return
    for line in run_in_fork(lambda: _meet(on_cpu, planned, deadline), 3 * deadline + LINGER_SECONDS):
        tell(line)


def run_in_fork(work: Callable[[], list[str]], seconds: float) -> list[str]:
    """What ``work`` returns in a fork of this process, which must not have used a GPU yet.

    Raises:
        MeetingError: ``work`` raised, ended its process, or took longer than ``seconds``.
    """
    context = multiprocessing.get_context("fork")
    answer, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work_and_tell, args=(work, sender), daemon=True)
    child.start()
    sender.close()
    try:
        if not answer.poll(seconds):
            raise NetworkCheckError(f"The ranks' work did not end within {seconds:.0f} s")
        told = answer.recv()
        child.join(_LEAVE_SECONDS)  # what it holds of the GPU is free then
    except EOFError:
        child.join(_LEAVE_SECONDS)
        raise NetworkCheckError(f"A library ended the process of the ranks' work: status {child.exitcode}") from None
    finally:
        child.kill()
    if isinstance(told, NetworkCheckError):
        raise told
    return told


def _work_and_tell(work: Callable[[], list[str]], sender: Connection) -> None:
    die_with_parent()
    try:
        sender.send(work())
    except NetworkCheckError as error:
        sender.send(error)
    except Exception as error:  # not every exception of torch's can be sent
        sender.send(NetworkCheckError(f"{type(error).__name__}: {error}"))


def _meet(on_cpu: bool, planned: float | None, deadline: float) -> list[str]:
    """What this rank has to tell."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not on_cpu:
        _try_gpu(rank)
    store = _store(deadline)
    store.set(f"here-{rank}", "")
    try:
        # NCCL may block beyond any deadline where a rank is absent.
        store.wait([f"here-{other}" for other in range(world_size)], timedelta(seconds=deadline))
        _join(store, rank, world_size, on_cpu, deadline)
        lines = _measure(store, on_cpu, None if on_cpu else planned, deadline)
    except Exception as error:
        explained = _explain(error, store, world_size)
        _outlast_others(store, rank, world_size)
        raise explained from error
    dist.destroy_process_group()
    return lines


def _try_gpu(rank: int) -> None:
    """Use this rank's GPU before the others count on it, so that its own error is not taken for the network's."""
    try:
        torch.ones(_GPU_BYTES // 4, device=_device(on_cpu=False)).sum().item()
    except torch.OutOfMemoryError:
        # In other words than torch's: a smaller training would not help.
        raise NetworkCheckError(f"Rank {rank} found no free memory on its GPU", host=host_name()) from None
    except RuntimeError as error:
        raise NetworkCheckError(f"Rank {rank} cannot use its GPU: {error}", host=host_name()) from None


def describe(seconds: float, size: int, world_size: int, planned: float | None) -> str:
    """One line: bus bandwidth of an all-reduce of ``size`` bytes, 2 (n - 1) / n of which cross each rank's link."""
    bandwidth = 2 * (world_size - 1) / world_size * size / seconds
    line = f"preflight: all-reduce of {size >> 20} MiB over {world_size} ranks at {bandwidth / 1e9:.2f} GB/s"
    if planned is not None and bandwidth < SLOW * planned:
        line += f", far below the {planned / 1e9:.1f} GB/s of the cluster file: look at the network of these nodes"
    return line


def _store(deadline: float) -> Any:
    """The launcher's own store, under a prefix."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        address, port, is_master=not served and os.environ["RANK"] == "0", timeout=timedelta(seconds=deadline)
    )
    return dist.PrefixStore("shardmake-meeting", store)


def _join(store: Any, rank: int, world_size: int, on_cpu: bool, deadline: float) -> None:
    group = {"backend": "gloo"} if on_cpu else {"backend": "nccl", "device_id": _device(on_cpu)}
    dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=deadline), **group)


def _device(on_cpu: bool) -> torch.device:
    return torch.device("cpu" if on_cpu else f"cuda:{os.environ['LOCAL_RANK']}")


def _measure(store: Any, on_cpu: bool, planned: float | None, deadline: float) -> list[str]:
    """All-reduce, then try the links between the nodes; what rank 0 has to tell."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = _CPU_BYTES if on_cpu else _GPU_BYTES
    tensor = torch.ones(size // 4, device=_device(on_cpu))
    _add(tensor, deadline)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        _add(tensor.fill_(1), deadline)
    seconds = (time.perf_counter() - started) / _REPEATS
    if tensor[0].item() != world_size:
        raise NetworkCheckError(f"The all-reduce over {world_size} ranks gave {tensor[0].item()}.")
    slow = _compare_links(store, tensor, deadline)
    _add(tensor.fill_(1), deadline)  # nobody leaves while others still measure
    return [describe(seconds, size, world_size, planned), *slow] if rank == 0 else []


def _compare_links(store: Any, tensor: torch.Tensor, deadline: float) -> list[str]:
    """Warnings, on rank 0; `GROUP_RANK` and its like are what torch's launcher tells of the nodes."""
    node, nodes = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if nodes < link_bandwidth.FEWEST_NODES or os.environ["LOCAL_RANK"] != "0":
        return []
    step = int(os.environ["LOCAL_WORLD_SIZE"])
    seconds = link_bandwidth.measure(
        tensor, node, [number * step for number in range(nodes)], lambda work, on: _finish(work, on, deadline)
    )
    store.set(f"link-{node}", f"{seconds} {host_name()}")
    if node:
        return []
    found = [store.get(f"link-{number}").decode().split() for number in range(nodes)]
    took, hosts = [float(words[0]) for words in found], [words[1] for words in found]
    return link_bandwidth.slow_links(took, tensor.nbytes, hosts)


def _add(tensor: torch.Tensor, deadline: float) -> None:
    """All-reduce ``tensor``."""
    _finish(dist.all_reduce(tensor, async_op=True), tensor, deadline)


def _finish(work: Any, tensor: torch.Tensor, deadline: float) -> None:
    """Wait for ``work``; gloo keeps the deadline itself, NCCL is asked whether it is done."""
    give_up = time.monotonic() + deadline
    while tensor.is_cuda and not work.is_completed():
        if time.monotonic() > give_up:
            raise TimeoutError(f"the ranks' work did not end within {deadline:.0f} s")
    work.wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _explain(error: Exception, store: Any, world_size: int) -> NetworkCheckError:
    """Whether somebody did not come or the network is at fault."""
    try:
        missing = [rank for rank in range(world_size) if not store.check([f"here-{rank}"])]
    except dist.DistError:
        return NetworkCheckError(f"The store of node 0 is out of reach: {error}")
    if missing:
        return NetworkCheckError(f"Rank(s) {missing} did not come: {error}", missing)
    return NetworkCheckError(f"All ranks came, and the network failed them: {error}")


def _outlast_others(store: Any, rank: int, world_size: int) -> None:
    """The store ends with node 0's ranks, so these stay until all that came have looked who is missing."""
    try:
        store.set(f"explained-{rank}", "")
        came = [other for other in range(world_size) if store.check([f"here-{other}"])]
        give_up = time.monotonic() + LINGER_SECONDS
        while os.environ.get("GROUP_RANK", "0") == "0" and time.monotonic() < give_up:
            if store.check([f"explained-{other}" for other in came]):
                return
            time.sleep(0.1)
    except dist.DistError:
        return  # the store is gone: nobody can ask it any more

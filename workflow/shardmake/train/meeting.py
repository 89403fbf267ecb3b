"""The ranks' first act: one all-reduce over all of them, with a deadline, before a minute is spent on loading.

It runs in a process group of its own, over the launcher's store, and leaves nothing behind for the training's group.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_SECONDS = 120.0
SLOW = 0.25
"""Part of the planned bandwidth below which a warning is due."""
_REPEATS = 3
_CPU_BYTES, _GPU_BYTES = 1 << 20, 64 << 20


class MeetingError(RuntimeError):
    """The ranks could not add up a tensor together; ``missing`` did not even come."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = missing
        self.host: str | None = None


def meet_ranks(
    on_cpu: bool, planned: float | None, tell: Callable[[str], None], deadline: float = DEADLINE_SECONDS
) -> None:
    """All-reduce over all ranks; rank 0 tells the bandwidth.

    Args:
        on_cpu: gloo, else NCCL on this rank's GPU.
        planned: bytes per second between nodes as in the cluster file; a GPU's warning is told far below.
        tell: hears one line on rank 0.
        deadline: seconds.

    Raises:
        MeetingError: naming the ranks that did not come, or saying that the network does not carry the data.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return
    store = _store(deadline)
    store.set(f"here-{rank}", "")
    seconds, size = _join_and_add(store, rank, world_size, on_cpu, deadline)
    if rank == 0:
        tell(describe(seconds, size, world_size, None if on_cpu else planned))


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


def _join_and_add(store: Any, rank: int, world_size: int, on_cpu: bool, deadline: float) -> tuple[float, int]:
    """Seconds of one all-reduce, and its bytes."""
    device = torch.device("cpu" if on_cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    size = _CPU_BYTES if on_cpu else _GPU_BYTES
    try:
        group = {"backend": "gloo"} if on_cpu else {"backend": "nccl", "device_id": device}
        dist.init_process_group(
            store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=deadline), **group
        )
        tensor = torch.ones(size // 4, device=device)
        _add(tensor, deadline)
        started = time.perf_counter()
        for _ in range(_REPEATS):
            _add(tensor.fill_(1), deadline)
        seconds = (time.perf_counter() - started) / _REPEATS
        total = tensor[0].item()
    except Exception as error:
        raise _explain(error, store, world_size) from error
    dist.destroy_process_group()
    if total != world_size:
        raise MeetingError(f"The all-reduce over {world_size} ranks gave {total}.")
    return seconds, size


def _add(tensor: torch.Tensor, deadline: float) -> None:
    """All-reduce ``tensor``; gloo keeps the deadline itself, NCCL is asked whether it is done."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    give_up = time.monotonic() + deadline
    while tensor.is_cuda and not work.is_completed():
        if time.monotonic() > give_up:
            raise TimeoutError(f"the all-reduce did not end within {deadline:.0f} s")
    work.wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _explain(error: Exception, store: Any, world_size: int) -> MeetingError:
    """Whether somebody did not come or the network is at fault."""
    try:
        missing = [rank for rank in range(world_size) if not store.check([f"here-{rank}"])]
    except dist.DistError:
        return MeetingError(f"The store of node 0 is out of reach: {error}")
    if missing:
        return MeetingError(f"Rank(s) {missing} did not come: {error}", missing)
    return MeetingError(f"All ranks came, and the network failed them: {error}")

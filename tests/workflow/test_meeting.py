"""Real ranks that meet over gloo, each as a node of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from shardmake.launch.outcome import error_end
from shardmake.run.attempt import RankError
from shardmake.run.attempt_history import EndReason
from shardmake.train import network_check
from shardmake.train.network_check import NetworkCheckError, describe, run_in_fork

RANK = """
import sys
from shardmake.train.network_check import NetworkCheckError, check_all_reduce
try:
    check_all_reduce(True, None, print, deadline=float(sys.argv[1]))
except NetworkCheckError as error:
    sys.exit(f"{error} missing: {list(error.missing)}")
"""


def meet(world_size: int, deadlines: Sequence[float]) -> list[tuple[int, str, str]]:
    """Status, output and errors of the first ranks of ``world_size``, one for each of ``deadlines``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    shared |= {"GROUP_WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(deadline)],
            env={**os.environ, **shared, "RANK": str(rank), "GROUP_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, deadline in enumerate(deadlines)
    ]
    outputs = [rank.communicate() for rank in ranks]
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_three_nodes_meet_and_try_their_links() -> None:
    found = meet(3, [60, 60, 60])
    assert [code for code, _, _ in found] == [0, 0, 0], found
    assert found[0][1].startswith("preflight: all-reduce of 1 MiB over 3 ranks at ")
    assert [said for _, said, _ in found[1:]] == ["", ""], "rank 0 alone tells"


def test_a_rank_that_does_not_come_is_named_by_all_others() -> None:
    """Rank 0, whose process holds the store, gives up first."""
    for code, _, errors in meet(3, [8, 11]):
        assert code == 1 and "Rank(s) [2] did not come" in errors and "missing: [2]" in errors


@pytest.mark.parametrize(("planned", "warns"), [(50e9, True), (1e9, False), (None, False)])
def test_bandwidth_far_below_the_cluster_file_is_a_warning(planned: float | None, warns: bool) -> None:
    line = describe(0.064, 64 << 20, 2, planned)
    assert "64 MiB over 2 ranks at 1.05 GB/s" in line
    assert ("look at the network" in line) == warns


def die() -> list[str]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def fail() -> list[str]:
    raise NetworkCheckError("Rank(s) [3] did not come", [3], host="c4")


def block() -> list[str]:
    time.sleep(60)
    return []


@pytest.mark.parametrize(
    ("work", "words"),
    [(die, "status -9"), (fail, "did not come"), (lambda: [str(1 // 0)], "ZeroDivisionError"), (block, "within 1 s")],
    ids=["dies", "fails", "errs", "blocks"],
)
def test_work_apart_cannot_take_its_rank_with_it(work: Callable[[], list[str]], words: str) -> None:
    started = time.monotonic()
    with pytest.raises(NetworkCheckError, match=words) as error:
        run_in_fork(work, seconds=1)
    assert (list(error.value.missing), error.value.host) == (([3], "c4") if work is fail else ([], None))
    assert time.monotonic() - started < 10


def test_work_is_done_in_another_process() -> None:
    assert run_in_fork(lambda: ["a line", str(os.getppid())], seconds=10) == ["a line", str(os.getpid())]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("uncorrectable ECC")])
def test_a_broken_gpu_is_its_own_nodes_fault(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    """No other rank is waited for, and neither the network nor the size of the training is blamed."""

    def broken(*sizes: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(network_check.torch, "ones", broken)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NetworkCheckError) as found:
        network_check.check_all_reduce(False, None, print)
    assert found.value.host == socket.gethostname()
    told = RankError(rank=1, host="c1", time=0, kind="NetworkCheckError", message=str(found.value), traceback="")
    assert error_end(told) is EndReason.PREFLIGHT

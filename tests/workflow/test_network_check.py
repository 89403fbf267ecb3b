"""The network check between real ranks over gloo, each on its own simulated node."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from shardmake.launch.error_texts import error_end
from shardmake.run.attempt import RankError
from shardmake.run.attempt_history import EndReason
from shardmake.run.findings import Finding, Verdict, ok
from shardmake.train import network_check
from shardmake.train.network_check import CheckSettings, NetworkCheckError, describe_bandwidth, run_in_fork
from tests.fork_server import free_port

RANK = """
import sys
from shardmake.core.log import configure_logging
from shardmake.train.network_check import CheckSettings, NetworkCheckError, check_all_reduce
configure_logging()
try:
    check_all_reduce(CheckSettings(on_cpu=True, deadline=float(sys.argv[1])))
except NetworkCheckError as error:
    sys.exit(f"{error} missing: {list(error.missing)}")
"""


def check_network(world_size: int, deadlines: Sequence[float], per_node: int = 1) -> list[tuple[int, str, str]]:
    """Return exit status, stdout and stderr of the first ranks of ``world_size``, one for each of ``deadlines``."""
    sizes = {"WORLD_SIZE": world_size, "GROUP_WORLD_SIZE": world_size // per_node, "LOCAL_WORLD_SIZE": per_node}
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1, **sizes}
    ranks = []
    for rank, deadline in enumerate(deadlines):
        own = {"RANK": rank, "GROUP_RANK": rank // per_node, "LOCAL_RANK": rank % per_node}
        variables = os.environ | {name: str(value) for name, value in (shared | own).items()}
        command = [sys.executable, "-c", RANK, str(deadline)]
        ranks.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [rank.communicate() for rank in ranks]
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_three_nodes_measure_their_links() -> None:
    found = check_network(3, [60, 60, 60])
    assert [code for code, _, _ in found] == [0, 0, 0], found
    assert found[0][1].startswith("preflight: all-reduce of 1 MiB over 3 ranks at ")
    assert [output for _, output, _ in found[1:]] == ["", ""], "only rank 0 reports"


def test_two_nodes_measure_the_ranks_within_each() -> None:
    found = check_network(4, [60, 60, 60, 60], per_node=2)
    assert [code for code, _, _ in found] == [0, 0, 0, 0], found
    between, within = found[0][1].splitlines()
    assert between.startswith("preflight: all-reduce of 1 MiB over 4 ranks at ")
    assert within.startswith(f"preflight: all-reduce of 1 MiB over the 2 ranks of {socket.gethostname()} at ")


def test_all_ranks_name_the_missing_rank() -> None:
    """Rank 0, whose process serves the store, times out first."""
    for code, _, errors in check_network(3, [8, 11]):
        assert code == 1 and "Rank 2 did not join" in errors and "missing: [2]" in errors


@pytest.mark.parametrize(("planned", "warns"), [(50e9, True), (1e9, False), (None, False)])
def test_bandwidth_far_below_the_cluster_file_is_a_warning(planned: float | None, warns: bool) -> None:
    row = describe_bandwidth(0.064, 64 << 20, 2, planned)
    assert "64 MiB over 2 ranks at 1.05 GB/s" in row.found
    assert (row.verdict is Verdict.WARNING) == ("Check the network" in row.advice) == warns


def die() -> list[Finding]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def fail() -> list[Finding]:
    raise NetworkCheckError("Rank 3 did not join", [3], host="c4")


def block() -> list[Finding]:
    time.sleep(60)
    return []


@pytest.mark.parametrize(("work", "message"), [
    (die, "status -9"), (fail, "did not join"), (lambda: [ok("network", str(1 // 0))], "ZeroDivisionError"),
    (block, "within 1 s"),
], ids=["dies", "fails", "errs", "blocks"])  # fmt: skip
def test_failing_fork_does_not_end_its_rank(work: Callable[[], list[Finding]], message: str) -> None:
    started = time.monotonic()
    with pytest.raises(NetworkCheckError, match=message) as error:
        run_in_fork(work, seconds=1)
    assert (list(error.value.missing), error.value.host) == (([3], "c4") if work is fail else ([], None))
    assert time.monotonic() - started < 10


def test_work_runs_in_another_process() -> None:
    assert run_in_fork(lambda: [ok("network", str(os.getppid()))], seconds=10) == [ok("network", str(os.getpid()))]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("uncorrectable ECC")])
def test_broken_gpu_blames_its_node(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    """The rank waits for no other rank, and blames neither the network nor the size of the training."""

    def broken(*sizes: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(network_check.torch, "ones", broken)
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(NetworkCheckError) as found:
        network_check.check_all_reduce(CheckSettings(on_cpu=False, deadline=60))
    assert found.value.host == socket.gethostname()
    record = RankError(rank=1, host="c1", time=0, kind="NetworkCheckError", message=str(found.value), traceback="")
    assert error_end(record) is EndReason.PREFLIGHT

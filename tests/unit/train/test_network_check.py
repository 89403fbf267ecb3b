"""The network check with and without ranks, and the end of ranks and the timeouts of their process groups."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardmake.launch.error_texts import error_end
from shardmake.launch.jobs import attempt_settings
from shardmake.run.attempt import AttemptDir, RankError
from shardmake.run.attempt_history import EndReason
from shardmake.run.findings import Finding, Verdict, ok
from shardmake.train import network_check
from shardmake.train.__main__ import _check_network
from shardmake.train.network_check import (
    MIN_NODES,
    CheckSettings,
    NetworkCheckError,
    describe_bandwidth,
    describe_node,
    message_size,
    rounds,
    run_in_fork,
    slow_links,
)
from shardmake.train.process_group import extend_timeouts
from tests.fork_server import free_port
from tests.unit.plans import make_cluster, make_plan


@given(st.integers(MIN_NODES, 200))
def test_each_link_is_measured_once_without_a_shared_node(nodes: int) -> None:
    assert sorted(link for links in rounds(nodes) for link in links) == list(range(nodes))
    for links in rounds(nodes):
        busy = [node for link in links for node in (link, (link + 1) % nodes)]
        assert len(busy) == len(set(busy))


def test_both_links_of_a_slow_node_are_reported_with_three_nodes() -> None:
    found = slow_links([0.001, 0.1, 0.1], 1 << 20, ["c1", "c2", "c3"])
    assert [row.found.partition("from ")[2].partition(" reaches")[0] for row in found] == ["c1 to c2", "c2 to c3"]
    assert "reaches 0.01 GB/s; the fastest link of this job reaches 1.05 GB/s" in found[0].found
    assert slow_links([0.001, 0.0015, 0.002], 1 << 20, ["c1", "c2", "c3"]) == []


@pytest.mark.parametrize(("free_gib", "probe_seconds", "mib"), [
    (79, 0.0005, 1024), (3, 0.0005, 512), (79, 0.1, 512), (79, 1.1, 64), (0.1, 0.0005, 64),
], ids=["fast", "little-memory", "10-gbit", "1-gbit", "no-memory"])  # fmt: skip
def test_messages_fill_a_fast_link_and_take_about_a_second(free_gib: float, probe_seconds: float, mib: int) -> None:
    assert message_size(int(free_gib * 2**30), probe_seconds) == mib << 20


@pytest.mark.parametrize(("seconds", "pairs", "planned", "words"), [
    (0.005, 0, 450e9, None), (0.05, 0, 450e9, "PCIe instead of NVLink"),
    (0.2, 56, 450e9, "56 pairs of GPUs have no peer-to-peer access (P2P) and exchange data through host memory"),
    (0.2, 56, 32e9, None), (0.2, 0, None, None),
])  # fmt: skip
def test_gpus_are_compared_with_the_link(seconds: float, pairs: int, planned: float | None, words: str | None) -> None:
    row = describe_node(seconds, pairs, "c2", 1 << 30, 8, planned)
    assert row.found.startswith("all-reduce of 1024 MiB over the 8 ranks of c2 at ")
    assert (row.verdict is Verdict.WARNING) == (words is not None)
    assert words is None or (words in row.advice and "far below 450.0 GB/s" in row.found)


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AttemptDir:
    """An attempt of two nodes with two GPUs each, as its rank 1 sees it."""
    folder = AttemptDir(tmp_path / "train/attempts/001")
    cluster = make_cluster(scratch=str(tmp_path), accelerator="h100", network_check_seconds=30)
    settings = attempt_settings(1, tmp_path, cluster, make_plan("ddp"), resume_from=None, settings_digest="r")
    assert (settings.planned_node_bandwidth, settings.network_check_seconds) == (450e9, 30)
    settings.write(folder.settings)
    folder.stacks.mkdir()
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def fail_like_nccl(rank: int) -> None:
    if file := os.environ.get("NCCL_DEBUG_FILE"):
        Path(file).write_text(f"NCCL {os.environ['NCCL_DEBUG']} NET/Socket : no interface found")
    raise NetworkCheckError(f"Rank {rank} cannot use its GPU", host="c1")


def test_the_messages_of_nccl_are_kept_if_the_check_fails(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_check, "_check_gpu", fail_like_nccl)
    with pytest.raises(NetworkCheckError) as error:
        _check_network(attempt, 1)
    kept = attempt.stacks / "nccl-debug-rank-1.txt"
    assert str(error.value) == f"Rank 1 cannot use its GPU. NCCL's messages are in {kept}"
    assert error.value.host == "c1"
    assert kept.read_text() == "NCCL INFO NET/Socket : no interface found"
    assert "NCCL_DEBUG" not in os.environ, "the training itself does not write them"


def test_nccls_messages_go_after_success_or_by_choice(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_check, "_check", lambda settings: settings.nccl_log.write_text("INFO") and [])
    _check_network(attempt, 1)
    monkeypatch.undo()
    monkeypatch.setattr(network_check, "_check_gpu", fail_like_nccl)
    for name, value in {"NCCL_DEBUG": "WARN", "RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NetworkCheckError, match=r"cannot use its GPU$"):
        _check_network(attempt, 1)
    assert list(attempt.stacks.iterdir()) == []


def test_an_error_of_the_all_reduce_names_the_node_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu7")
    both_joined = SimpleNamespace(add=lambda key, amount: 2)
    explained = network_check._explain(RuntimeError("uncorrectable NVLink error"), both_joined, 2)
    assert (explained.host, explained.missing) == ("gpu7", ())


ENDING_RANK = """
import atexit, sys, threading, time
from shardmake.train.process_group import end_process

def upload():
    time.sleep(0.3)
    print("the thread ended", flush=True)

atexit.register(print, "atexit ran")
threading.Thread(target=upload).start()
sys.stdout.write("buffered")
end_process()
"""


def test_rank_ends_after_its_threads_and_exit_handlers() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING_RANK], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "bufferedthe thread ended\natexit ran\n", "")


def test_every_process_group_gets_the_timeout(one_rank: None) -> None:
    """Torch gives a group that an engine creates the default timeout."""
    groups = [dist.group.WORLD, dist.new_group([0])]
    extend_timeouts(timedelta(seconds=7200))
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert [backend.options._timeout for backend in backends] == [timedelta(seconds=7200)] * 2


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
        merged = os.environ | {name: str(value) for name, value in (shared | own).items()}
        command = [sys.executable, "-c", RANK, str(deadline)]
        ranks.append(subprocess.Popen(command, env=merged, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
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

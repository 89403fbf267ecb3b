"""Every verdict about a compute node that needs no GPU, about bandwidths, and about transports in NCCL's log."""

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.core.environment import library_versions
from shardmake.core.units import GIB
from shardmake.doctor import host
from shardmake.doctor.job import make_request
from shardmake.doctor.network import Bandwidths, judge_bandwidths, parse_transports
from shardmake.launch.rendezvous import RendezvousError
from shardmake.run.findings import Finding, Verdict
from tests.unit.plans import make_cluster

OK, WARNING, STOPS, NOT_CHECKED = Verdict.OK, Verdict.WARNING, Verdict.STOPS, Verdict.NOT_CHECKED


@pytest.mark.parametrize(("adapters", "limit", "verdict"), [
    ([], 65536, OK), (["mlx5_0"], resource.RLIM_INFINITY, OK), (["mlx5_0", "mlx5_1"], 65536 << 10, STOPS),
])  # fmt: skip
def test_locked_memory_matters_with_infiniband(adapters: list[str], limit: int, verdict: Verdict) -> None:
    found = host.check_memlock(adapters, limit)
    assert found.verdict is verdict
    assert verdict is OK or ("64 MiB with mlx5_0, mlx5_1" in found.found and "LimitMEMLOCK" in found.advice)


@pytest.mark.parametrize(("check", "value", "verdict"), [
    (host.check_shared_memory, 64 << 20, WARNING), (host.check_shared_memory, GIB, OK),
    (host.check_shared_memory, 500 * GIB, OK), (host.check_open_files, 256, WARNING),
    (host.check_open_files, 1024, OK), (host.check_open_files, resource.RLIM_INFINITY, OK),
])  # fmt: skip
def test_limits(check: Callable[[int], Finding], value: int, verdict: Verdict) -> None:
    assert check(value).verdict is verdict


def test_environment_and_versions() -> None:
    here = library_versions()
    assert [row.verdict for row in host.check_environment(sys.prefix, here)] == [OK]
    assert [row.verdict for row in host.check_environment("/elsewhere/.venv", here)] == [WARNING]
    (found,) = host.check_environment(sys.prefix, here | {"torch": "2.12.0"})
    assert found.verdict is STOPS and "on the login node" in found.found


def test_cores_the_hubs_cache_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    found = host.check_size(100_000)
    assert found.verdict is WARNING and "100000 cores were requested" in found.found
    assert host.check_size(1).verdict is host.check_cache_readable(str(tmp_path)).verdict is OK
    assert host.check_cache_readable(str(tmp_path / "new")).verdict is NOT_CHECKED
    assert host.check_writable(tmp_path).verdict is OK and host.check_writable(tmp_path / "missing").verdict is STOPS


def test_a_scratch_folder_must_hold_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_scratch_folder(str(tmp_path)).verdict is OK
    missing = host.check_scratch_folder(f"{tmp_path}/missing")
    assert missing.verdict is STOPS and "does not exist" in missing.found
    monkeypatch.setattr(host.subprocess, "run", Mock(side_effect=PermissionError(13, "Permission denied")))
    mounted_noexec = host.check_scratch_folder(str(tmp_path))
    assert mounted_noexec.verdict is STOPS and "noexec" in mounted_noexec.advice
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_compilers_for_offload(tmp_path: Path) -> None:
    request = make_request(make_cluster(nvme_path=None), 1, build_kernels=False)
    missing = {"CXX": str(tmp_path / "g++"), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    (found,) = host.check_build_tools(request, missing)
    assert found.verdict is WARNING and "No such file" in found.found
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "g++").chmod(0o755)
    assert [row.verdict for row in host.check_build_tools(request, missing)] == [OK]


def test_nvme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row.verdict for row in host.check_nvme(str(tmp_path))] == [OK]
    assert [row.verdict for row in host.check_nvme(str(tmp_path / "missing"))] == [STOPS]
    rows = (f"/dev/nvme0n1p1 {tmp_path} xfs rw 0 0", "/dev/sda1 / ext4 rw 0 0", "/dev/nvme1n1 /none ext4 rw 0 0")
    (mounts := tmp_path / "mounts").write_text("\n".join(rows))
    assert list(host.writable_nvme(mounts)) == [str(tmp_path)]
    monkeypatch.setattr(host, "writable_nvme", lambda: {"/local": 3000.0})
    (unused,) = host.check_nvme(None)
    assert unused.verdict is NOT_CHECKED and "/local (3000 GiB free)" in unused.found


class Up:
    isup = True


@pytest.mark.parametrize(("configured", "chosen", "up", "verdict"), [
    (None, "eth0", ["lo", "eth0"], OK), (None, "eth0", ["lo", "eth0", "ib0"], WARNING),
    (None, "eth0", ["eth0", "hsn0"], WARNING), ("eth0", "eth0", ["eth0", "ib0"], OK), (None, "ib0", ["ib0", "ib1"], OK),
])  # fmt: skip
def test_a_faster_interface_that_is_not_used(
    monkeypatch: pytest.MonkeyPatch, configured: str | None, chosen: str, up: list[str], verdict: Verdict
) -> None:
    monkeypatch.setattr(host, "choose_address", lambda interface, nodes: (chosen, "10.0.0.1"))
    monkeypatch.setattr(host.psutil, "net_if_stats", lambda: dict.fromkeys(up, Up))
    assert host.check_interface(configured, 1).verdict is verdict
    missing = RendezvousError("node7 has no address on the interface 'ib9'")
    monkeypatch.setattr(host, "choose_address", Mock(side_effect=missing))
    found = host.check_interface("ib9", 2)
    assert found.verdict is STOPS and "ib9" in found.found


def on_two_nodes(check: Callable[[Path, int, int], Finding], folder: Path) -> list[Finding]:
    """Run a check as two nodes at the same time."""
    with ThreadPoolExecutor(2) as nodes:
        return list(nodes.map(lambda rank: check(folder, rank, 2), range(2)))


def test_two_nodes_see_each_others_files_and_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row.verdict for row in on_two_nodes(host.check_visibility, tmp_path)] == [OK, OK]
    assert [row.verdict for row in on_two_nodes(host.check_shared_lock, tmp_path)] == [OK, OK]


def test_files_that_do_not_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = host.check_visibility(tmp_path, 0, 2, seconds=0.2)
    assert found.verdict is STOPS and "after 0 s" in found.found
    monkeypatch.setattr(host, "SLOW_SECONDS", -1.0)
    (late, _) = on_two_nodes(host.check_visibility, tmp_path / "late")
    assert late.verdict is WARNING and "latency-wait" in late.advice
    alone = host.check_visibility(tmp_path, 0, 1)
    assert alone.verdict is NOT_CHECKED and "--nodes 2" in alone.advice


def test_locks_that_do_not_count_on_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, name in enumerate(("first", "other")):  # whose other node never tries the lock
        (tmp_path / name).mkdir()
        assert host.check_shared_lock(tmp_path / name, node, 2, seconds=0.2).verdict is NOT_CHECKED
    assert host.check_shared_lock(tmp_path / "missing", 0, 1).verdict is NOT_CHECKED
    monkeypatch.setattr(host.fcntl, "flock", lambda file, operation: None)
    _, other = on_two_nodes(host.check_shared_lock, tmp_path)
    assert other.verdict is WARNING


INFINIBAND = """\
node7:31337:31402 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.1.0.7<0>
node7:31337:31402 [0] NCCL INFO 24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels
node7:31337:31410 [0] NCCL INFO Channel 00/0 : 0[0] -> 7[7] via P2P/CUMEM/read
node7:31337:31410 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
"""
SOCKETS = """\
node7:100:120 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
node7:100:120 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/0
"""
NVLINK_SHARP = "node7:1:2 [0] NCCL INFO 16 coll channels, 16 collnet channels, 16 nvls channels, 16 p2p channels\n"


@pytest.mark.parametrize(("text", "transports"), [
    (INFINIBAND, ["GDRDMA", "NET/IB", "P2P"]), (SOCKETS, ["NET/Socket", "SHM"]), (NVLINK_SHARP, ["NVLS"]), ("", []),
])  # fmt: skip
def test_transports_in_nccls_log(text: str, transports: list[str]) -> None:
    assert parse_transports(text) == transports


@pytest.mark.parametrize(("accelerator", "intra", "transports", "verdict"), [
    ("h100", 360.0, ["NVLS", "P2P"], OK), ("h100", 40.0, ["SHM"], WARNING), ("a100-80gb", 230.0, ["P2P"], OK),
    ("a100-80gb", 20.0, ["P2P"], WARNING), ("cpu", 0.5, [], OK), ("cpu", None, [], NOT_CHECKED),
])  # fmt: skip
def test_bandwidth_in_a_node(accelerator: str, intra: float | None, transports: list[str], verdict: Verdict) -> None:
    measured = Bandwidths(backend="nccl", size=1 << 30, intra=intra, inter=None)
    within, between = judge_bandwidths(measured, make_cluster(accelerator=accelerator), transports)
    assert within.verdict is verdict and between.verdict is NOT_CHECKED
    assert ("NCCL does not use P2P" in within.found) == (transports == ["SHM"])


@pytest.mark.parametrize(
    ("inter", "planned", "verdict"), [(40.0, 50.0, OK), (20.0, 50.0, OK), (10.0, 50.0, WARNING), (1.0, 12.5, WARNING)]
)
def test_bandwidth_between_nodes_against_the_cluster_file(inter: float, planned: float, verdict: Verdict) -> None:
    cluster = make_cluster(accelerator="h100", inter_node_gbps=planned)
    measured = Bandwidths(backend="nccl", size=1 << 30, intra=300.0, inter=inter)
    found = judge_bandwidths(measured, cluster, ["NET/IB"])[1]
    assert found.verdict is verdict and "1024 MiB with nccl (NET/IB)" in found.found
    assert (f"{planned:g} GB/s" in found.found) == (verdict is WARNING)

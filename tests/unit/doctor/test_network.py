"""Verdicts about bandwidths, transports in NCCL's log, and ranks that fail."""

import pytest

from shardmake.doctor.network import Bandwidths, judge_bandwidths, parse_transports
from shardmake.run.findings import Verdict
from tests.unit.plans import make_cluster

OK, WARNING, STOPS, NOT_CHECKED = Verdict.OK, Verdict.WARNING, Verdict.STOPS, Verdict.NOT_CHECKED

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

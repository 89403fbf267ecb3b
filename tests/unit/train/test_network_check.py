import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.launch.jobs import attempt_settings
from shardmake.run.attempt import AttemptDir
from shardmake.run.findings import Verdict
from shardmake.train import network_check
from shardmake.train.__main__ import _check_network
from shardmake.train.network_check import MIN_NODES, NetworkCheckError, describe_node, message_size, rounds, slow_links
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

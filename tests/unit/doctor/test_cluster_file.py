"""A cluster from sinfo, and a cluster file with measured values that the configuration loads."""

from pathlib import Path
from typing import Any

import pytest

from shardmake.config.load import load_cluster
from shardmake.config.models import Cluster, Slurm
from shardmake.core.errors import ShardmakeError
from shardmake.doctor.cluster_file import compose, draft_cluster, write_cluster
from shardmake.doctor.job import make_request
from shardmake.doctor.records import NodeFacts, NodeReport
from shardmake.memory.hardware import from_cluster
from shardmake.plan.limits import parse_partitions
from shardmake.plan.step_time import LINK_SHARE
from shardmake.run.findings import Verdict
from tests.unit.doctor.recorded import SINFO
from tests.unit.plans import make_cluster

PARTITIONS = parse_partitions(SINFO)
HYPHENS = parse_partitions("a100|4|64|515000|infinite|gpu:nvidia_a100-sxm4-80gb:8|(null)\n")
TWO_TYPES = parse_partitions("gpu*|4|64|515000|1:00:00|gpu:a100:8,gpu:a30:2|(null)\n")
SLICES = parse_partitions(
    "CLUSTER: one\nPARTITION|NODES|CPUS|MEMORY|TIMELIMIT|GRES|AVAIL_FEATURES\ngpu*|4|64|515000|1:00:00|gpu:1g.10gb:28|(null)\ngpu*|9|64|515000|1:00:00|gpu:a100:6,gpu:1g.10gb:28|(null)\n"
)
UNTYPED = parse_partitions("gpu*|4|64|515000|1:00:00|gpu:4|(null)\n")


def test_a_partition_becomes_the_cluster_of_its_largest_gpu_nodes() -> None:
    cluster = draft_cluster(Slurm(partition="gpu", account="lab", qos="long"), PARTITIONS)
    assert (cluster.accelerator, cluster.processes_per_node, cluster.cpus_per_node) == ("h100", 8, 96)
    assert (cluster.max_nodes, cluster.memory_gib_per_node) == (16, 1006)
    assert cluster.slurm.gpu_type == "h100" and cluster.slurm.gpu_request == "gres"
    assert (cluster.slurm.account, cluster.slurm.qos, cluster.slurm.time_limit) == ("lab", "long", "24:00:00")


@pytest.mark.parametrize(("partitions", "options", "expected"), [
    (PARTITIONS, Slurm(partition="gpu", gpu_type="v100"), ("v100-16gb", 4, "v100", "gres")),
    (PARTITIONS, Slurm(partition="gpu", constraint="v100"), ("v100-16gb", 4, "v100", "gres")),
    (PARTITIONS, Slurm(), ("cpu", 2, None, "none")),
    (HYPHENS, Slurm(partition="a100"), ("a100-40gb", 8, "nvidia_a100-sxm4-80gb", "gres")),
    (TWO_TYPES, Slurm(), ("a100-40gb", 8, "a100", "gres")),
    (TWO_TYPES, Slurm(gpu_type="A30"), ("a30", 2, "a30", "gres")), (SLICES, Slurm(), ("a100-40gb", 6, "a100", "gres")),
    (SLICES, Slurm(gpu_type="1g.10gb"), ("a100-80gb", 28, "1g.10gb", "gres")),
    (UNTYPED, Slurm(), ("a100-80gb", 4, None, "gres")),
])  # fmt: skip
def test_options_choose(partitions: dict[str, Any], options: Slurm, expected: tuple[str, int, str | None, str]) -> None:
    cluster = draft_cluster(options, partitions)
    slurm = cluster.slurm
    assert (cluster.accelerator, cluster.processes_per_node, slurm.gpu_type, slurm.gpu_request) == expected


@pytest.mark.parametrize(("partitions", "options", "words"), [
    (PARTITIONS, Slurm(partition="gpus"), "no partition 'gpus'. Did you mean 'gpu'?"),
    (PARTITIONS, Slurm(partition="gpu", gpu_type="b200"), "Its GPU types are: h100, v100"),
    (PARTITIONS, Slurm(partition="gpu", constraint="b200"), "No node of partition 'gpu'"),
    (HYPHENS, Slurm(), "no default partition. Use --partition with one of: a100"),
])  # fmt: skip
def test_options_that_no_node_satisfies(partitions: dict[str, Any], options: Slurm, words: str) -> None:
    with pytest.raises(ShardmakeError) as error:
        draft_cluster(options, partitions)
    assert words in str(error.value)


H100 = NodeFacts(
    gpu_name="NVIDIA H100 80GB HBM3", gpu_memory_gib=79.1, intra_gbps=350.0, inter_gbps=35.0, network_interface="ib0",
    nvme={"/local": 2900.0},
)  # fmt: skip


def reports(*facts: NodeFacts) -> list[NodeReport]:
    named = enumerate(facts)
    return [NodeReport(node_rank=at, host=f"c{at + 1}", findings=[], facts=fact, seconds=1.0) for at, fact in named]


def written(tmp_path: Path, cluster: Cluster, *facts: NodeFacts, drafted: bool) -> tuple[Cluster, str]:
    """Write the file as the command does, and return it as the configuration reads it, and its text."""
    request = make_request(cluster, len(facts), build_kernels=False)
    text, _ = compose(request, reports(*facts), drafted=drafted)
    write_cluster(tmp_path / "cluster.yaml", text, force=False)
    return load_cluster(tmp_path / "cluster.yaml"), text


def test_a_drafted_cluster_gets_the_measured_values(tmp_path: Path) -> None:
    drafted = draft_cluster(Slurm(partition="gpu", account="lab"), PARTITIONS)
    slower = H100.model_copy(update={"inter_gbps": 30.0, "nvme": {"/local": 2800.0, "/other": 1.0}})
    cluster, text = written(tmp_path, drafted, H100, slower, drafted=True)
    assert (cluster.accelerator, cluster.gpu_memory_gib, cluster.network_interface) == ("h100", 79.1, "ib0")
    assert cluster.slurm == drafted.slurm
    hardware = from_cluster(cluster)
    assert hardware.intra_node * LINK_SHARE == pytest.approx(350e9, rel=0.01), "the step time uses what was measured"
    assert hardware.inter_node * LINK_SHARE == pytest.approx(30e9, rel=0.01), "the slower node counts"
    assert "# nvme_path: /local  # writable NVMe, with nvme_gib_per_node: 2800" in text
    assert "an all-reduce reached 30 GB/s" in text and "c1, c2" in text


def test_the_driver_and_not_sinfo_decides_which_gpu_it_is(tmp_path: Path) -> None:
    drafted = draft_cluster(Slurm(partition="a100"), HYPHENS)
    facts = NodeFacts(gpu_name="NVIDIA A100-SXM4-80GB", gpu_memory_gib=79.1)
    cluster, text = written(tmp_path, drafted, facts, drafted=True)
    assert cluster.accelerator == "a100-80gb" and cluster.slurm.gpu_type == "nvidia_a100-sxm4-80gb"
    assert "inter_node_gbps was not measured" in text and cluster.network_interface is None


UNKNOWN = NodeFacts(gpu_name="NVIDIA X1", gpu_memory_gib=80.0)


@pytest.mark.parametrize(("by_hand", "facts", "words"), [
    (None, NodeFacts(), "CUDA did not start on a node"),
    (make_cluster(accelerator="h100"), NodeFacts(), "CUDA did not start on a node"),
    (None, UNKNOWN, "the catalogue has no GPU NVIDIA X1 with 80 GiB"),
])  # fmt: skip
def test_no_file_is_written_with_a_guessed_gpu(by_hand: Cluster | None, facts: NodeFacts, words: str) -> None:
    request = make_request(by_hand or draft_cluster(Slurm(), UNTYPED), 1, build_kernels=False)
    text, (found,) = compose(request, reports(facts), drafted=by_hand is None)
    assert text == "" and found.verdict is Verdict.NOT_CHECKED and words in found.found


def test_a_cluster_file_keeps_what_a_person_wrote(tmp_path: Path) -> None:
    by_hand = make_cluster(
        executor="slurm", accelerator="a100-80gb", network_interface="ib1", hang_seconds=900,
        slurm={"partition": "gpu", "setup": ["module load cuda"], "extra": {"reservation": "course"}},
    )  # fmt: skip
    request = make_request(by_hand, 1, build_kernels=False)
    text, (found,) = compose(request, reports(H100), drafted=False)
    assert found.verdict is Verdict.WARNING and "the nodes have h100" in found.found
    write_cluster(tmp_path / "new.yaml", text, force=False)
    cluster = load_cluster(tmp_path / "new.yaml")
    assert (cluster.accelerator, cluster.network_interface, cluster.hang_seconds) == ("h100", "ib1", 900)
    assert cluster.slurm == by_hand.slurm and cluster.nvme_path == by_hand.nvme_path


def test_a_cpu_cluster_and_an_unknown_gpu_keep_the_accelerator_that_a_person_chose(tmp_path: Path) -> None:
    by_hand = make_cluster(accelerator="l40s")
    text, findings = compose(make_request(by_hand, 1, build_kernels=False), reports(UNKNOWN), drafted=False)
    assert "accelerator: l40s" in text and "gpu_memory_gib: 80.0" in text and findings == []
    cluster, text = written(tmp_path, make_cluster(), NodeFacts(intra_gbps=0.7), drafted=False)
    assert cluster.accelerator == "cpu" and cluster.gpu_memory_gib is None
    assert cluster.intra_node_gbps == 1.0 and "0.7 GB/s" in text


def test_an_existing_file_is_overwritten_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("mine\n")
    with pytest.raises(ShardmakeError, match=r"exists.*--force"):
        write_cluster(path, "new\n", force=False)
    assert path.read_text() == "mine\n"
    write_cluster(path, "new\n", force=True)
    assert path.read_text() == "new\n"

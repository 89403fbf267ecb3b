"""A request that can never run is refused, with what sinfo reports."""

import pytest

from shardmake.config.models import Cluster
from shardmake.core.errors import ShardmakeError
from shardmake.plan.limits import NodeGroup, check_request, parse_gpus, parse_partitions, satisfies
from shardmake.run.plan import Plan, Resources
from tests.unit.plans import make_cluster, make_plan

SINFO = """\
gpu*|3|2|8000|infinite|(null)|(null)
urgent|3|2|8000|1-00:00:00|(null)|(null)
mixed|16|96|1031000|2:30|gpu:h100:8(S:0-1),nvme:1|h100,ib
mixed|8|40|385000+|2:30|gpu:v100:4|v100,ib
mixed|4|64|515000|2:30|gpu:nvidia_a100-sxm4-80gb:8|a100
mixed|2|128|2063000|2:30|(null)|highmem
"""
PARTITIONS = parse_partitions(SINFO)


def plan(nodes: int = 2, memory_gib: int = 4, cpus: int = 2) -> Plan:
    resources = {"train": Resources(memory_gib=memory_gib, cpus=cpus)}
    return make_plan("zero3", nodes=nodes).model_copy(update={"run": "demo", "resources": resources})


def cluster(accelerator: str = "cpu", **slurm: object) -> Cluster:
    values = {"executor": "slurm", "accelerator": accelerator, "cpus_per_node": 2, "memory_gib_per_node": 7}
    return make_cluster(**values, slurm={"partition": "gpu", **slurm})


def test_rows_of_sinfo_become_groups_of_nodes() -> None:
    assert PARTITIONS["gpu"].is_default and PARTITIONS["gpu"].time_limit_minutes is None
    assert PARTITIONS["urgent"].time_limit_minutes == 1440
    mixed = PARTITIONS["mixed"]
    assert not mixed.is_default and mixed.time_limit_minutes == 2
    assert mixed.groups[1] == NodeGroup(8, 40, 385000, {"v100": 4}, frozenset({"v100", "ib"}))
    assert mixed.groups[3].gpus == {} and mixed.groups[3].features == {"highmem"}


def test_a_row_of_another_form_is_reported() -> None:
    with pytest.raises(ShardmakeError, match=r"Cannot read a row of sinfo: 'gpu\*\|3\|2'"):
        parse_partitions("gpu*|3|2\n")


@pytest.mark.parametrize(("gres", "gpus"), [
    ("(null)", {}), ("gpu:4", {"": 4}), ("gpu", {"": 1}), ("gpu:a100:8", {"a100": 8}), ("gpu:a100", {"a100": 1}),
    ("gpu:nvidia_a100-sxm4-80gb:8(S:0,2,4,6)", {"nvidia_a100-sxm4-80gb": 8}),
    ("gpu:a100_1g.5gb:7,gpu:a100_3g.20gb:2", {"a100_1g.5gb": 7, "a100_3g.20gb": 2}),
    ("shard:16,gpu:l40s:4,nvme:2", {"l40s": 4}),
])  # fmt: skip
def test_gpus_of_generic_resources(gres: str, gpus: dict[str, int]) -> None:
    assert parse_gpus(gres) == gpus


@pytest.mark.parametrize(("constraint", "may_match"), [
    (None, True), ("h100", True), ("a100", False), ("h100&ib", True), ("h100,ib", True), ("h100&a100", False),
    ("a100|h100", True), ("a100|v100", False), ("a100|v100&ib", False), ("a100&v100|ib", True), ("[rack1|rack2]", True),
    ("a100*2&ib*4", True),
])  # fmt: skip
def test_features_against_a_constraint(constraint: str | None, may_match: bool) -> None:
    assert satisfies({"h100", "ib"}, constraint) is may_match


MIXED = {"partition": "mixed", "time_limit": "0:02:00"}


@pytest.mark.parametrize(("asked", "on"), [
    (plan(), cluster(time_limit="0:02:00")), (plan(nodes=3), cluster(partition=None)),
    (plan(nodes=16, cpus=96, memory_gib=1000), cluster(constraint="h100", **MIXED)),
    (plan(nodes=2, cpus=128, memory_gib=2000), cluster(constraint="highmem", **MIXED)),
    (plan(nodes=18, cpus=96), cluster(**MIXED)), (plan(), cluster(cpu_partition="mixed", stage_time_limit="0:02:00")),
    # The GPU type decides which nodes count: small old nodes in the same partition do not matter.
    (plan(nodes=16, cpus=96), cluster("h100", gpu_type="h100", **MIXED)),
    (plan(nodes=4), cluster("a100-80gb", gpu_type="nvidia_a100-sxm4-80gb", **MIXED)),
    (plan(nodes=28), cluster("h100", **MIXED)), (plan(nodes=30), cluster("h100", gpu_request="none", **MIXED)),
    (plan(), cluster(partition="urgent,gpu", time_limit="2-00:00:00")),  # in the second one
    (plan(), cluster("h100", gpu_type="h100", partition="gpu,mixed", time_limit="0:02:00")),
])  # fmt: skip
def test_a_request_within_the_limits_passes(asked: Plan, on: Cluster) -> None:
    check_request(asked, on, PARTITIONS)


@pytest.mark.parametrize("shown", [SINFO.replace("gpu*", "gpu"), ""])
def test_where_the_sites_plug_in_chooses_the_partition_any_one_suffices(shown: str) -> None:
    """There is no default partition, or sinfo shows this user none."""
    check_request(plan(nodes=16), cluster(partition=None, time_limit="0:02:00"), parse_partitions(shown))


def test_memory_for_which_slurm_is_not_asked_is_not_compared() -> None:
    """Without RealMemory in its configuration, Slurm reports 1 MiB."""
    bare = parse_partitions("gpu*|3|2|1|infinite|(null)|(null)\n")
    check_request(plan(), cluster(memory="none"), bare)
    with pytest.raises(ShardmakeError, match="its nodes have up to 0 GiB"):
        check_request(plan(), cluster(), bare)


@pytest.mark.parametrize(
    ("asked", "on", "words"),
    [
        (plan(), cluster(partition="gpus"), r"no partition 'gpus'. Did you mean 'gpu'\? This cluster has: gpu, urgent"),
        (plan(), cluster(partition="gpu,gpus"), r"no partition 'gpus'. Did you mean 'gpu'"),
        (plan(), cluster(partition="mixed,urgent", time_limit="2-00:00:00"), r"longer than the 2 minutes that partition 'mixed'"),
        (plan(), cluster(partition="urgent", cpu_partition="mixed,gpu", time_limit="2-00:00:00"), r"longer than the 1440"),
        (plan(nodes=4), cluster(), r"takes 4 nodes, but partition 'gpu' has 3. Set runs.demo.nodes"),
        (plan(memory_gib=9), cluster(), r"2 nodes with 9 GiB of memory each.*has 0; its nodes have up to 8 GiB"),
        (plan(cpus=9), cluster(), r"2 nodes with 9 cores each.*has 0; its nodes have up to 2. Set cpus_per_node"),
        (plan(nodes=17, cpus=96), cluster("h100", gpu_type="h100", **MIXED), r"17 nodes with 2 GPUs of type h100 each.*has 16"),
        (plan(), cluster("h200", gpu_type="h200", **MIXED), r"has 0; its nodes have 4 v100, 8 h100, 8 nvidia_a100-sxm4-80gb, no GPUs"),
        (plan(), cluster("h100"), r"2 GPUs each, but partition 'gpu' has 0; its nodes have no GPUs. Correct processes_per_node"),
        (plan(), cluster(constraint="b200", **MIXED), r"the features b200, but .* has 0; its nodes have a100, h100, highmem, ib"),
        (plan(nodes=9), cluster(constraint="v100", **MIXED), r"9 nodes with the features v100, but partition 'mixed' has 8"),
        (plan(cpus=64), cluster(constraint="v100", **MIXED), r"64 cores each.*has 0; its nodes have up to 40"),
        (plan(), cluster(partition="urgent", time_limit="2-00:00:00"), r"time_limit: 2-00:00:00 is longer than the 1440"),
        (plan(), cluster(cpu_partition="mixd"), r"slurm.cpu_partition: there is no partition 'mixd'. Did you mean 'mixed'"),
        (plan(), cluster(cpu_partition="mixed"), r"stage_time_limit: 24:00:00 is longer than the 2 minutes that partition 'mixed'"),
        (plan(), cluster(partition="urgent", stage_time_limit="2-00:00:00"), r"stage_time_limit: 2-00:00:00 is longer.*'urgent'"),
    ],
)  # fmt: skip
def test_a_request_beyond_the_limits_is_rejected(asked: Plan, on: Cluster, words: str) -> None:
    with pytest.raises(ShardmakeError, match=words):
        check_request(asked, on, PARTITIONS)

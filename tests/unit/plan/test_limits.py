"""A request that can never run is refused, by the words of sinfo."""

import pytest

from shardmake.config.models import Cluster
from shardmake.core.errors import ShardmakeError
from shardmake.plan.limits import check_request, parse_partitions
from shardmake.run.plan import Choice, Plan, Resources, Workload

SINFO = "gpu*|3|2|8000|infinite\nurgent|3|2|8000|1-00:00:00\nmixed|2|64|515000+|2:30\nmixed|1|32|257000|2:30\n"
PARTITIONS = parse_partitions(SINFO)


def plan(nodes: int = 2, memory_gib: int = 4, cpus: int = 2) -> Plan:
    return Plan(
        run="demo",
        choice=Choice(
            strategy="zero3", gradient_checkpointing=False, micro_batch_size=1, gradient_accumulation_steps=1,
            nodes=nodes, processes_per_node=2, precision="bf16",
        ),
        workload=Workload(
            model="m", sequence_length=8, packing=True, objective="sft", method="full", optimizer="adamw", attention="sdpa", loss="plain"
        ),
        reason="", rejected={}, fallbacks=[], host_memory=1 << 30,
        resources={"train": Resources(memory_gib=memory_gib, cpus=cpus)},
    )  # fmt: skip


def cluster(**slurm: object) -> Cluster:
    return Cluster.model_validate(
        {
            "executor": "slurm",
            "processes_per_node": 2,
            "cpus_per_node": 2,
            "memory_gib_per_node": 7,
            "slurm": {"partition": "gpu", **slurm},
        }
    )


def test_parse_sinfo() -> None:
    assert PARTITIONS["gpu"].is_default and PARTITIONS["gpu"].time_limit_minutes is None
    assert PARTITIONS["urgent"].time_limit_minutes == 1440
    mixed = PARTITIONS["mixed"]
    assert (mixed.nodes, mixed.cpus, mixed.memory_mib, mixed.time_limit_minutes) == (3, 32, 257000, 2)


def test_a_request_within_the_limits_passes() -> None:
    check_request(plan(), cluster(), PARTITIONS)
    check_request(plan(nodes=3), cluster(partition=None), PARTITIONS)


@pytest.mark.parametrize(
    ("asked", "slurm", "words"),
    [
        (plan(), {"partition": "gpus"}, r"no partition 'gpus'. Did you mean 'gpu'\? This cluster has: gpu, urgent"),
        (plan(nodes=4), {}, r"runs.demo.nodes: the plan takes 4 nodes, but partition 'gpu' has 3"),
        (plan(memory_gib=9), {}, r"needs 9 GiB per node, but a node of partition 'gpu' has 8 GiB"),
        (plan(cpus=9), {}, r"asks for 9 cores per node.*has 2"),
        (
            plan(),
            {"partition": "urgent", "time_limit": "2-00:00:00"},
            r"time_limit: 2-00:00:00 is longer than the 1440",
        ),
    ],
)
def test_a_request_beyond_the_limits_is_rejected(asked: Plan, slurm: dict[str, object], words: str) -> None:
    with pytest.raises(ShardmakeError, match=words):
        check_request(asked, cluster(**slurm), PARTITIONS)

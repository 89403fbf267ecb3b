"""Check that Slurm can run the planned job: partition, nodes and time limit, before anything is queued."""

import re
import subprocess
from dataclasses import dataclass

from shardmake.config.models import Cluster
from shardmake.core.errors import ConfigError, SlurmError, nearest
from shardmake.run.plan import Plan


@dataclass(frozen=True)
class Partition:
    """One partition as ``sinfo`` reports it."""

    name: str
    is_default: bool
    nodes: int
    cpus: int
    """Cores of its smallest node."""
    memory_mib: int
    """RAM of its smallest node."""
    time_limit_minutes: int | None
    """None if there is no limit."""


def parse_partitions(text: str) -> dict[str, Partition]:
    """Return partitions by name from rows ``NAME|NODES|CPUS|MEMORY|TIMELIMIT``; a ``*`` marks the default.

    A partition of different nodes has several rows; a ``+`` means that a node has at least that much.
    """
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, nodes, cpus, memory, limit = line.strip().split("|")
        bare = name.rstrip("*")
        before = found.get(bare)
        found[bare] = Partition(
            name=bare,
            is_default=name.endswith("*"),
            nodes=int(nodes) + (before.nodes if before else 0),
            cpus=min(_number(cpus), before.cpus if before else _number(cpus)),
            memory_mib=min(_number(memory), before.memory_mib if before else _number(memory)),
            time_limit_minutes=_minutes(limit),
        )
    return found


def _number(text: str) -> int:
    return int(text.rstrip("+"))


def _minutes(limit: str) -> int | None:
    """Return the minutes of a limit ``[D-]HH:MM:SS`` or ``MM:SS``; None if it is infinite."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if match is None:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + minutes


def query_partitions() -> dict[str, Partition]:
    """Return the partitions of this cluster."""
    command = ["sinfo", "--noheader", "--format=%P|%D|%c|%m|%l"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except FileNotFoundError:
        raise ConfigError(
            "executor: slurm needs sinfo, which is not installed on this machine. Run on a login node of the cluster, "
            "or name a cluster file with executor: local."
        ) from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        words = getattr(error, "stderr", None) or str(error)
        raise SlurmError(f"sinfo failed: {str(words).strip()}. Check that Slurm is running, then try again.") from None
    return parse_partitions(answer.stdout)


def check_request(plan: Plan, cluster: Cluster, partitions: dict[str, Partition]) -> None:
    """Raise a `ConfigError` that names the key to change, if the partition can never run the plan."""
    partition = _find(cluster.slurm.partition, partitions)
    wanted = plan.resources["train"]
    if plan.choice.nodes > partition.nodes:
        raise ConfigError(
            f"runs.{plan.run}.nodes: the plan takes {plan.choice.nodes} nodes, but partition {partition.name!r} has "
            f"{partition.nodes}. Take fewer nodes or another slurm.partition in the cluster file."
        )
    if wanted.memory_gib * 1024 > partition.memory_mib:
        raise ConfigError(
            f"The plan needs {wanted.memory_gib} GiB per node, but a node of partition {partition.name!r} has "
            f"{partition.memory_mib / 1024:.0f} GiB. Set memory_gib_per_node in the cluster file to what it has."
        )
    if wanted.cpus > partition.cpus:
        raise ConfigError(
            f"The plan asks for {wanted.cpus} cores per node, but a node of partition {partition.name!r} has "
            f"{partition.cpus}. Set cpus_per_node in the cluster file to what it has."
        )
    limit = partition.time_limit_minutes
    if limit is not None and cluster.slurm.time_limit_minutes > limit:
        raise ConfigError(
            f"slurm.time_limit: {cluster.slurm.time_limit} is longer than the {limit} minutes that partition "
            f"{partition.name!r} allows. Shorten it; training resumes in a new job by itself."
        )


def _find(name: str | None, partitions: dict[str, Partition]) -> Partition:
    names = ", ".join(partitions) or "none"
    if name is None:
        default = next((partition for partition in partitions.values() if partition.is_default), None)
        if default is None:
            raise ConfigError(f"This cluster has no default partition. Set slurm.partition to one of: {names}.")
        return default
    if name not in partitions:
        raise ConfigError(
            f"slurm.partition: there is no partition {name!r}.{nearest(name, partitions)} This cluster has: {names}."
        )
    return partitions[name]

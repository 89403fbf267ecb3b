"""Check that Slurm can run the planned job: partition, nodes and time limit, before anything is queued."""

import math
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from shardmake.config.models import Cluster
from shardmake.config.slurm_options import inherited
from shardmake.config.values import minutes
from shardmake.core.errors import ConfigError, SlurmError, nearest
from shardmake.core.units import plural
from shardmake.run.plan import Plan


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one partition that are alike."""

    nodes: int
    cpus: int
    """Cores of a node."""
    memory_mib: int
    """RAM of a node."""
    gpus: Mapping[str, int]
    """GPUs of a node by type; the type is empty if Slurm's configuration names none."""
    features: frozenset[str]

    def gpus_of(self, gpu_type: str | None) -> int:
        """Return the GPUs of a node that a request for ``gpu_type`` can get, of any type for None."""
        return sum(count for name, count in self.gpus.items() if gpu_type is None or name.lower() == gpu_type.lower())


@dataclass(frozen=True)
class Partition:
    """One partition as ``sinfo`` reports it."""

    name: str
    is_default: bool
    time_limit_minutes: int | None
    """None if there is no limit."""
    groups: tuple[NodeGroup, ...]


_SINFO_FORMAT = "%P|%D|%c|%m|%l|%G|%f"


def parse_partitions(text: str) -> dict[str, Partition]:
    """Return partitions by name from rows ``NAME|NODES|CPUS|MEMORY|TIMELIMIT|GRES|FEATURES``; ``*`` marks the default.

    sinfo prints one row for nodes that are alike; a ``+`` means that a node has at least that much. A row of titles may
    stand before them, and with SLURM_CLUSTERS a line with the name of the cluster. Raises `ConfigError` for the rows
    of several clusters.
    """
    found: dict[str, Partition] = {}
    clusters = re.findall("^CLUSTER: (.*)$", text, re.MULTILINE)
    if len(clusters) > 1:
        names = ", ".join(clusters)
        raise ConfigError(
            f"sinfo lists several clusters: {names}. A run has its jobs in one. Set SLURM_CLUSTERS to one."
        )
    for line in text.splitlines():
        if line.startswith(("CLUSTER: ", "PARTITION|")):
            continue
        fields = line.strip().split("|")
        if len(fields) != _SINFO_FORMAT.count("|") + 1:
            raise SlurmError(f"Cannot read a row of sinfo: {line!r}. Its format is {_SINFO_FORMAT}. Check sinfo here.")
        name, nodes, cpus, memory, limit, gres, features = fields
        tags = frozenset() if features == "(null)" else frozenset(features.split(","))
        group = NodeGroup(int(nodes), int(cpus.rstrip("+")), int(memory.rstrip("+")), parse_gpus(gres), tags)
        bare = name.rstrip("*")
        earlier = found[bare].groups if bare in found else ()
        found[bare] = Partition(bare, name.endswith("*"), _minutes(limit), (*earlier, group))
    return found


def parse_gpus(gres: str) -> dict[str, int]:
    """Return the GPUs by type of a node's generic resources, such as ``gpu:a100:4(S:0-1),nvme:1`` or ``(null)``."""
    found: dict[str, int] = {}
    for entry in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *parts = entry.split(":")
        if kind == "gpu":
            count = int(parts.pop()) if parts and parts[-1].isdigit() else 1
            gpu_type = parts[0] if parts else ""
            found[gpu_type] = found.get(gpu_type, 0) + count
    return found


def satisfies(features: Set[str], constraint: str | None) -> bool:
    """Return whether a node with ``features`` may satisfy ``constraint``.

    ``&`` and ``,`` mean and, ``|`` means or, read from left to right as Slurm does. Counts and brackets concern the
    nodes of a job together, so any node may satisfy them.
    """
    if not constraint or re.search(r"[][()*]", constraint):
        return True
    first, *rest = re.split(r"([&,|])", constraint)
    holds = first in features
    for operator, feature in zip(rest[::2], rest[1::2], strict=True):
        holds = holds or feature in features if operator == "|" else holds and feature in features
    return holds


def _minutes(limit: str) -> int | None:
    """Return the minutes of a limit ``[D-]HH:MM:SS`` or ``MM:SS``; None if it is infinite."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if match is None:
        return None
    days, hours, rest, _ = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + rest


def query_partitions(*, hidden: bool = False) -> dict[str, Partition]:
    """Return the partitions of this cluster, with ``hidden`` also those that sinfo does not show to everybody."""
    # With --noheader, some versions do not name the clusters.
    command = ["sinfo", *(["--all"] if hidden else []), f"--format={_SINFO_FORMAT}"]
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
    """Raise a `ConfigError` that names the key to change, if too few nodes of the partition can ever run the plan.

    Of several partitions, such as ``a100,h100``, one suffices: Slurm starts the job in the first that can.
    """
    found = _find("partition", cluster.slurm.partition or inherited("partition"), partitions)
    problems = list[ConfigError]()
    for partition in found:
        try:
            _check_partition(plan, cluster, partition)
        except ConfigError as error:
            problems.append(error)
    if problems and len(problems) == len(found):
        raise problems[0]
    own = cluster.slurm.cpu_partition
    advice = "Set slurm.stage_time_limit, the limit of the jobs of data, consolidate and evaluate, to less."
    limit = cluster.slurm.stage_time_limit or cluster.slurm.time_limit
    for places in (found, _find("cpu_partition", own, partitions) if own else found):
        _check_time("stage_time_limit", limit, places, advice)


def _check_partition(plan: Plan, cluster: Cluster, partition: Partition) -> None:
    groups, nodes = partition.groups, plan.job_nodes
    for required, is_met, describe, advice in _requirements(plan, cluster):
        suitable = tuple(group for group in groups if is_met(group))
        if (count := sum(group.nodes for group in suitable)) < nodes:
            raise ConfigError(
                f"The plan takes {plural(nodes, 'node')}{required}, but partition {partition.name!r} has "
                f"{count}{describe(groups)}. {advice}"
            )
        groups = suitable
    limit = cluster.slurm.time_limit
    _check_time("time_limit", limit, [partition], "Shorten it; training resumes in a new job by itself.")


def _check_time(key: str, value: str, places: Sequence[Partition], advice: str) -> None:
    """Raise a `ConfigError` if a job's time limit is longer than each of its partitions allows."""
    partition = max(places, key=lambda place: place.time_limit_minutes or math.inf, default=None)
    if partition and (limit := partition.time_limit_minutes) is not None and minutes(value) > limit:
        allowed = f"the {limit} minutes that partition {partition.name!r} allows"
        raise ConfigError(f"slurm.{key}: {value} is longer than {allowed}. {advice}")


_Requirement = tuple[str, Callable[[NodeGroup], bool], Callable[[Sequence[NodeGroup]], str], str]
"""A property that each node must have: the end of ``N nodes``, its check, what the nodes have instead, and advice."""


def _requirements(plan: Plan, cluster: Cluster) -> Iterator[_Requirement]:
    """Yield what the nodes must have, in the order in which a person would correct it."""
    slurm, wanted, ranks = cluster.slurm, plan.resources["train"], plan.choice.processes_per_node
    have, kind = "; its nodes have", f" of type {slurm.gpu_type}" if slurm.gpu_type else ""
    yield (
        "", lambda group: True, lambda groups: "",
        f"Set runs.{plan.run}.nodes to fewer nodes, or slurm.partition in the cluster file to another partition.",
    )  # fmt: skip
    yield (
        f" with the features {slurm.constraint}",
        lambda group: satisfies(group.features, slurm.constraint),
        lambda groups: f"{have} {_list(feature for group in groups for feature in group.features)}",
        "Correct slurm.constraint in the cluster file.",
    )
    if cluster.accelerator != "cpu" and slurm.gpu_request != "none":
        yield (
            f" with {ranks} GPUs{kind} each",
            lambda group: group.gpus_of(slurm.gpu_type) >= ranks,
            lambda groups: f"{have} {_list(map(_describe_gpus, groups))}",
            "Correct processes_per_node or slurm.gpu_type in the cluster file.",
        )
    yield (
        f" with {wanted.memory_gib} GiB of memory each",
        lambda group: slurm.memory == "none" or group.memory_mib >= wanted.memory_gib * 1024,
        lambda groups: f"{have} up to {max(group.memory_mib for group in groups) / 1024:.0f} GiB",
        "Set memory_gib_per_node in the cluster file to what its nodes have.",
    )
    yield (
        f" with {wanted.cpus} cores each",
        lambda group: group.cpus >= wanted.cpus,
        lambda groups: f"{have} up to {max(group.cpus for group in groups)}",
        "Set cpus_per_node in the cluster file to what its nodes have.",
    )


def _describe_gpus(group: NodeGroup) -> str:
    return " and ".join(f"{count} {name or 'GPUs without a type'}" for name, count in group.gpus.items()) or "no GPUs"


def _list(words: Iterable[str]) -> str:
    return ", ".join(sorted(set(words))) or "none"


def _find(key: str, names: str | None, partitions: dict[str, Partition]) -> list[Partition]:
    """Return the partitions of these names; without names the default one, else all: the site's plug-in chooses one."""
    if not names:
        return [one for one in partitions.values() if one.is_default] or [*partitions.values()]
    for name in names.split(","):
        if name not in partitions:
            raise ConfigError(
                f"slurm.{key}: there is no partition {name!r}.{nearest(name, partitions)} This cluster has: "
                f"{', '.join(partitions) or 'none'}."
            )
    return [partitions[name] for name in names.split(",")]

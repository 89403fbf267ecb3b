"""The cluster of a check: from a cluster file or from sinfo, and back into a cluster file with what was measured."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shardmake.config.accelerators import ACCELERATORS
from shardmake.config.load import parse_section
from shardmake.config.models import Cluster, Slurm
from shardmake.core.atomic import write_text
from shardmake.core.errors import ConfigError, nearest
from shardmake.doctor.records import DoctorRequest, NodeFacts, NodeReport
from shardmake.launch.gpus import accelerator_of
from shardmake.plan.limits import NodeGroup, Partition, satisfies
from shardmake.plan.step_time import LINK_SHARE
from shardmake.run.findings import Finding, not_checked, warning

CPU_RANKS = 2
UNKNOWN_GPU = "a100-80gb"
"""Stands for a GPU whose type sinfo does not name, until a node has named it; it is never written to a file."""
_SCHEMA = "# yaml-language-server: $schema=../../workflow/schemas/cluster.schema.json"
_DEFAULT_MINUTES = 24 * 60


def draft_cluster(options: Slurm, partitions: Mapping[str, Partition]) -> Cluster:
    """Return the cluster that sinfo reports for a partition: its most numerous nodes that have the most GPUs.

    ``options`` are those of the command, for a cluster without a file.
    """
    partition = _find_partition(options.partition, partitions)
    group = _choose_group(partition, options)
    asked = (options.gpu_type or "").lower()
    types = [(name, count) for name, count in group.gpus.items() if asked in ("", name.lower())]
    gpu_type, gpus = max(types, key=lambda item: (not is_slice(item[0]), item[1]), default=("", 0))
    limit = min(_DEFAULT_MINUTES, partition.time_limit_minutes or _DEFAULT_MINUTES)
    slurm = options.model_dump(exclude_unset=True) | {
        "partition": partition.name,
        "time_limit": f"{limit // 60:02d}:{limit % 60:02d}:00",
        "gpu_request": "gres" if gpus else "none",
        "gpu_type": gpu_type or None,
    }
    values = {
        "executor": "slurm",
        "accelerator": _guess(gpu_type) if gpus else "cpu",
        "max_nodes": sum(other.nodes for other in partition.groups if other.gpus == group.gpus),
        "processes_per_node": gpus or min(CPU_RANKS, group.cpus),
        "cpus_per_node": group.cpus,
        "memory_gib_per_node": group.memory_mib // 1024,
        "slurm": {name: value for name, value in slurm.items() if value is not None},
    }
    return parse_section(Cluster, values, f"what sinfo reports about partition {partition.name}")


def _find_partition(name: str | None, partitions: Mapping[str, Partition]) -> Partition:
    names = ", ".join(partitions) or "none"
    name = name or next((partition.name for partition in partitions.values() if partition.is_default), None)
    if name is None:
        raise ConfigError(f"This cluster has no default partition. Use --partition with one of: {names}.")
    if name not in partitions:
        hint = nearest(name, partitions)
        raise ConfigError(f"--partition: there is no partition {name!r}.{hint} This cluster has: {names}.")
    return partitions[name]


def _choose_group(partition: Partition, options: Slurm) -> NodeGroup:
    fitting = [group for group in partition.groups if satisfies(group.features, options.constraint)]
    if options.gpu_type:
        fitting = [group for group in fitting if group.gpus_of(options.gpu_type)]
    if not fitting:
        types = sorted({name for group in partition.groups for name in group.gpus if name}) or ["none"]
        raise ConfigError(
            f"No node of partition {partition.name!r} has the GPU type and features of --gpu-type and --constraint. "
            f"Its GPU types are: {', '.join(types)}. `shardmake doctor` lists the features."
        )

    def worth(group: NodeGroup) -> tuple[int, int, int]:
        whole = sum(count for name, count in group.gpus.items() if not is_slice(name))
        return whole, sum(group.gpus.values()), group.nodes

    return max(fitting, key=worth)


def is_slice(gpu_type: str) -> bool:
    """Return whether a GPU type of Slurm is a MIG slice, such as ``1g.10gb`` or ``a100_1g.5gb``."""
    return re.search(r"\dg\.\d+gb", gpu_type.lower()) is not None


def _guess(gpu_type: str) -> str:
    """Return a catalogue name for Slurm's GPU type; the node's driver decides later."""
    bases = {name: name.split("-")[0] for name in ACCELERATORS}
    alike = [name for name, base in bases.items() if base in gpu_type.lower()]
    return min(alike, key=lambda name: (-len(bases[name]), len(name)), default=UNKNOWN_GPU)


def compose(request: DoctorRequest, reports: Sequence[NodeReport], *, drafted: bool) -> tuple[str, list[Finding]]:
    """Return the text of a cluster file with the values of the nodes, empty if there is none, and the findings.

    ``drafted``: the cluster came from sinfo.
    """
    facts = [report.facts for report in reports]
    values = request.cluster.model_dump(mode="json", exclude_unset=True)
    name = next((fact.gpu_name for fact in facts if fact.gpu_name), None)
    memory = min((fact.gpu_memory_gib for fact in facts if fact.gpu_memory_gib), default=None)
    if not request.cluster.is_cpu:
        accelerator = accelerator_of(name, memory) if name and memory else None
        if memory is None or (accelerator is None and drafted):
            unknown = "CUDA did not start on a node, so the GPU model is not known"
            if name is not None and memory is not None:
                unknown = f"the catalogue has no GPU {name} with {memory:g} GiB"
            reason = f"no cluster file was written: {unknown}"
            advice = "Correct what the rows above name, or write the file by hand (config/README.md)."
            return "", [not_checked("cluster file", reason, advice)]
        if accelerator:
            values["accelerator"] = accelerator
        if memory:
            values["gpu_memory_gib"] = memory
    comments = _measured(values, facts)
    hosts = ", ".join(report.host for report in reports)
    header = [
        f"# Written by `shardmake doctor --node` from what {hosts} reported. Edit it.",
        *([] if request.nodes > 1 else ["# inter_node_gbps was not measured: that needs `--nodes 2`."]),
        *([] if request.cluster.nvme_path else _suggest_nvme(facts)),
    ]
    text = _as_yaml(values, comments, header)
    parse_section(Cluster, yaml.safe_load(text), "the cluster file with the measured values")
    cluster, found = request.cluster, values.get("accelerator", request.cluster.accelerator)
    if drafted or found == cluster.accelerator:
        return text, []
    words = f"the nodes have {found}, and the cluster file has accelerator: {cluster.accelerator}"
    return text, [warning("cluster file", words, f"Set accelerator: {found} in the cluster file.")]


def _measured(values: dict[str, Any], facts: Sequence[NodeFacts]) -> dict[str, str]:
    """Add the measured values to ``values``, and return comments for their lines."""
    comments = {}
    for place in ("intra", "inter"):
        key = f"{place}_node_gbps"
        if measured := [rate for fact in facts if (rate := getattr(fact, f"{place}_gbps"))]:
            # The estimate takes LINK_SHARE of the link, so this value gives the measured rate again.
            values[key] = float(f"{min(measured) / LINK_SHARE:.3g}")
            comments[key] = f"an all-reduce reached {min(measured):.3g} GB/s, which is {LINK_SHARE:g} of this"
    interfaces = {fact.network_interface for fact in facts if fact.network_interface}
    if len(interfaces) == 1 and "network_interface" not in values:
        values["network_interface"] = interfaces.pop()
        comments["network_interface"] = "with which the nodes found each other"
    return comments


def _suggest_nvme(facts: Sequence[NodeFacts]) -> list[str]:
    """Return a comment with the largest local NVMe that every node can write; empty if there is none."""
    everywhere = set.intersection(*(set(fact.nvme) for fact in facts))
    free = {point: min(fact.nvme[point] for fact in facts) for point in sorted(everywhere)}
    best = max(free, key=free.__getitem__, default=None)
    return [f"# nvme_path: {best}  # writable NVMe, with nvme_gib_per_node: {free[best]:.0f}"] if best else []


def _as_yaml(values: Mapping[str, Any], comments: Mapping[str, str], header: Sequence[str]) -> str:
    lines = [_SCHEMA, *header]
    slurm = {"slurm": values["slurm"]} if values.get("slurm") else {}
    for key, value in [item for item in values.items() if item[0] != "slurm"]:
        line = yaml.safe_dump({key: value}, sort_keys=False).rstrip()
        lines.append(f"{line}  # {comments[key]}" if key in comments else line)
    return "\n".join(lines) + "\n" + (yaml.safe_dump(slurm, sort_keys=False) if slurm else "")


def require_free(path: Path, *, force: bool) -> None:
    """Raise a `ConfigError` if ``path`` exists and may not be overwritten, before a job is queued."""
    if path.exists() and not force:
        raise ConfigError(f"{path} exists. Name another file with --write, or overwrite it with --force.")


def write_cluster(path: Path, text: str, *, force: bool) -> None:
    """Write a cluster file."""
    require_free(path, force=force)
    write_text(path, text)

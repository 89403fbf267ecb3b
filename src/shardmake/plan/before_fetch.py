"""Refusals before anything is fetched, which follow from the configuration and the cluster file alone."""

from collections.abc import Iterator

from shardmake.config.models import Cluster, Run
from shardmake.core.units import plural
from shardmake.plan.refusals import refuse, wrong_fsdp, wrong_on_cpu


def refuse_before_fetch(run: Run, cluster: Cluster) -> None:
    """Raise a `ConfigError` for what the configuration and the cluster file alone decide."""
    refuse(wrong_fsdp(run, cluster), wrong_on_cpu(run) if cluster.is_cpu else (), _wrong_batch(run, cluster))


def _wrong_batch(run: Run, cluster: Cluster) -> Iterator[str]:
    readers = cluster.processes_per_node // (run.tensor_parallel * run.sequence_parallel)
    nodes = [run.nodes] if run.nodes else range(1, cluster.max_nodes + 1)
    if readers and all(run.global_batch_size % (readers * count) for count in nodes):
        yield undivided(run, readers * nodes[0], nodes[0])


def undivided(run: Run, ranks: int, nodes: int) -> str:
    """Return what to do about a global batch that ``ranks`` of so many nodes cannot share."""
    batch = run.global_batch_size
    return (
        f"global_batch_size {batch} cannot be divided over {ranks} ranks ({plural(nodes, 'node')}). Use "
        f"{multiples(batch, ranks)}, or another number of nodes."
    )


def multiples(size: int, step: int) -> str:
    """Return the multiples of ``step`` next to ``size``, as text."""
    return " or ".join(str(multiple) for multiple in (size // step * step, -(-size // step) * step) if multiple)

"""Slurm's estimates of when a training would start, for the planned number of nodes and others that fit."""

import re
import time
from collections.abc import Iterator
from datetime import datetime

from shardmake.config.models import Cluster
from shardmake.core.units import plural
from shardmake.launch.slurm_jobs import SlurmJobs, run_slurm
from shardmake.run.attempt import AttemptDir
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan

_START = re.compile(r"\bto start at (\S+)")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def parse_start(text: str) -> float | None:
    """Return the Unix time of a start as Slurm prints it, in this machine's time zone; None for ``N/A``."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def expected_starts(plan: Plan, memory: MemoryEstimates, cluster: Cluster, rundir: RunDir) -> str:
    """Return when Slurm would start the training if it were submitted now, by number of nodes; empty without Slurm.

    Other numbers of nodes are asked for with the planned request per node. If Slurm does not know the start for the
    planned number, it is not asked for others. ``sbatch --test-only`` counts running jobs, not waiting ones.
    """
    if cluster.executor != "slurm":
        return ""
    if closed := _closed_partition(cluster.slurm.partition):
        return closed
    parts = []
    for nodes in node_counts(plan.choice.nodes, memory):
        start = _query_start(plan, nodes, cluster, rundir)
        parts.append(f"{plural(nodes + plan.service_nodes, 'node')}: {_describe(start)}")
        if start is None and nodes == plan.choice.nodes:
            break
    return f"if submitted now, by Slurm's estimate without the jobs that already wait: {'; '.join(parts)}"


def _closed_partition(partition: str | None) -> str:
    """Return a sentence if the partition starts no jobs; empty if it does, or without an answer.

    ``sbatch --test-only`` estimates a start in a partition that is down as if it were up.
    """
    option = [f"--partition={partition}"] if partition else []
    states = run_slurm("sinfo", "--noheader", "--format=%a", *option).stdout.split()
    if not states or "up" in states:
        return ""
    return f"Slurm starts no jobs at present: partition {partition or 'by default'} is {states[0]}"


def node_counts(planned: int, memory: MemoryEstimates) -> Iterator[int]:
    """Yield ``planned``, then the fewest, the next larger and the largest number of nodes on which a candidate fits."""
    yield planned
    fitting = sorted({candidate.choice.nodes for candidate in memory.candidates if candidate.fits})
    larger = [nodes for nodes in fitting if nodes > planned]
    yield from sorted({*fitting[:1], *larger[:1], *larger[-1:]} - {planned})


def _query_start(plan: Plan, nodes: int, cluster: Cluster, rundir: RunDir) -> float | None:
    """Return the Unix time at which Slurm would start the training on ``nodes``; None without an estimate."""
    wanted = plan.model_copy(update={"choice": plan.choice.model_copy(update={"nodes": nodes})})
    folder = AttemptDir(rundir.attempts.absolute() / "NNN")
    script = SlurmJobs(rundir.root, cluster).script(folder, wanted, excluded=[])
    # The user's SLURM_TIME_FORMAT could print a time that cannot be parsed.
    answer = run_slurm("env", "SLURM_TIME_FORMAT=standard", "sbatch", "--test-only", stdin=script)
    found = _START.search(answer.stderr) if answer.returncode == 0 else None
    return parse_start(found[1]) if found else None


def _describe(start: float | None) -> str:
    """Return ``start`` relative to now, as coarse as the estimate."""
    if start is None:
        return "Slurm does not know when it would start"
    seconds = start - time.time()
    if seconds < _MINUTE:
        return "would start at once"
    if seconds < 2 * _HOUR:
        return f"would start in about {seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"would start in about {seconds / _HOUR:.0f} h"
    return f"would start in about {seconds / _DAY:.0f} days"

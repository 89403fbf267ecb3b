"""The Slurm jobs of data, consolidate and evaluate, which Snakemake's Slurm executor submits."""

import shlex
from collections.abc import Mapping
from math import ceil
from types import SimpleNamespace
from typing import Final

from shardmake.config.models import Cluster, Run
from shardmake.config.slurm_options import JobKind
from shardmake.config.values import minutes
from shardmake.launch.container import JobContainer, JobEnvironment
from shardmake.launch.slurm_request import SlurmRequest
from shardmake.run.plan import Resources

ON_GPUS: Final[Mapping[str, bool]] = {"data": False, "consolidate": False, "evaluate": True}
"""Stages that run as a job of one node, and whether they use its GPUs."""


def job_resources(stage: str, run: Run, cluster: Cluster) -> dict[str, str | int]:
    """Return the resources of a stage's rule in the executor's words, without memory and cores, which are planned."""
    if cluster.executor != "slurm":
        return {}
    limit = minutes(cluster.slurm.stage_time_limit or cluster.slurm.time_limit)
    if not ON_GPUS[stage]:
        return SlurmRequest(cluster, JobKind.CPU_STAGE, limit).snakemake()
    gpus = run.evaluation.processes or cluster.processes_per_node
    return SlurmRequest(cluster, JobKind.EVALUATE, limit, gpus=gpus).snakemake()


def memory_resources(cluster: Cluster, memory_mib: int, cpus: int) -> dict[str, int]:
    """Return a stage's request of host RAM in the executor's words; 0 replaces the profile's default by no request."""
    form = cluster.slurm.memory if cluster.executor == "slurm" else "per_node"
    if form == "per_cpu":
        return {"mem_mb_per_cpu": ceil(memory_mib / cpus)}
    return {"mem_mb": memory_mib if form == "per_node" else 0}


def job_shell_prefix(
    cluster: Cluster, programs: str = "", container: JobContainer | JobEnvironment | None = None
) -> str:
    """Return the start of the jobs' commands for Snakemake's `shell.prefix`, which replaces names in single braces.

    After the lines of ``slurm.setup`` come ``programs``, which find the commands of this environment. In a container,
    a function then stands for the command `shardmake`.

    The executor starts jobs through /bin/sh. If that is dash, it drops exported functions such as `module`, which the
    file of the module system defines again.
    """
    function = f"{container.shell_function}; ".replace("{", "{{").replace("}", "}}") if container else ""
    if not cluster.slurm.setup:
        return f"{programs}{function}"
    modules = 'type module >/dev/null 2>&1 || [ ! -r "${MODULESHOME:-}/init/bash" ] || . "$MODULESHOME/init/bash"'
    setup = "\n".join((modules, *cluster.slurm.setup, "")).replace("{", "{{").replace("}", "}}")
    return f"{setup}{programs}{function}"


class _JobResources(dict[str, str | int]):
    """Resources in the two forms in which the executor reads them."""

    __getattr__ = dict.__getitem__


def sbatch_command(stage: str, run: Run, cluster: Cluster, planned: Resources) -> str:
    """Return the executor's own sbatch command for the job of a stage, as a line of shell without the job's program."""
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    resources = _JobResources(
        job_resources(stage, run, cluster), **memory_resources(cluster, 1024 * planned.memory_gib, planned.cpus)
    )
    job = SimpleNamespace(resources=resources, threads=planned.cpus)
    places = {"account": "-A", "partition": "-p"}
    given = {
        name: f"{option} {shlex.quote(str(resources[f'slurm_{name}']))}" if f"slurm_{name}" in resources else ""
        for name, option in places.items()
    }
    names = {"run_uuid": "shardmake", "slurm_logfile": "/dev/null", "comment_str": stage, "workdir": None}
    return f"{get_submit_command(job, {**names, **given})}{set_gres_string(job)}"

"""The Slurm jobs of data, consolidate and evaluate, which Snakemake's Slurm executor submits."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardmake.config.models import Cluster, Run
from shardmake.config.values import minutes
from shardmake.core.errors import ConfigError
from shardmake.launch.container import JobContainer
from shardmake.launch.jobs import gpu_options
from shardmake.run.plan import Resources

ON_GPUS: Final[Mapping[str, bool]] = {"data": False, "consolidate": False, "evaluate": True}
"""Stages that run as a job of one node, and whether they use its GPUs."""
_OF_TRAINING: Final = {
    *("cpus-per-gpu", "cpus-per-task", "gres", "gpus-per-task", "mem", "mem-per-cpu", "mem-per-gpu", "nodelist"),
    *("nodes", "ntasks", "ntasks-per-gpu", "ntasks-per-node", "signal", "time-min"),
    *("chdir", "clusters", "comment", "error", "export", "job-name", "open-mode", "output"),
}
"""Options of `slurm.extra` that size the training's job, or that Snakemake's executor sets itself."""
OF_GPU_JOBS: Final = {*_OF_TRAINING, "exclusive"}
"""Options of `slurm.extra` that a job without GPUs leaves out."""


def job_resources(stage: str, run: Run, cluster: Cluster) -> dict[str, str | int]:
    """Return the resources of a stage's rule in the executor's words, without memory and cores, which are planned."""
    if cluster.executor != "slurm":
        return {}
    on_gpus = ON_GPUS[stage]
    slurm = cluster.slurm if on_gpus else cluster.slurm.without_gpus()
    resources: dict[str, str | int | None] = {
        "nodes": 1,
        "runtime": minutes(slurm.stage_time_limit or slurm.time_limit),
        "slurm_partition": slurm.partition,
        "slurm_account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        **(_gpus(cluster, run.evaluation.processes or cluster.processes_per_node) if on_gpus else {}),
    }
    left_out = _OF_TRAINING if on_gpus else OF_GPU_JOBS
    extra = {name: value for name, value in slurm.extra.items() if name.replace("_", "-") not in left_out}
    options = {
        "exclude": slurm.exclude,
        "wckey": slurm.wckey,
        "gpus-per-node": resources.pop("gpus-per-node", None),
        **extra,
    }
    resources["slurm_extra"] = _as_text({name: value for name, value in options.items() if value is not None})
    return {name: value for name, value in resources.items() if value}


def job_shell_prefix(cluster: Cluster, programs: str = "", container: JobContainer | None = None) -> str:
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


def _gpus(cluster: Cluster, count: int) -> dict[str, str | int | None]:
    """Return the request for GPUs: as the executor's resources, or as an option if it refuses the name of the type."""
    gpu_type, request = cluster.slurm.gpu_type, gpu_options(cluster, count)
    if re.fullmatch(r"[A-Za-z0-9_.]+", gpu_type or "any"):
        if "gres" in request:
            return {"gres": request["gres"]}
        if "gpus" in request:
            return {"gpu": count, "gpu_model": gpu_type}
    # Slurm itself turns --gres=gpu:TYPE:N and --gpus-per-node=TYPE:N into the same request.
    return {"gpus-per-node": request.get("gpus-per-node") or request.get("gres", "").removeprefix("gpu:") or None}


def _as_text(options: Mapping[str, str | int | bool]) -> str:
    """Return options of sbatch for a shell.

    Raises:
        ConfigError: The executor would take a part of a value, such as the -J of `rack-J`, for an option of its own.
    """
    from snakemake_executor_plugin_slurm.validation import get_forbidden_slurm_options

    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]
    text = shlex.join(words)
    for pattern in get_forbidden_slurm_options():
        if found := re.search(pattern, text):
            raise ConfigError(
                f"slurm: Snakemake's Slurm executor refuses {text!r}, because it takes {found[0]!r} for an option that "
                "it sets itself. Change that value in the cluster file."
            )
    return text


class _JobResources(dict[str, str | int]):
    """Resources in the two forms in which the executor reads them."""

    __getattr__ = dict.__getitem__


@dataclass(frozen=True)
class _Job:
    """A job as the executor reads it to build its command."""

    resources: _JobResources
    threads: int


def sbatch_command(stage: str, run: Run, cluster: Cluster, planned: Resources) -> str:
    """Return the executor's own sbatch command for the job of a stage, as a line of shell without the job's program."""
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    resources = _JobResources(job_resources(stage, run, cluster), mem_mb=1024 * planned.memory_gib)
    job = _Job(resources, planned.cpus)
    places = {"account": "-A", "partition": "-p"}
    given = {
        name: f"{option} {shlex.quote(str(resources[f'slurm_{name}']))}" if f"slurm_{name}" in resources else ""
        for name, option in places.items()
    }
    names = {"run_uuid": "shardmake", "slurm_logfile": "/dev/null", "comment_str": stage, "workdir": None}
    return f"{get_submit_command(job, {**names, **given})}{set_gres_string(job)}"

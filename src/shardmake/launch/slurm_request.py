"""The request of one job to Slurm, in the words of the three programs that submit jobs."""

import logging
import os
import re
import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final, Literal

from shardmake.config.models import Cluster, Slurm
from shardmake.config.slurm_options import (
    ASIDE,
    COUNTING,
    OF_STEPS,
    SLURM_OPTIONS,
    JobKind,
    SlurmOption,
    find_option,
    inherited,
    option_of_variable,
)
from shardmake.core.environment import remove_list_settings
from shardmake.core.errors import ConfigError

logger = logging.getLogger(__name__)
Value = str | int | bool
_KEPT_VARIABLES: Final = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Variables of Slurm that say which cluster is meant, and how, as opposed to in which job a process runs."""
_OF_THE_JOB = ("SLURM_", "SLURMD_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND", "PMI_", "PMIX_")
_DEVICES = {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL"}


def leave_job(environment: MutableMapping[str, str]) -> None:
    """Remove what Slurm set for the present job from ``environment``.

    sbatch and srun take many of these variables as their defaults, and Snakemake's executor pauses when it finds
    itself in a job. The devices are those of this job: a training gets its own.
    """
    for name in list(environment):
        if name in _DEVICES or (name.startswith(_OF_THE_JOB) and name not in _KEPT_VARIABLES):
            del environment[name]


def prepare_submission(cluster: Cluster, environment: MutableMapping[str, str]) -> None:
    """Let no variable of ``environment`` replace an option of a job: each request has those that count for its kind.

    sbatch prefers its variables to the lines of a script, and srun has variables of its own for a step. Those of the
    present job, such as an interactive one, are removed, and the user's settings of Slurm's lists. Others of options
    that the plan or the cluster file decides are removed with a warning.
    """
    remove_list_settings(environment)
    if cluster.executor != "slurm":
        return
    if "SLURM_JOB_ID" in environment:
        leave_job(environment)
    for name in [name for name in environment if name.startswith("SBATCH_")]:
        option = option_of_variable(name)
        if option.flag not in SLURM_OPTIONS and option.flag not in cluster.slurm.extra:
            continue  # it holds for every job
        value = environment.pop(name)
        if _counts(option, cluster.slurm):
            environment[f"{ASIDE}{name}"] = value
        else:
            reason = option.refused or f"the cluster file, or the plan, decides --{option.flag}"
            logger.warning("%s=%s in the environment has no effect: %s.", name, value, reason)
    for name in filter(OF_STEPS.fullmatch, list(environment)):
        reason = "the plan decides what a job gives its step"
        logger.warning("%s=%s in the environment has no effect: %s.", name, environment.pop(name), reason)


def _counts(option: SlurmOption, slurm: Slurm) -> bool:
    """Return whether a variable of the environment may give ``option``, which the cluster file leaves open."""
    left_open = {"gres": slurm.gpu_request == "none", "mem": slurm.memory == "none"}
    if option.key:
        return option.is_value and not getattr(slurm, option.key)
    return option.flag in COUNTING and option.flag not in slurm.extra and left_open.get(option.flag, True)


@dataclass(frozen=True)
class SlurmRequest:
    """One job of a cluster: its nodes, what it takes of each of them, and the options of the section `slurm`."""

    cluster: Cluster
    kind: JobKind
    minutes: int
    nodes: int = 1
    tasks: int | None = None
    """Tasks of the whole job. A job of submitit has one on each node, and Snakemake's executor decides for its own."""
    cpus: int | None = None
    """Cores of a task."""
    memory_mib: int | None = None
    """Host RAM of a node."""
    gpus: int = 0
    """GPUs of a node."""
    lead: int = 0
    """Seconds before the time limit at which the job gets its signal."""
    signal: str = ""
    """That signal as sbatch takes it. Without it, submitit's."""
    name: str = ""
    comment: str = ""
    excluded: Sequence[str] = ()
    """Nodes to exclude beside those of the cluster file."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Further options of a batch script, by sbatch's long names."""

    def submitit(self) -> dict[str, Any]:
        """Return the parameters of submitit's executor for a job with one task on each node."""
        slurm, extra = self.cluster.slurm, self._extra()
        # Slurm otherwise ends the job, and srun the step, when a node fails.
        keeps = self.kind is JobKind.TRAINING and slurm.spare_nodes
        named, others = _split(self._given() | self._sizes(), "submitit")
        return named | {
            "ntasks_per_node": 1,
            **self._memory_of_submitit(),
            **({"signal_delay_s": self.lead} if self.lead else {}),
            **({"setup": slurm.setup} if slurm.setup else {}),
            # Slurm 22.05 to 23.02 does not pass --cpus-per-task on to srun; one dead node must end the step.
            "srun_args": [
                f"--cpus-per-task={self.cpus}",
                "--kill-on-bad-exit=1",
                *(["--no-kill"] if keeps else []),
                *slurm.srun_extra,
            ],
            "additional_parameters": {
                **({} if "requeue" in extra or self._is_left_out("no-requeue") else {"no-requeue": True}),
                **({"no-kill": True} if keeps else {}),
                **others,
                **_merged(self._gpus(), extra),
            },
            "stderr_to_stdout": True,
            # Submitit sends a wckey of its own by default, which strict clusters reject.
            "wckey": slurm.wckey,
        }

    def snakemake(self) -> dict[str, Value]:
        """Return the resources of a rule for Snakemake's Slurm executor.

        Raises:
            ConfigError: The executor would misread a value.
        """
        gpu_type, gpus, counted = self.cluster.slurm.gpu_type, self._gpus(), {}
        if gpus and not re.fullmatch(r"[A-Za-z0-9_.]+", gpu_type or "any"):
            # The executor refuses this name. Slurm turns --gres=gpu:TYPE:N into the same request.
            gpus = {"gpus-per-node": f"{gpu_type}:{self.gpus}"}
        elif "gpus" in gpus:
            gpus, counted = {}, {"gpu": self.gpus, "gpu_model": gpu_type}
        named, others = _split(self._given() | self._sizes() | gpus, "snakemake")
        others |= self._extra()
        resources = named | counted | {"slurm_extra": _checked(shlex.join(_words(others)))}
        return {name: value for name, value in resources.items() if value}

    def sbatch(self) -> list[str]:
        """Return the lines of a batch script."""
        own = {name: value for name, value in self.options.items() if value is not True or not self._is_left_out(name)}
        options = self._given() | self._extra() | self._sizes() | own
        return [f"#SBATCH {shlex.quote(word)}" for word in _words(options)]

    def _given(self) -> dict[str, Value]:
        """Return the names of the job and what the keys of the section `slurm` give it, by sbatch's long names."""
        keys = {row.flag: self._value(row, row.key) for row in SLURM_OPTIONS.values() if row.key and row.is_value}
        excluded = ",".join(filter(None, [keys["exclude"], *self.excluded]))
        given = {"job-name": self.name, "comment": self.comment, **keys, "exclude": excluded}
        return {flag: value for flag, value in given.items() if value and not self._is_left_out(flag)}

    def _value(self, option: SlurmOption, key: str) -> Any:
        slurm = self.cluster.slurm
        own = getattr(slurm, f"cpu_{key}", None) if self.kind >= JobKind.CPU_STAGE else None
        return own or (getattr(slurm, key) or inherited(option.flag) if self._has(option) else None)

    def _extra(self) -> dict[str, Value]:
        """Return the options of `slurm.extra`, and of the environment, for this job; false leaves a flag out."""
        inherited = {flag: os.environ[name] or True for flag, name in COUNTING.items() if name in os.environ}
        options = inherited | self.cluster.slurm.extra
        given = {name: value for name, value in options.items() if self._has(find_option(name))}
        return {name: value for name, value in given.items() if value is not False}

    def _has(self, option: SlurmOption) -> bool:
        """Return whether a job of this kind takes ``option`` from the cluster file."""
        elsewhere = self.kind >= JobKind.CPU_STAGE and self.cluster.slurm.cpu_partition is not None
        return self.kind <= option.until and not (option.of_partition and elsewhere)

    def _sizes(self) -> dict[str, Value]:
        """Return the options that size the job, by sbatch's long names."""
        sizes: dict[str, Value | None] = {
            "nodes": self.nodes,
            "ntasks": self.tasks,
            "cpus-per-task": self.cpus,
            **self._memory(),
            "time": self.minutes,
            "signal": self.signal and f"{self.signal}@{self.lead}",
        }
        return {flag: value for flag, value in sizes.items() if value and not self._is_left_out(flag)}

    def _is_left_out(self, flag: str) -> bool:
        """Return whether the cluster file leaves an option out that every job has otherwise."""
        return self.cluster.slurm.extra.get(flag) is False

    def _memory(self) -> dict[str, str]:
        """Return the option that requests host RAM, by sbatch's long name."""
        if not self.memory_mib or self.cluster.slurm.memory == "none":
            return {}
        if self.cluster.slurm.memory == "per_cpu":
            return {"mem-per-cpu": f"{ceil(self.memory_mib / (self.cpus or 1))}M"}
        return {"mem": f"{self.memory_mib}M"}

    def _memory_of_submitit(self) -> dict[str, str]:
        """Return the same as the parameter of submitit, whole GiB in its own unit."""
        memory = self._memory()
        if "mem" in memory and self.memory_mib:
            return {"mem": f"{self.memory_mib // 1024}GB"}
        return {name.replace("-", "_"): value for name, value in memory.items()}

    def _gpus(self) -> dict[str, str]:
        """Return the options that request GPUs, by sbatch's long names."""
        slurm = self.cluster.slurm

        def typed(count: int) -> str:
            return ":".join(filter(None, (slurm.gpu_type, str(count))))

        if not self.gpus or self.cluster.is_cpu or slurm.gpu_request == "none":
            return {}
        if slurm.gpu_request == "gres":
            return {"gres": f"gpu:{typed(self.gpus)}"}
        per_node = {"gpus-per-node": typed(self.gpus)}  # also beside the total, which Slurm may spread unevenly
        return per_node if slurm.gpu_request == "gpus-per-node" else {"gpus": typed(self.gpus * self.nodes), **per_node}


def memory_in_place_of_the_plans(cluster: Cluster) -> int:
    """Return the bytes of a node that `slurm.extra` requests, in sbatch's units: 64 is 64 MiB; 0 without a size."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", str(cluster.slurm.extra.get("mem")), re.IGNORECASE)
    return int(found[1]) * 1024 ** ("KMGT".index(found[2].upper() or "M") + 1) if found else 0


def _merged(gpus: Mapping[str, str], extra: Mapping[str, Value]) -> dict[str, Value]:
    """Return the requests of GPUs with the options of `slurm.extra`, whose generic resources come beside the GPUs."""
    both = {name: f"{gpus[name]},{extra[name]}" for name in ("gres",) if name in gpus and name in extra}
    return {**gpus, **extra, **both}


def _split(options: Mapping[str, Value], program: Literal["submitit", "snakemake"]) -> tuple[dict[str, Any], ...]:
    """Return the options that ``program`` has a name for, by that name, and the others."""
    names = {flag: getattr(SLURM_OPTIONS[flag], program) for flag in options}
    named = {names[flag]: value for flag, value in options.items() if names[flag]}
    return named, {flag: value for flag, value in options.items() if not names[flag]}


def _words(options: Mapping[str, Value]) -> list[str]:
    return [f"--{flag}" + ("" if value is True else f"={value}") for flag, value in options.items()]


def _checked(text: str) -> str:
    """Return options of sbatch.

    Raises:
        ConfigError: The executor would take a part of a value, such as the -J of `rack-J`, for an option of its own.
    """
    from snakemake_executor_plugin_slurm.validation import get_forbidden_slurm_options

    for pattern in get_forbidden_slurm_options():
        if found := re.search(pattern, text):
            raise ConfigError(
                f"slurm: Snakemake's Slurm executor refuses {text!r}, because it takes {found[0]!r} for an option that "
                "it sets itself. Change that value in the cluster file."
            )
    return text

"""The table of Slurm's options: one row per option of sbatch, with its names in the programs that submit jobs."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class JobKind(IntEnum):
    """The kinds of jobs; `SlurmOption.until` names the last kind for which an option holds."""

    TRAINING = 1
    """A training, and the check of nodes, which requests nodes as a training does."""
    EVALUATE = 2
    """A stage that uses the GPUs of one node."""
    CPU_STAGE = 3
    DRIVER = 4
    """Snakemake and the drivers. It uses no GPU."""


@dataclass(frozen=True)
class SlurmOption:
    """An option of sbatch. One that no row describes holds for every job and is given in `slurm.extra`."""

    flag: str
    """sbatch's long name, without the two hyphens."""
    key: str | None = None
    """Key of the section `slurm` that gives the option, which `slurm.extra` then refuses.

    A key `cpu_KEY`, if there is one, replaces it for jobs without a GPU.
    """
    is_value: bool = True
    """The value of ``key`` is that of the option. Otherwise a part of the request follows from it."""
    chosen_by: str = ""
    """The value of ``key`` that chooses this option for the request, whose amount is the plan's."""
    submitit: str | None = None
    """Parameter of submitit's executor. Without one, it is an additional parameter."""
    snakemake: str | None = None
    """Resource of Snakemake's Slurm executor. Without one, it is a part of ``slurm_extra``."""
    until: JobKind = JobKind.DRIVER
    """Last kind of job for which it holds if the cluster file gives it."""
    refused: str = ""
    """Why `slurm.extra` may not have it, and what to do."""
    of_partition: bool = False
    """Jobs without a GPU leave it out if they have a partition of their own."""


_TRES = ("tres-per-job", "tres-per-node", "tres-per-socket")
_SET_BY_DRIVERS = ("begin", "dependency", "no-requeue", "requeue")
_REFUSED_OF_STEPS: Final[Mapping[str, str]] = {
    "nodes": "the plan decides them; write the key nodes of the run, or max_nodes of the cluster file",
    "nodefile": "the plan decides the nodes; write the key exclude, or nodelist for a test",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "ntasks-per-gpu", "overcommit", "use-min-nodes"),
        "each node has one task, which starts its ranks",
    ),
    **dict.fromkeys(
        ("cpus-per-gpu", "gpus-per-socket", "gpus-per-task", "mem-per-gpu", "tres-per-task"),
        "the plan decides what each node gives; write the keys gpu_request and memory",
    ),
    **dict.fromkeys(
        ("chdir", "error", "input", "open-mode", "output"), "the driver reads the job's output in the folder of the run"
    ),
    **dict.fromkeys(("help", "test-only", "usage", "version"), "with it, Slurm's command starts nothing"),
}
_REFUSED = {
    **_REFUSED_OF_STEPS,
    "job-name": "the driver finds its job by that name",
    "array": "a run is one job; write several runs, or a sweep",
    "export": "the jobs need the environment of the driver; put variables into the key env of the cluster file",
    "clusters": "the driver asks one Slurm about its job; run Snakemake on a login node of that cluster",
    "signal": "the ranks save at a signal of their own; its time is the key slurm.signal_seconds",
    **dict.fromkeys(
        ("parsable", "quiet", "verbose", "wait", "wrap"),
        "it concerns the command sbatch, whose answer the driver reads, and not the job",
    ),
    **dict.fromkeys(
        ("export-file", "get-user-env", "gid", "uid"),
        "the job runs as you, in the environment of the driver; put variables into the key env of the cluster file",
    ),
    "container": "write the section slurm.container",
}
_ROWS = (
    SlurmOption("partition", key="partition", submitit="partition", snakemake="slurm_partition"),
    SlurmOption("account", key="account", submitit="account", snakemake="slurm_account"),
    SlurmOption("qos", key="qos", submitit="qos", snakemake="qos"),
    SlurmOption("constraint", key="constraint", submitit="constraint", snakemake="constraint", of_partition=True),
    SlurmOption("exclude", key="exclude", submitit="exclude"),
    SlurmOption("wckey", key="wckey", submitit="wckey"),
    SlurmOption("time", key="time_limit", is_value=False, submitit="time", snakemake="runtime"),
    SlurmOption("gpus", key="gpu_request", is_value=False, chosen_by="gpus"),
    SlurmOption("gpus-per-node", key="gpu_request", is_value=False, chosen_by="gpus-per-node"),
    SlurmOption("gres", snakemake="gres", until=JobKind.TRAINING),
    SlurmOption("nodes", submitit="nodes", snakemake="nodes", until=JobKind.TRAINING, refused=_REFUSED.pop("nodes")),
    SlurmOption("cpus-per-task", submitit="cpus_per_task", until=JobKind.TRAINING),
    SlurmOption("mem", submitit="mem", until=JobKind.TRAINING),
    SlurmOption("mem-per-cpu", key="memory", is_value=False, chosen_by="per_cpu", submitit="mem_per_cpu"),
    SlurmOption("job-name", submitit="job_name", until=JobKind.TRAINING, refused=_REFUSED.pop("job-name")),
    SlurmOption("comment", submitit="comment", until=JobKind.TRAINING),
    SlurmOption("exclusive", until=JobKind.EVALUATE),
    SlurmOption("reservation", of_partition=True),
    *(SlurmOption(flag, until=JobKind.TRAINING, refused=reason) for flag, reason in _REFUSED.items()),
    *(SlurmOption(flag, until=JobKind.TRAINING) for flag in ("nodelist", "time-min", *_TRES)),
    *(SlurmOption(flag, until=JobKind.CPU_STAGE) for flag in _SET_BY_DRIVERS),
)
SLURM_OPTIONS: Final[Mapping[str, SlurmOption]] = {row.flag: row for row in _ROWS}


_OTHER_NAMES: Final[Mapping[str, str]] = {
    "tasks-per-node": "ntasks-per-node",
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold",
    "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec",
    "V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error",
    "h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition",
    "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""sbatch's letters, and a name that its help does not have."""


OF_A_NODE: Final = {
    "mem": "memory_gib_per_node",
    **dict.fromkeys(("gpus_per_node", "nproc_per_node", "num_gpus"), "processes_per_node"),
}
"""Names of Slurm and the launchers for sizes of a node, which are keys of the cluster file."""


def find_option(name: str) -> SlurmOption:
    """Return the row of an option as a person spells it, such as ``--mail_type``, ``-L`` or sbatch's abbreviations."""
    flag = name.lstrip("-").replace("_", "-")
    flag = _OTHER_NAMES.get(flag, flag)
    longer = [row for row in _ROWS if flag and row.flag.startswith(flag)]
    return SLURM_OPTIONS.get(flag) or (longer[0] if len(longer) == 1 else SlurmOption(flag))


_VARIABLES: Final = {"TIMELIMIT": "time", "MEM_PER_NODE": "mem", "ARRAY_INX": "array", "DEBUG": "verbose"}
ASIDE: Final = "SHARDMAKE_"
"""Start of the name under which a variable of sbatch is kept that counts, so that sbatch itself does not read it."""
COUNTING: Final = {name: f"{ASIDE}SBATCH_{name.upper()}" for name in ("exclusive", "gres", "reservation")} | {
    "mem": f"{ASIDE}SBATCH_MEM_PER_NODE"
}
"""Options without a key that a variable may give, as `slurm.extra` does."""
OF_STEPS: Final = re.compile(
    r"SRUN_(CONTAINER|CPUS_PER_TASK|EXPORT_ENV)|SLURM_(CONSTRAINT|CPUS_PER_GPU|EXCLUSIVE|EXPORT_ENV|GPUS(_PER_\w+)?"
    r"|(STEP_)?GRES|(JOB_NUM_|N)NODES|MEM_PER_\w+|NPROCS|NTASKS(_PER_(GPU|NODE))?|OPEN_MODE|OVERCOMMIT|REMOTE_CWD"
    r"|SIGNAL|STD\w+MODE|TIMELIMIT|TRES_PER_TASK|USE_MIN_NODES|WORKING_DIR)"
)
"""Variables of srun that would replace what a job gives its step."""


def inherited(flag: str) -> str | None:
    """Return what the environment gives to sbatch for an option that the cluster file leaves open: SBATCH_ACCOUNT."""
    name = f"SBATCH_{flag.upper()}"
    return os.environ.get(name) or os.environ.get(f"{ASIDE}{name}") or None


def option_of_variable(name: str) -> SlurmOption:
    """Return the row of the option that the environment variable ``name`` gives to sbatch, such as SBATCH_TIMELIMIT."""
    word = name.removeprefix("SBATCH_")
    flag = _VARIABLES.get(word, word.lower().replace("_", "-"))
    return SLURM_OPTIONS.get(flag, SlurmOption(flag))


def why_refused(name: str) -> str:
    """Return why `slurm.extra` may not have an option, and what to do; empty if it may."""
    option = find_option(name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]+", option.flag):
        return "is not an option of sbatch. Write the option as the key and its value behind it, as in mail-type: END"
    if option.key:
        there = f"slurm.{option.key}: {option.chosen_by}; the plan has the amount" if option.chosen_by else "it there"
        return f"is set by the key slurm.{option.key}. Write {there}"
    return option.refused and f"cannot be given here: {option.refused}"


def why_refused_of_step(word: str, before: str = "") -> str:
    """Return why `slurm.srun_extra` may not have ``word`` after ``before``; empty if srun decides."""
    if not word.startswith("-"):
        is_value = before.startswith("-") and "=" not in before
        return "" if is_value else "is not an option of srun. Write --NAME=VALUE"
    option = find_option(word.partition("=")[0] if word.startswith("--") else word[1:2])
    return f"cannot be given here: {option.refused}" if option.flag in _REFUSED_OF_STEPS else ""


def clashes(extra: Mapping[str, object], memory: str, gpu_request: str) -> Iterator[str]:
    """Yield which options of `slurm.extra` request again what the keys `memory` and `gpu_request` do."""
    if extra.get("cpus-per-task"):
        yield "slurm.extra: 'cpus-per-task' is what the plan takes of cpus_per_node. Write that key"
    for flag, key in (("mem", "memory"), ("gres", "gpu_request")):
        if extra.get(flag) is False:
            yield f"slurm.extra: {flag!r} cannot be left out here. Write slurm.{key}: none"
    for flag, other in (("requeue", "no-requeue"), ("exclusive", "oversubscribe")):
        if extra.get(flag) and extra.get(other):
            yield f"slurm.extra: {flag!r} cannot be combined with {other!r}. Remove one of them"
    if memory == "per_cpu" and extra.get("mem"):
        yield "slurm.extra: 'mem' cannot be combined with slurm.memory: per_cpu. Remove one of them"
    for flag in ("gres", *_TRES):
        if gpu_request != "none" and re.search(r"(^|,)(gres[/:])?gpu\b", str(extra.get(flag))):
            yield f"slurm.extra: {flag!r} has GPUs, which slurm.gpu_request requests. Write slurm.gpu_type instead"

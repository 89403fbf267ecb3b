"""The types of values in the configuration: numbers with limits, paths, sizes and durations.

The upper limits are far above what anybody trains. They find typing errors and units that were mixed up.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from shardmake.core.environment import unset_variable
from shardmake.core.secrets import is_secret
from shardmake.core.units import parse_size

RUN = "{run}"
"""The run's name in a destination of ``push.to``."""
LAUNCHER_VARIABLES = ("MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_", "TORCHELASTIC_", "PET_")
"""Beginnings of the names of variables that a launcher sets for its ranks."""


def _number(value: Any) -> Any:
    """Convert text such as ``5e-4`` to a number, because YAML 1.1 reads it as text."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value):
        return float(value)
    return value


def _expand_home(text: str) -> str:
    """Expand ``~`` in a path; its variables stay."""
    if not text or re.search(r"[\x00-\x1f\x7f]", text):
        raise ValueError(f"{text!r} cannot be a path or an id. Write it without control characters, or remove the key")
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError:
        raise ValueError(f"{text!r} cannot be expanded: there is no such user. Write the path") from None


def expand(text: str) -> str:
    """Expand ``~`` and environment variables in a path; refuse unknown ones, which would be taken literally."""
    path = _expand_home(text)
    if unknown := unset_variable(path):
        raise ValueError(
            f"{text!r} cannot be expanded: the environment variable {unknown} is not set. Set it, or write the path"
        )
    return os.path.expandvars(path)


def check_bind(text: str) -> str:
    """Return ``SOURCE[:TARGET[:ro]]``; refuse what Apptainer or pyxis would read otherwise."""
    source, *rest = text.split(":")
    options = rest[1:]
    if "," in text or len(options) > 1 or options not in ([], ["ro"], ["rw"]):
        raise ValueError(f"{text!r} is not SOURCE[:TARGET[:ro]]. Write two paths without ',' and ':'")
    for path in (source, *rest[:1]):
        if not path.startswith("/"):
            raise ValueError(f"{text!r}: {path!r} is not an absolute path. Write it from the root folder")
    return text


def _size(text: str) -> str:
    if not 1000 <= parse_size(text) <= 10**15:
        raise ValueError(f"{text!r} is not the size of a file. Write a size from 1KB to 1000TB, such as 5GB")
    return text


def minutes(time_limit: str) -> int:
    """Return ``[D-]HH:MM:SS`` in minutes, rounded up."""
    days, _, clock = time_limit.rpartition("-")
    hours, rest, seconds = (int(part) for part in clock.split(":"))
    return int(days or 0) * 1440 + hours * 60 + rest + (seconds > 0)


def _time_limit(text: str) -> str:
    if not re.fullmatch(r"(\d+-)?\d+:[0-5]\d:[0-5]\d", text):
        raise ValueError(f"{text!r} is not a time limit. Write [D-]HH:MM:SS in quotes, such as '24:00:00'")
    if minutes(text) == 0:
        raise ValueError(f"{text!r} means no limit in Slurm. Write the limit of the partition, such as '24:00:00'")
    if minutes(text) > 365 * 24 * 60:
        raise ValueError(f"{text!r} is longer than a year. Write at most '365-00:00:00'")
    return text


def _matching(pattern: str, problem: str) -> AfterValidator:
    """Return the check of a text of one form; ``problem`` follows the text in the message."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} {problem}")
        return text

    return AfterValidator(check)


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(f"{name!r} is not the name of an environment variable. Use letters, digits and '_'")
    if name.startswith(LAUNCHER_VARIABLES):
        raise ValueError(f"{name} is set by the launcher for each rank. Remove it")
    if is_secret(name):
        raise ValueError(f"{name} seems to be a secret, and this file is not. Export it in your shell: jobs inherit it")
    return name


def check_text(text: str, *, several_lines: bool = False) -> str:
    """Return ``text``, refused if it is empty or has a control character; ``several_lines`` may have tabs as well."""
    if not text.strip():
        raise ValueError(f"{text!r} is empty. Write a value, or remove the key")
    allowed = "\n\t" if several_lines else ""
    if found := next((char for char in text if (char < " " or char == "\x7f") and char not in allowed), None):
        raise ValueError(f"{text!r} has the control character {found!r}. Remove it")
    return text


def check_destination(destination: str) -> str:
    """Return ``destination`` with its variables expanded; refuse any other text, and unknown names in braces."""
    kind, _, rest = destination.partition(":")
    if not rest or (kind not in ("file", "hub") and not re.fullmatch(r"//[^/].*", rest)):
        raise ValueError(f"{destination!r} is not a destination. Write file:FOLDER, hub:ORG/NAME or s3://BUCKET/PREFIX")
    rest = expand(rest)
    if unknown := re.search(r"\{.*?\}", rest):
        raise ValueError(f"{destination!r} has the unknown name {unknown[0]}. Only {RUN}, the run's name, is replaced")
    if kind == "hub" and not re.fullmatch(r"[\w.-]+/[\w.-]+", rest):
        raise ValueError(f"{destination!r} is not a hub repository. Write hub:ORG/NAME")
    return f"{kind}:{rest}"


def with_run_name(name: Any, run: Any) -> Any:
    """Return the values of a run, as they are in the file, with ``{run}`` in ``push.to`` replaced by ``name``."""
    push = run.get("push") if isinstance(run, dict) else None
    if not isinstance(push, dict) or "to" not in push:
        return run
    given = push["to"] if isinstance(push["to"], list) else [push["to"]]
    named = [to.replace(RUN, str(name)) if isinstance(to, str) else to for to in given]
    return {**run, "push": {**push, "to": named if isinstance(push["to"], list) else named[0]}}


AsNumber = BeforeValidator(_number)
PathText = Annotated[str, AfterValidator(expand)]
PathInJob = Annotated[str, AfterValidator(_expand_home)]
"""Its variables are expanded on the node, because only jobs may have them."""
FileSize = Annotated[str, AfterValidator(_size)]
LiteralText = Annotated[str, _matching(
    r"(?s)(?!.*\$\{?\w).*",
    "has a variable, which is not replaced. Write its value, or export it in slurm.setup or in your shell",
)]  # fmt: skip
ShellLine = Annotated[str, _matching(
    r"(?s)(?!\s*#SBATCH).*", "is an option of sbatch, and no command. Write it under slurm.extra"
)]  # fmt: skip
_AsText = BeforeValidator(lambda value: str(value) if type(value) is int else value)
TimeLimit = Annotated[str, AfterValidator(_time_limit), _AsText]
GpuType = Annotated[str, _matching(
    r"[\w.+-]+",
    "is not the name of a GPU type. Write the name alone, as `sinfo --format=%G` prints it, such as a100",
)]  # fmt: skip
SourceName = Annotated[str, _matching(r"[A-Za-z0-9][\w.-]*", "is not a name. Use letters, digits, '_', '.' and '-'")]
HealthPath = Annotated[str, _matching(r"/.*", "is not a path. Begin it with '/', as in /health")]
Variable = Annotated[str, AfterValidator(_variable)]

Fraction = Annotated[float, Field(ge=0, le=1), AsNumber]
LearningRate = Annotated[float, Field(gt=0, le=100), AsNumber]
SchedulerNumber = Annotated[int, Field(ge=0, le=10**9)] | Annotated[float, Field(ge=0, le=10**9)]
WeightDecay = Annotated[float, Field(ge=0, le=100), AsNumber]
GradientNorm = Annotated[float, Field(gt=0, le=10**12), AsNumber]
Epochs = Annotated[float, Field(gt=0, le=100_000), AsNumber]
Steps = Annotated[int, Field(ge=1, le=1_000_000_000)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
Sequences = Annotated[int, Field(ge=1, le=10_000_000)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Ranks = Annotated[int, Field(ge=1, le=1024)]
Nodes = Annotated[int, Field(ge=1, le=100_000)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
GpuMemory = Annotated[float, Field(ge=1, le=1024), AsNumber]
HostMemory = Annotated[float, Field(gt=0, le=65_536), AsNumber]
DiskSpace = Annotated[float, Field(gt=0, le=10_000_000), AsNumber]
Bandwidth = Annotated[float, Field(gt=0, le=100_000), AsNumber]
Seconds = Annotated[float, Field(gt=0, le=604_800), AsNumber]
Hours = Annotated[float, Field(gt=0, le=100_000_000), AsNumber]
SlurmNumber = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]

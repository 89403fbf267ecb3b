"""The file of a run's training program: ``script: train.py``, or a module as in ``script: -m package.module``."""

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from string import Template
from typing import Final

from shardmake.core.errors import ConfigError, nearest

_MODULE = "-m "


def module_of(script: str) -> str | None:
    """Return the module that ``script`` names, or None if it names a file."""
    return script.removeprefix(_MODULE).strip() if script.startswith(_MODULE) else None


def script_file(script: str) -> Path:
    """Return the file that runs, for a package that of its ``__main__``.

    A module is looked for in the working folder, from which the ranks start, and in the installed packages. Nothing is
    imported. Raises `ConfigError` if there is no such module, or it has no file of Python.
    """
    name = module_of(script)
    if name is None:
        return Path(script)
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(
            f"script: there is no module {name!r} to run, neither in {Path.cwd()} nor among the installed packages. "
            "Install it beside Shardmake, or name a file."
        )
    return Path(spec.origin)


def _find(name: str) -> ModuleSpec | None:
    """Return the specification of a module, without an import of the packages around it."""
    parts, spec = name.split("."), None
    places: Sequence[str] = [str(Path.cwd()), *sys.path]
    for number in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:number]), places) if all(parts) else None
        if spec is None:
            return None
        places = spec.submodule_search_locations or []
    return spec


PREFIX: Final = "SHARDMAKE_"
_OF_ATTEMPT: Final = "ATTEMPT ATTEMPT_FOLDER CHECKPOINTS OUTPUT METRICS STOP_FILES STOPPED DATA RAW_DATA BASE"
_OF_PLAN: Final = (
    "DEEPSPEED_CONFIG SEQUENCE_LENGTH MICRO_BATCH_SIZE GRADIENT_ACCUMULATION_STEPS LEARNING_RATE MAX_STEPS EPOCHS SEED"
)
SCRIPT_VARIABLES: Final = tuple(PREFIX + name for name in (*_OF_ATTEMPT.split(), *_OF_PLAN.split()))
"""docs/how-to/user-script.md describes them."""
VARIABLE_KEYS: Final = {f"{PREFIX}{key.upper()}": key for key in ("learning_rate", "max_steps", "epochs")}
"""Keys that a run of a script may leave out, by the variable that has their value."""
SERVICE_VARIABLES: Final = tuple(f"{PREFIX}SERVICE_{name}" for name in ("HOST", "PORT", "ADDRESSES"))
"""The variables that lead to a run's service (docs/how-to/user-script.md)."""


def variable_problems(
    key: str, words: Iterable[str], known: Sequence[str], unset: Collection[str] = ()
) -> Iterator[str]:
    """Yield each variable of Shardmake in ``words``, the value of ``key``, that is not one of ``known``.

    Other variables are those of the nodes, which are not known here. Those of ``unset`` would be empty.
    """
    names = [name for word in words for name in Template(word).get_identifiers() if name.startswith(PREFIX)]
    for name in names:
        if name in SERVICE_VARIABLES and not set(known) & set(SERVICE_VARIABLES):
            yield f"{key}: ${name} is set only for a run with a service. Add service and service_nodes"
        elif name in unset:
            yield f"{key}: ${name} would be empty. Set {VARIABLE_KEYS[name]} in the run"
        elif name not in known:
            yield f"{key}: ${name} is not set for this program.{nearest(name, known)} Use one of {', '.join(known)}"

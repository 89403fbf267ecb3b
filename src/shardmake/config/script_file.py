"""The file of a run's training program: ``script: train.py``, or a module as in ``script: -m package.module``."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from shardmake.core.errors import ConfigError

_MODULE = "-m "


def module_of(script: str) -> str | None:
    """Return the module that ``script`` names, or None if it names a file."""
    return script.removeprefix(_MODULE).strip() if script.startswith(_MODULE) else None


def script_file(script: str) -> Path:
    """Return the file that runs, for a package that of its ``__main__``.

    A module is looked for in the working folder, from which the ranks start, and in the installed packages. Nothing is
    imported.

    Raises:
        ConfigError: There is no such module, or it has no file of Python.
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

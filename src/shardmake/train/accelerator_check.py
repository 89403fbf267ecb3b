"""Compare each Accelerator that a user's script creates with the plan."""

import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from shardmake.config.strategies import DDP, DEEPSPEED, FSDP
from shardmake.run.attempt import AttemptDir, rank_report
from shardmake.train.engine_check import EngineMismatchError, environment_report

ACCELERATE_NAMES: dict[str, tuple[str, ...]] = {
    DEEPSPEED: ("DEEPSPEED",),
    FSDP: ("FSDP",),
    DDP: ("MULTI_GPU", "MULTI_CPU", "NO"),
}
"""Accelerate's distributed types for each engine; a single rank is NO."""


def check_accelerators(folder: AttemptDir, rank: int, engine: str) -> None:
    """Make every new Accelerator raise `EngineMismatchError` if its engine is not ``engine``."""
    compare = partial(_wrap_accelerator, folder=folder, rank=rank, engine=engine)
    sys.meta_path.insert(0, _AfterImport("accelerate.accelerator", compare))


class _AfterImport(MetaPathFinder):
    """Call ``callback`` with a module after the script has imported it.

    Importing the module here would be too early: the script may set variables that the libraries read at their import.
    """

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name, self.callback = name, callback

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's spec with a loader that calls `callback`; part of the import system."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_call_back(module: ModuleType) -> None:
            execute(module)
            self.callback(module)

        spec.loader.exec_module = execute_and_call_back  # type: ignore[method-assign]
        return spec


def _wrap_accelerator(module: ModuleType, folder: AttemptDir, rank: int, engine: str) -> None:
    start = module.Accelerator.__init__

    @wraps(start)
    def compare(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        found = self.distributed_type.value
        rank_report(folder, rank, environment_report() | {"distributed_type": found})
        if found not in ACCELERATE_NAMES[engine]:
            raise EngineMismatchError(
                f"The plan's engine is {engine}, but the script's Accelerator uses {found}. Nothing was trained. "
                "Create the Accelerator without deepspeed_plugin, fsdp_plugin and cpu; the launcher sets the engine."
            )

    module.Accelerator.__init__ = compare

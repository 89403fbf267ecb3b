"""Run a user's training script on one rank, as `accelerate launch SCRIPT ARGS` would, with the plan's engine checked.

docs/how-to/user-script.md describes the script's environment and outputs.
"""

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

from shardmake.config.strategies import DDP, DEEPSPEED, FSDP
from shardmake.run.attempt import USER_SCRIPT_PHASE, AttemptDir, rank_report, write_heartbeat
from shardmake.run.training_settings import ScriptProgram
from shardmake.train.engine_check import EngineMismatchError, environment_report
from shardmake.train.process_group import leave_together
from shardmake.train.rank_context import RankContext
from shardmake.train.trackers import prepare_trackers

ACCELERATE_NAMES: dict[str, tuple[str, ...]] = {
    DEEPSPEED: ("DEEPSPEED",),
    FSDP: ("FSDP",),
    DDP: ("MULTI_GPU", "MULTI_CPU", "NO"),
}
"""Accelerate's distributed types for each engine; a single rank is NO."""


def train(attempt_folder: Path) -> None:
    """Run the script of the attempt to its end, in this process and as ``__main__``."""
    context = RankContext.load(attempt_folder)
    folder, settings = context.folder, context.settings
    program, engine = settings.program, settings.expected.engine
    assert isinstance(program, ScriptProgram), "this module runs scripts only"
    prepare_trackers(context.attempt, settings.arguments["report_to"])
    os.environ.update(script_environment(context))
    write_heartbeat(folder, context.rank, USER_SCRIPT_PHASE, 0)
    rank_report(folder, context.rank, environment_report())
    check_accelerators(folder, context.rank, engine)
    if context.attempt.accelerator == "cpu":
        _start_on_cpu(engine)
    sys.argv = [program.path, *(Template(word).safe_substitute(os.environ) for word in program.args)]
    sys.path[0] = str(Path(program.path).resolve().parent)
    run_script(program.path)
    leave_together()


def script_environment(context: RankContext) -> dict[str, str]:
    """Return the environment variables of the script, which docs/how-to/user-script.md lists."""
    rundir, folder, plan = context.attempt.rundir, context.folder, context.plan
    settings, arguments = context.settings, context.settings.arguments
    values: dict[str, object] = {
        "ATTEMPT": context.attempt.number,
        "ATTEMPT_FOLDER": folder.root,
        "CHECKPOINTS": rundir.checkpoints,
        "OUTPUT": rundir.script_output,
        "METRICS": rundir.metrics,
        "STOP_FILES": f"{rundir.stop_file}:{folder.stop_file}",
        "STOPPED": folder.stopped,
        "DATA": rundir.data,
        "BASE": settings.model.path,
        "SEQUENCE_LENGTH": plan.workload.sequence_length,
        "MICRO_BATCH_SIZE": plan.choice.micro_batch_size,
        "GRADIENT_ACCUMULATION_STEPS": plan.choice.gradient_accumulation_steps,
        "LEARNING_RATE": arguments["learning_rate"],
        "MAX_STEPS": arguments.get("max_steps", ""),
        "EPOCHS": arguments.get("num_train_epochs", ""),
        "SEED": arguments["seed"],
    }
    return {f"SHARDMAKE_{name}": str(value) for name, value in values.items()}


def _start_on_cpu(engine: str) -> None:
    """Start the process group, or make Accelerate start it; without a GPU, Accelerate does not do so by itself."""
    from accelerate import PartialState

    from shardmake.core.environment import leave_collectives_to_gloo

    leave_collectives_to_gloo()
    if engine == DEEPSPEED:
        PartialState(backend="gloo")
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"


def run_script(path: str) -> None:
    """Run the script; treat its `sys.exit(0)` as a normal end."""
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


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

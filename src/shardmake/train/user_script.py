"""Run a user's training script on one rank, as `accelerate launch SCRIPT ARGS` would, with the plan's engine checked.

docs/how-to/user-script.md describes the script's environment and outputs.
"""

import os
import runpy
import sys
from functools import wraps
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
    sys.meta_path.insert(0, _AcceleratorCheck(folder, context.rank, engine))
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


class _AcceleratorCheck(MetaPathFinder):
    """Make every new Accelerator of the script raise `EngineMismatchError` if its engine is not the planned one.

    The check is installed when the script imports Accelerate. Importing it here would be too early: the script may set
    variables that the libraries read at their import.
    """

    def __init__(self, folder: AttemptDir, rank: int, engine: str) -> None:
        self.folder, self.rank, self.engine = folder, rank, engine

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's spec with a loader that installs the check; part of the import system."""
        if fullname != "accelerate.accelerator":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            self._install(module)

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec

    def _install(self, module: ModuleType) -> None:
        start = module.Accelerator.__init__

        @wraps(start)
        def compare(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            start(accelerator, *args, **kwargs)
            found = accelerator.distributed_type.value
            rank_report(self.folder, self.rank, environment_report() | {"distributed_type": found})
            if found not in ACCELERATE_NAMES[self.engine]:
                raise EngineMismatchError(
                    f"The plan's engine is {self.engine}, but the script's Accelerator uses {found}. Nothing was "
                    "trained. Create the Accelerator without deepspeed_plugin, fsdp_plugin and cpu; the launcher sets "
                    "the engine."
                )

        module.Accelerator.__init__ = compare

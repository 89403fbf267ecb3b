"""One rank of a training by a script of the user's: as `accelerate launch SCRIPT ARGS` would run it, and watched.

What the script finds in its environment and what it may leave is described in docs/how-to/user-script.md.
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
from shardmake.core.atomic import read_json
from shardmake.run.attempt import USER_SCRIPT_PHASE, Attempt, AttemptDir, rank_report, write_heartbeat
from shardmake.run.plan import Plan
from shardmake.train.engine_check import EngineMismatchError, environment_report
from shardmake.train.process_group import leave_together
from shardmake.train.trackers import prepare_trackers

ACCELERATE_NAMES: dict[str, tuple[str, ...]] = {
    DEEPSPEED: ("DEEPSPEED",),
    FSDP: ("FSDP",),
    DDP: ("MULTI_GPU", "MULTI_CPU", "NO"),
}
"""Accelerate's distributed types for each engine; a single rank is NO."""


def train(attempt_folder: Path) -> None:
    """Run the script of the attempt in this process, as ``__main__``, to its end."""
    folder = AttemptDir(attempt_folder)
    attempt, settings = folder.read(), read_json(folder.training, "shardmake train NAME")
    program, engine, rank = settings["program"], settings["expected"]["engine"], int(os.environ.get("RANK", "0"))
    prepare_trackers(attempt, settings["arguments"]["report_to"])
    os.environ.update(variables(folder, attempt, settings))
    write_heartbeat(folder, rank, USER_SCRIPT_PHASE, 0)
    rank_report(folder, rank, environment_report())
    _watch_accelerator(folder, rank, engine)
    if attempt.accelerator == "cpu":
        _start_on_cpu(engine)
    sys.argv = [program["path"], *(Template(word).safe_substitute(os.environ) for word in program["args"])]
    sys.path[0] = str(Path(program["path"]).resolve().parent)
    _run(program["path"])
    leave_together()


def variables(folder: AttemptDir, attempt: Attempt, settings: dict[str, Any]) -> dict[str, str]:
    """What the script finds in its environment, one variable a line of docs/how-to/user-script.md."""
    rundir, plan, arguments = attempt.rundir, Plan.read(folder.plan), settings["arguments"]
    values: dict[str, object] = {
        "ATTEMPT": attempt.number,
        "ATTEMPT_FOLDER": folder.root,
        "CHECKPOINTS": rundir.checkpoints,
        "OUTPUT": rundir.script_output,
        "METRICS": rundir.metrics,
        "STOP_FILES": f"{rundir.stop_file}:{folder.stop_file}",
        "STOPPED": folder.stopped,
        "DATA": rundir.data,
        "BASE": settings["model"]["path"],
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
    """Without a GPU, Accelerate starts a group of processes only where it is told to; here it finds one."""
    from accelerate import PartialState

    from shardmake.core.environment import leave_collectives_to_gloo

    leave_collectives_to_gloo()
    if engine == DEEPSPEED:
        PartialState(backend="gloo")
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"


def _watch_accelerator(folder: AttemptDir, rank: int, engine: str) -> None:
    """Have the script's Accelerator compared with the plan as it comes up, before anything is trained."""
    compare = partial(_compare, folder=folder, rank=rank, engine=engine)
    sys.meta_path.insert(0, _AfterImport("accelerate.accelerator", compare))


class _AfterImport(MetaPathFinder):
    """Calls ``then`` with a module when it has been imported.

    To import it here would rob the script of its chance to set variables that the libraries read at their import.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Part of the import system: where ``fullname`` is, with its loader made to call `then`."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def _compare(module: ModuleType, folder: AttemptDir, rank: int, engine: str) -> None:
    """Make every new Accelerator of ``module`` report what it is, and refuse to be another than the planned one."""
    start = module.Accelerator.__init__

    @wraps(start)
    def compare(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        found = self.distributed_type.value
        rank_report(folder, rank, environment_report() | {"distributed_type": found})
        if found not in ACCELERATE_NAMES[engine]:
            raise EngineMismatchError(
                f"The plan's engine is {engine}, and the script's Accelerator came up as {found}; nothing was trained. "
                "Leave the choice to the launcher: give Accelerator no deepspeed_plugin, fsdp_plugin or cpu."
            )

    module.Accelerator.__init__ = compare


def _run(path: str) -> None:
    """The script, whose `sys.exit(0)` is an end like any other."""
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise

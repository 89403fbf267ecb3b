"""Run a user's training script on one rank, as `accelerate launch SCRIPT ARGS` would, with the plan's engine checked.

docs/how-to/user-script.md describes the script's environment and outputs.
"""

import os
import runpy
import sys
from pathlib import Path
from string import Template

from shardmake.config.script_file import module_of
from shardmake.config.strategies import DEEPSPEED
from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.run.attempt import USER_SCRIPT_PHASE, rank_report, write_heartbeat
from shardmake.run.training_settings import ScriptProgram, script_environment
from shardmake.train.engine_check import environment_report
from shardmake.train.process_group import leave_together
from shardmake.train.rank_context import RankContext
from shardmake.train.script_hooks import install_hooks
from shardmake.train.trackers import prepare_trackers


def train(attempt_folder: Path) -> None:
    """Run the script of the attempt to its end, in this process and as ``__main__``."""
    context = RankContext.load(attempt_folder)
    folder, settings = context.folder, context.settings
    program = settings.program
    assert isinstance(program, ScriptProgram), "this module runs scripts only"
    prepare_trackers(context.attempt, settings.arguments["report_to"])
    os.environ.update(script_environment(folder, context.attempt, context.plan, settings))
    write_heartbeat(folder, context.rank, USER_SCRIPT_PHASE, 0)
    rank_report(folder, context.rank, environment_report())
    install_hooks(context)
    if context.attempt.accelerator == "cpu":  # DeepSpeed uses gloo; `default_to_gloo` lets Accelerate start it
        leave_collectives_to_gloo()
        if settings.expected.engine != DEEPSPEED:  # Accelerate starts DDP without a GPU
            os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.argv = [program.path, *(Template(word).safe_substitute(os.environ) for word in program.args)]
    if module_of(program.path) is None:  # a module is run from the working folder, as by `python -m`
        sys.path[0] = str(Path(program.path).resolve().parent)
    run_script(program.path)
    leave_together()


def run_script(script: str) -> None:
    """Run a file or a module (``-m NAME``) as ``__main__``; treat its `sys.exit(0)` as a normal end."""
    module = module_of(script)
    try:
        if module is None:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise

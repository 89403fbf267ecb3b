"""Files and flags as `accelerate launch` reads them: the ranks that it starts, and their variables."""

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

from shardmake.config.user_file_keys import ACCELERATE_KEYS
from shardmake.core.private_names import private
from shardmake.render import parsers
from shardmake.render.comparison import EngineSettings, Problem, Settings

VARIABLES: Final = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Prefixes of the variables in which Accelerate passes settings to the ranks."""
IGNORED_IN_FILE: Final = {
    **{key: ACCELERATE_KEYS[key].idle for key in ("rdzv_backend", "enable_cpu_affinity", "downcast_bf16")},
    "same_network": (True, False),
}
"""Keys that `accelerate launch` takes from its command line alone, and the values that `accelerate config` writes."""


def launch(settings: Settings, deepspeed: dict[str, Any] | None, found: EngineSettings, folder: Path) -> None:
    """Let `accelerate launch` read its file and flags, and set the variables that it would set for the ranks."""
    # A file without the number of processes is used with --num_processes.
    values = {"num_processes": settings.world_size} | _usable(settings.accelerate or {}, found)
    attempt = lambda less: _start_launcher(less, settings, deepspeed, folder)  # noqa: E731
    while True:
        try:
            launched, found.launcher = attempt(values)
            break
        except (Exception, SystemExit) as error:
            key = parsers.culprit(values, attempt)
            if key is None:
                named = (key for key in ("distributed_type", "num_processes") if key in str(error))
                missing = next(named, "the options")
                if not any(problem.key == missing for problem in found.problems):  # refused already, and removed
                    found.refuse("Accelerate", missing, None, f"{_STOPS}: it cannot start without it.")
                return
            found.refuse("Accelerate", key, values.pop(key), f"{_STOPS}: it cannot use this value.")
    found.launched = launched
    _check_gpu_ids(launched, found)
    if found.launcher != "simple_launcher" or launched.mpirun_hostfile is not None:
        return
    found.world_size = 1
    kind, one_process = values.get("distributed_type"), "`accelerate launch` starts one plain process, silently."
    if launched.use_cpu and kind not in ("NO", "MULTI_CPU"):
        advice = "Set use_cpu: false here, and use_cpu in the training arguments."
        found.refuse("Accelerate", "use_cpu", True, f"{one_process} {advice}")
    elif (launched.num_processes or 1) > 1:
        advice = f"{launched.num_processes} ranks need MULTI_GPU, also on CPUs, or mpirun_hostfile."
        found.refuse("Accelerate", "distributed_type", kind, f"{one_process} {advice}")


def _check_gpu_ids(launched: Namespace, found: EngineSettings) -> None:
    """Record ids that leave a machine with fewer GPUs than ranks, or with GPUs that no rank uses."""
    ids, ranks = launched.gpu_ids, (launched.num_processes or 1) // (launched.num_machines or 1)
    seen = ranks if launched.use_cpu or ids in (None, "all") else str(ids).strip(",").count(",") + 1
    if seen != ranks:
        problem = "so ranks fail for lack of a GPU" if seen < ranks else "so GPUs stay idle"
        effect = f"Each machine starts {ranks} ranks on {seen} GPUs, {problem}. Write one for each rank."
        level: Literal["error", "warning"] = "error" if seen < ranks else "warning"
        found.problems.append(Problem("Accelerate", "gpu_ids", ids, level, effect))


_STOPS: Final = "`accelerate launch` stops"


def _usable(given: Mapping[str, Any], found: EngineSettings) -> dict[str, Any]:
    """Return the keys of an Accelerate file that `accelerate launch` can use; record the others."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    actions = {action.dest: action for action in private(launch_command_parser()).actions}
    known = {*ClusterConfig.__dataclass_fields__, "dynamo_backend", "fp16", "downcast_bf16"}
    values: dict[str, Any] = {}
    for key, value in given.items():
        effect = ""
        if key not in known:
            effect = f"{_STOPS}: it does not know this key."
        elif value is None and key in ("num_processes", "num_machines", "distributed_type"):
            effect = "The key needs a value."
        elif value is None or key == "downcast_bf16":
            pass
        elif not key.endswith("_config"):
            # In place of one value; the two settings of TPUs are lists.
            is_compound = isinstance(value, dict) or (isinstance(value, list) and key not in ("tpu_env", "tpu_vm"))
            expected = "one value" if is_compound else _expected_by(actions.get(key), value)
            effect = f"`accelerate launch` needs {expected}." if expected else ""
            values |= {} if effect else {key: value}
        elif isinstance(value, dict):
            values[key] = _usable_section(key, value, actions, found)
        elif key == "deepspeed_config":
            effect = f"{_STOPS}. Write the name of the file as deepspeed_config_file below this key."
        else:
            effect = f"{_STOPS}: it needs a mapping."
        if effect:
            found.refuse("Accelerate", key, value, effect)
        if value not in (None, *IGNORED_IN_FILE.get(key, (value,))):
            effect = "Accelerate ignores the key in a file. Write it on the command line."
            found.problems.append(Problem("Accelerate", key, value, "warning", effect))
    refuse_counts(values, found)
    return values


_SMALLEST: Final = {"num_processes": 1, "num_machines": 1, "machine_rank": 0, "main_process_port": 0}


def refuse_counts(values: dict[str, Any], found: EngineSettings) -> None:
    """Record and remove counts with which the launcher starts other ranks than the file says, or stops after all."""

    def refuse(key: str, effect: str) -> None:
        found.refuse("Accelerate", key, values.pop(key), effect)

    for key, smallest in _SMALLEST.items():
        value = values.get(key)
        number = int(value) if isinstance(value, str) and value.strip().lstrip("-").isdigit() else value
        if key in values and (not isinstance(number, int) or isinstance(number, bool) or number < smallest):
            refuse(key, f"`accelerate launch` needs a whole number from {smallest} on.")
        elif key in values:
            values[key] = number
    ranks, machines = values.get("num_processes"), values.get("num_machines", 1)
    if values.get("machine_rank", 0) >= machines:
        refuse("machine_rank", f"The machines are numbered from 0 to {machines - 1}.")
    if values.get("main_process_port", 0) > 65535:
        refuse("main_process_port", "The largest port is 65535.")
    if ranks is not None and ranks % machines:
        per_machine = f"Each of the {machines} machines starts {ranks // machines}, silently."
        refuse("num_processes", f"{per_machine} Write a multiple of {machines}.")


def _usable_section(
    section: str, given: Mapping[str, Any], actions: Mapping[str, Any], found: EngineSettings
) -> dict[str, Any]:
    prefix = section.removesuffix("_config") + "_"
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = f"{prefix}{key}" if section in ("fsdp_config", "dynamo_config") and not key.startswith(prefix) else key
        written = f"{section}.{key}"
        if name not in actions and name != "fsdp_ignored_modules" and section in parsers.SECTIONS:
            effect = "Accelerate does not know this key and ignores it."
            found.problems.append(Problem("Accelerate", written, value, "warning", effect))
        elif (expected := _expected_by(actions.get(name), value)) is not None:
            found.refuse("Accelerate", written, value, f"Accelerate needs {expected}.")
        else:
            values[key] = value
    return values


def _expected_by(action: Any, value: Any) -> str | None:
    """Return what an option of `accelerate launch` expects if ``value`` is something else, or None."""
    if action is None or value is None:
        return None
    if isinstance(value, (dict, list)):
        return "one value"
    if action.type in (int, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
        try:
            action.type(value)
        except (TypeError, ValueError):
            return "a number"
    return None


def _start_launcher(
    values: Mapping[str, Any], settings: Settings, deepspeed: dict[str, Any] | None, folder: Path
) -> tuple[Namespace, str]:
    """Return the launcher's arguments and the function that would start the ranks; set the ranks' variables."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    path = folder / "accelerate.json"
    path.write_text(json.dumps(dict(values)))
    given = [] if settings.accelerate is None else ["--config_file", str(path)]
    arguments = launch.launch_command_parser().parse_args([*given, *settings.flags, "train.py"])
    engines = (arguments.multi_gpu, arguments.use_deepspeed, arguments.use_fsdp, arguments.cpu, settings.on_cpu)
    if settings.accelerate is None and not any(engines):  # as the launcher decides on a node with several GPUs
        arguments.multi_gpu = (arguments.num_processes or 1) > 1
    started: list[str] = []
    with ExitStack() as stack:
        for name in [name for name in vars(launch) if name.endswith("_launcher")]:
            stack.enter_context(mock.patch.object(launch, name, lambda *_, name=name: started.append(name)))
        launch.launch_command(arguments)
    if arguments.deepspeed_config_file is not None and deepspeed is not None:
        arguments.deepspeed_config_file = str(folder / "deepspeed.json")
        (folder / "deepspeed.json").write_text(json.dumps(deepspeed))
    # A port that is never in use: the launcher would look for another one.
    arguments.main_process_port, arguments.main_process_ip = 1, arguments.main_process_ip or "localhost"
    environment: dict[str, str] = {}
    if started[0] == "deepspeed_launcher":
        environment = prepare.prepare_deepspeed_cmd_env(arguments)[1]
    elif started[0] == "multi_gpu_launcher":
        environment = prepare.prepare_multi_gpu_env(arguments)
    elif started[0] == "simple_launcher":
        environment = prepare.prepare_simple_launcher_cmd_env(arguments)[1]
    os.environ.update({name: value for name, value in environment.items() if name.startswith(VARIABLES)})
    return arguments, started[0]

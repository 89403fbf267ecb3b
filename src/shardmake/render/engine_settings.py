"""Settings as the libraries read them: pass them through the launcher, Trainer and Accelerate up to DeepSpeed's config.

Everything here runs in a process of its own, without a GPU, without weights and without communication
(`shardmake.render.parsers`). A value that a library refuses is recorded and removed, so that one mistake does not hide
the others.
"""

import copy
import difflib
import json
import math
import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, get_args, get_type_hints
from unittest import mock

from pydantic import TypeAdapter, ValidationError

from shardmake.config.deepspeed_keys import find_removed
from shardmake.render import parsers
from shardmake.render.comparison import Library, Problem, Settings

VARIABLES: Final = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Prefixes of the variables in which Accelerate passes settings to the ranks."""
LAUNCHERS: Final = (
    "deepspeed_launcher",
    "multi_gpu_launcher",
    "simple_launcher",
    "tpu_launcher",
    "tpu_pod_launcher",
    "sagemaker_launcher",
)
MAPPINGS: Final = (
    "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "bf16", "fp16",
    "optimizer", "optimizer.params", "scheduler", "scheduler.params", "torch_autocast", "compile", "checkpoint",
    "tensor_parallel", "activation_checkpointing", "aio", "data_types", "comms_logger", "flops_profiler",
)  # fmt: skip
"""Keys of a DeepSpeed file that hold a mapping."""
BATCH: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
REFUSED_BESIDE_DEEPSPEED_FILE: Final = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys of accelerate's ``deepspeed_config`` section that it refuses beside a DeepSpeed file."""
FILLED_BY_ACCELERATE: Final = {
    "gradient_clipping": 1.0,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}
"""Values that `Accelerator.prepare` puts in place of an "auto" that is still there."""
HIDDEN_SIZE: Final = 64
"""Stands in for the model's, from which Trainer computes bucket sizes for "auto"."""


@dataclass
class EngineSettings:
    """Settings as the libraries understood them.

    ``left_to_script`` holds keys of the DeepSpeed file whose "auto" a script's objects fill in. ``data_ranks`` is the
    number of ranks that share the rows. ``stops`` maps a key to a sentence, if the key ends the run.
    """

    arguments: Any = None
    launched: Namespace | None = None
    launcher: str = ""
    config: Any = None
    defaults: Any = None
    fsdp: Any = None
    dynamo: str = "NO"
    deepspeed: dict[str, Any] = field(default_factory=dict)
    left_to_script: list[str] = field(default_factory=list)
    uses_deepspeed: bool = False
    world_size: int = 1
    data_ranks: int = 1
    problems: list[Problem] = field(default_factory=list)
    stops: dict[str, str] = field(default_factory=dict)

    def refuse(self, library: Library, key: str, value: Any, effect: str) -> None:
        """Record a value that ``library`` refuses."""
        self.problems.append(Problem(library, key, value, "error", effect))


def read_settings(settings: Settings, folder: Path) -> EngineSettings:
    """Return what the libraries make of ``settings``; ``folder`` is any empty folder."""
    found = EngineSettings(world_size=settings.world_size)
    with mock.patch.dict(os.environ), ExitStack() as stack:
        _enter_world(settings.world_size)
        stack.callback(_leave_world)
        deepspeed = None
        if settings.deepspeed is not None:
            deepspeed = found.deepspeed = _well_formed(settings.deepspeed, found)
        if settings.accelerate is not None or settings.flags:
            _launch(settings, deepspeed, found, folder)
        named = deepspeed if settings.named_by_trainer or settings.accelerate is None else None
        if named is not None or "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ:
            _drop_refused_fields(found)
        plugin = (
            _read_script(named, found) if settings.trainer is None else _read_trainer(settings, named, found, folder)
        )
        found.uses_deepspeed = named is not None or plugin is not None
        if plugin is not None:
            _read_deepspeed(settings, plugin, found)
        _read_dynamo(found)
        found.data_ranks = found.world_size
        if settings.on_cpu:
            found.fsdp = None  # Accelerate ignores it
            found.data_ranks = _ranks_without_gpu(settings, found)
    return found


def _ranks_without_gpu(settings: Settings, found: EngineSettings) -> int:
    """Return the number of ranks that Accelerate counts on nodes without a GPU; record it if each rank counts one."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import str_to_bool

    by_trainer = settings.trainer is not None and bool(settings.trainer.get("use_cpu"))
    use_cpu = by_trainer or bool(str_to_bool(os.environ.get("ACCELERATE_USE_CPU", "false")))
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(found.uses_deepspeed).lower()
    AcceleratorState._reset_state(reset_partial_state=True)
    ranks = PartialState(cpu=use_cpu, **({"backend": "gloo"} if use_cpu else {})).num_processes
    if found.world_size > ranks:
        total = found.deepspeed.get("train_batch_size") if found.deepspeed else "auto"
        if found.uses_deepspeed and (total == "auto" or (total is not None and settings.trainer is not None)):
            found.stops["train_batch_size"] = "DeepSpeed stops: Accelerate counts one rank, and DeepSpeed counts all."
        if settings.trainer is not None and settings.trainer.get("fsdp"):
            found.stops["fsdp"] = "Trainer stops: FSDP needs several ranks, and without a GPU each rank counts one."
        effect = "Without a GPU, Accelerate takes each rank for the only one, and all ranks train on the same rows."
        if settings.trainer is None:
            advice = "Start the script as a run of Shardmake, which corrects this."
            found.refuse("Accelerate", "use_cpu", None, f"{effect} {advice}")
        else:
            found.refuse("Trainer", "use_cpu", None, f"{effect} Set use_cpu: true.")
    return int(ranks)


def _drop_refused_fields(found: EngineSettings) -> None:
    """Record the settings of an Accelerate file that Accelerate refuses beside a DeepSpeed file, and remove them."""
    fields = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    for name in {*fields} & {*REFUSED_BESIDE_DEEPSPEED_FILE, "mixed_precision"}:
        found.stops[f"accelerate {name}"] = "Accelerate stops on this key beside a DeepSpeed file. Remove it."
        os.environ.pop(f"ACCELERATE_{name.upper()}", None)
        os.environ.pop(f"ACCELERATE_DEEPSPEED_{name.upper()}", None)
    kept = [name for name in fields if f"accelerate {name}" not in found.stops]
    os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(kept)


def _enter_world(size: int) -> None:
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        del os.environ[name]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_PORT": "1"}
    parsers.pretend_world(size)


def _leave_world() -> None:
    import torch.distributed
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# --- the form of a DeepSpeed file -------------------------------------------------------------------------------------


def _well_formed(values: Mapping[str, Any], found: EngineSettings) -> dict[str, Any]:
    """Return a copy without sections that are not mappings and with text that is a number or a boolean read as such."""
    copied: dict[str, Any] = copy.deepcopy(dict(values))
    for key in MAPPINGS:
        *path, last = key.split(".")
        section: Any = copied
        for part in path:
            section = section.get(part, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict) and last in section and not isinstance(section[last], dict):
            found.refuse("DeepSpeed", key, section.pop(last), "Transformers and DeepSpeed stop: they need a mapping.")
    for key, value, rule in list(find_removed(copied)):
        found.refuse("DeepSpeed", key, value, rule.fact)
        copied = without(copied, key)
    _read_text(copied, "", found)
    if "type" not in copied.get("optimizer", {"type": ""}):
        found.refuse("DeepSpeed", "optimizer.type", None, "DeepSpeed creates no optimizer without its type.")
    if "zero_optimization" not in values:
        found.refuse("DeepSpeed", "zero_optimization", None, "Accelerate and Trainer stop without this section.")
    copied.setdefault("zero_optimization", {"stage": 0})
    return copied


def _read_text(section: dict[str, Any], prefix: str, found: EngineSettings) -> None:
    for key, value in section.items():
        if isinstance(value, dict):
            _read_text(value, f"{prefix}{key}.", found)
        elif isinstance(value, str) and (read := _number_or_boolean(value)) is not None:
            effect = TEXT_EFFECTS.get(f"{prefix}{key}", "The libraries compare text and numbers as different values.")
            found.refuse("DeepSpeed", f"{prefix}{key}", value, f"{effect} Write it without quotes: {json.dumps(read)}.")
            section[key] = read


TEXT_EFFECTS: Final = {
    "zero_optimization.stage": "DeepSpeed reads the text as a number, but transformers does not: with stage 3, each "
    "rank would load the whole model before it is partitioned.",
}


def _number_or_boolean(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number if number == number else None


# --- the launcher -----------------------------------------------------------------------------------------------------


def _launch(settings: Settings, deepspeed: dict[str, Any] | None, found: EngineSettings, folder: Path) -> None:
    """Let `accelerate launch` read its file and flags, and set the variables that it would set for the ranks."""
    # A file without the number of processes is used with --num_processes.
    values = {"num_processes": settings.world_size} | _usable(settings.accelerate or {}, found)
    attempt = lambda less: _start_launcher(less, settings, deepspeed, folder)  # noqa: E731
    while True:
        try:
            found.launched, found.launcher = attempt(values)
            break
        except (Exception, SystemExit) as error:
            key = culprit(values, attempt)
            if key is None:
                missing = next(
                    (key for key in ("distributed_type", "num_processes") if key in str(error)), "the options"
                )
                if not any(problem.key == missing for problem in found.problems):  # refused already, and removed
                    found.refuse("Accelerate", missing, None, "`accelerate launch` stops: it cannot start without it.")
                return
            found.refuse("Accelerate", key, values.pop(key), "`accelerate launch` stops: it cannot use this value.")
    if found.launcher == "simple_launcher" and found.launched.mpirun_hostfile is None:
        found.world_size = 1
        _refuse_one_process(values, found)


def _refuse_one_process(values: Mapping[str, Any], found: EngineSettings) -> None:
    """Record that `accelerate launch` starts one plain process, if its file asks for more."""
    kind, one_process = values.get("distributed_type"), "`accelerate launch` starts one plain process, silently."
    if found.launched is not None and found.launched.use_cpu and kind not in PLAIN:
        advice = "Set use_cpu: false here, and use_cpu in the training arguments."
        found.refuse("Accelerate", "use_cpu", True, f"{one_process} {advice}")
    elif (ranks := getattr(found.launched, "num_processes", 1)) is not None and ranks > 1:
        advice = f"{ranks} ranks need MULTI_GPU, also on CPUs, or mpirun_hostfile."
        found.refuse("Accelerate", "distributed_type", kind, f"{one_process} {advice}")


PLAIN: Final = ("NO", "MULTI_CPU")
WRITTEN_BY_ACCELERATE_CONFIG: Final = {
    "rdzv_backend": ("static",),
    "same_network": (True, False),
    "enable_cpu_affinity": (False,),
    "downcast_bf16": ("no", False),
}
"""Keys that `accelerate launch` takes from its command line alone, and the values that change nothing."""


def _usable(given: Mapping[str, Any], found: EngineSettings) -> dict[str, Any]:
    """Return the keys of an Accelerate file that `accelerate launch` can use; record the others."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    actions = {action.dest: action for action in launch_command_parser()._actions}
    known = {*ClusterConfig.__dataclass_fields__, "dynamo_backend", "fp16", "downcast_bf16"}
    values: dict[str, Any] = {}
    for key, value in given.items():
        section = key.endswith("_config")
        if key not in known:
            found.refuse("Accelerate", key, value, "`accelerate launch` stops: it does not know this key.")
        elif value is None and key in ("num_processes", "num_machines", "distributed_type"):
            found.refuse("Accelerate", key, value, "The key needs a value.")
        elif value is None or key == "downcast_bf16":
            pass
        elif section and not isinstance(value, dict):
            found.refuse("Accelerate", key, value, _mapping_hint(key))
        elif section:
            values[key] = _usable_section(key, value, actions, found)
        elif _is_compound(key, value) or (expected := _expected_by(actions.get(key), value)) is not None:
            expected = "one value" if _is_compound(key, value) else expected
            found.refuse("Accelerate", key, value, f"`accelerate launch` needs {expected}.")
        else:
            values[key] = value
        if key in WRITTEN_BY_ACCELERATE_CONFIG and value not in (None, *WRITTEN_BY_ACCELERATE_CONFIG[key]):
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
    if values.get("main_process_port", 0) > _LARGEST_PORT:
        refuse("main_process_port", f"The largest port is {_LARGEST_PORT}.")
    if ranks is not None and ranks % machines:
        effect = (
            f"Each of the {machines} machines starts {ranks // machines}, silently. Write a multiple of {machines}."
        )
        refuse("num_processes", effect)


_LARGEST_PORT: Final = 65535


def _is_compound(key: str, value: Any) -> bool:
    """Return True for a mapping or a list in place of one value; the two settings of TPUs are lists."""
    return isinstance(value, dict) or (isinstance(value, list) and key not in ("tpu_env", "tpu_vm"))


def _mapping_hint(key: str) -> str:
    if key != "deepspeed_config":
        return "`accelerate launch` stops: it needs a mapping."
    return "`accelerate launch` stops. Write the name of the file as deepspeed_config_file below this key."


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
    started: list[str] = []
    with ExitStack() as stack:
        for name in LAUNCHERS:
            stack.enter_context(mock.patch.object(launch, name, lambda *_, name=name: started.append(name)))
        launch.launch_command(arguments)
    if arguments.deepspeed_config_file is not None and deepspeed is not None:
        arguments.deepspeed_config_file = str(folder / "deepspeed.json")
        _write(deepspeed, folder)
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


def _write(deepspeed: Mapping[str, Any], folder: Path) -> None:
    (folder / "deepspeed.json").write_text(json.dumps(deepspeed))


def culprit(values: Mapping[str, Any], attempt: Callable[[dict[str, Any]], Any]) -> str | None:
    """Return the dotted key without which ``attempt`` passes, else one without which it fails on another key."""
    try:
        attempt(copy.deepcopy(dict(values)))
    except (Exception, SystemExit) as error:
        before = f"{type(error)} {error}"
    else:
        return None
    later = None
    for key, _ in list(parsers.leaves(values)):
        try:
            attempt(without(values, key))
        except (Exception, SystemExit) as error:
            if later is None and f"{type(error)} {error}" != before:
                later = key
        else:
            return key
    return later


def without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return ``values`` without the dotted ``key``; the name of a key may have dots itself."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and key.startswith(f"{name}."):
            kept[name] = without(value, key.removeprefix(f"{name}."))
        elif name != key:
            kept[name] = value
    return kept


# --- Trainer, or a script of Accelerate -------------------------------------------------------------------------------


def _read_trainer(settings: Settings, named: dict[str, Any] | None, found: EngineSettings, folder: Path) -> Any:
    """Let TrainingArguments read its values and the DeepSpeed file; return Accelerate's DeepSpeed plugin, if any."""
    values = _usable_arguments(settings.trainer or {}, found)
    while (key := culprit(values, lambda less: _training_arguments(less, None, folder))) is not None:
        value = dict(parsers.leaves(values))[key]
        found.refuse("Trainer", key, value, f"Transformers stops: it cannot use this value.{_expected(key)}")
        values = without(values, key)
    if named is not None and values.get("fsdp"):
        found.stops["fsdp"] = "Trainer stops: it uses DeepSpeed or FSDP, not both."
        values.pop("fsdp")
    deepspeed = _accepted(named, lambda less: _training_arguments(values, less, folder), found)
    try:
        found.arguments = _training_arguments(values, deepspeed, folder)
    except Exception as error:
        found.refuse("Trainer", "the arguments", None, f"Transformers stops with {type(error).__name__}.")
        return None
    found.fsdp = _fsdp_plugin(found.arguments.fsdp_plugin_args)
    if found.fsdp is not None and found.fsdp.activation_checkpointing and found.arguments.activation_checkpointing:
        effect = "Trainer stops: gradient_checkpointing is true in the training arguments as well. Keep one of both."
        found.stops["fsdp_activation_checkpointing"] = effect
    return found.arguments.deepspeed_plugin


def _accepted(
    deepspeed: dict[str, Any] | None, attempt: Callable[[dict[str, Any]], Any], found: EngineSettings
) -> dict[str, Any] | None:
    """Return the DeepSpeed file without the keys that transformers or Accelerate stop on."""
    if deepspeed is None:
        return None
    while (key := culprit(deepspeed, attempt)) is not None:
        value = dict(parsers.leaves(deepspeed))[key]
        found.refuse("DeepSpeed", key, value, "Transformers and Accelerate stop: they cannot use this value.")
        deepspeed = without(deepspeed, key)
    return deepspeed


def nearest_argument(name: str) -> str | None:
    """Return the training argument whose name is nearly ``name``, but not the same."""
    from transformers import TrainingArguments

    known = [one for one in TrainingArguments.__dataclass_fields__ if not one.startswith("_")]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    return close[0] if close and close[0] != name else None


def _usable_arguments(given: Mapping[str, Any], found: EngineSettings) -> dict[str, Any]:
    """Return the training arguments that transformers knows. Others are the script's own, unless nearly the same."""
    from transformers import TrainingArguments

    known = [name for name in TrainingArguments.__dataclass_fields__ if not name.startswith("_")]
    for key, value in given.items():
        if key not in known and (nearest := nearest_argument(key)) is not None:
            found.refuse("Trainer", key, value, f"Transformers does not know this argument. Did you mean {nearest!r}?")
    hints = get_type_hints(TrainingArguments)
    kept = [key for key in given if key in known and key not in NOT_COMPARED]
    values = {
        key: value for key in kept if (value := _typed(key, copy.deepcopy(given[key]), hints[key], found)) is not None
    }
    for key, value in list(values.items()):
        least, below = LIMITS.get(key, (-math.inf, math.inf))
        if isinstance(value, float) and value != value:
            found.refuse("Trainer", key, values.pop(key), "NaN is not a number. Write one.")
        elif key in LIMITS and not least <= value < below:
            limits = f"at least {least}" + (f" and less than {below}" if below < math.inf or value == math.inf else "")
            found.refuse("Trainer", key, values.pop(key), f"Training stops or learns nothing: it needs {limits}.")
    return values


def _typed(key: str, value: Any, hint: Any, found: EngineSettings) -> Any:
    """Return a training argument with the type that transformers declares; record what it would take otherwise."""
    if not {*(get_args(hint) or [hint])} <= PLAIN_TYPES:
        return value
    try:
        read = TypeAdapter(hint).validate_python(value)
    except ValidationError:
        if isinstance(value, bool) and "str" in str(hint):  # fsdp: true; and no, which YAML reads as false
            return value
        name = getattr(hint, "__name__", str(hint)).replace("typing.", "")
        found.refuse("Trainer", key, value, f"Transformers needs {name} and does not check it: the run stops later.")
        return None
    if isinstance(value, str) and isinstance(read, bool):
        found.refuse("Trainer", key, value, "Transformers takes any text for true. Write true or false without quotes.")
        return read
    if isinstance(value, str) and isinstance(read, int | float):
        effect = "It is text: YAML reads 1e-4 as text, and 1.0e-4 as a number. Not every program converts it."
        found.problems.append(Problem("Trainer", key, value, "warning", effect))
        return read
    return value


LIMITS: Final[dict[str, tuple[float, float]]] = {
    "per_device_train_batch_size": (1, math.inf),
    "gradient_accumulation_steps": (1, math.inf),
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon"), (0, math.inf)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, 1)),
}
"""Smallest value and upper bound of numbers that transformers does not check: those of torch and of its optimizers."""
PLAIN_TYPES: Final = {int, float, bool, str, type(None)}
NOT_COMPARED: Final = ("deepspeed", "output_dir", "use_cpu", "ddp_backend", "local_rank", "no_cuda", "tf32")
"""Arguments of the machine and of paths; the check runs on a machine without a GPU."""


def _expected(key: str) -> str:
    """Return a sentence with the values that a training argument may have, if they are a list."""
    from transformers import SchedulerType
    from transformers.training_args import OptimizerNames

    allowed: Any = {"lr_scheduler_type": SchedulerType, "optim": OptimizerNames}.get(key)
    return f" Use one of {', '.join(one.value for one in allowed)}." if allowed else ""


def _training_arguments(values: Mapping[str, Any], deepspeed: dict[str, Any] | None, folder: Path) -> Any:
    from transformers import TrainingArguments

    machine = {"use_cpu": True, "ddp_backend": "gloo", "output_dir": str(folder / "output")}
    arguments = TrainingArguments(**copy.deepcopy(dict(values)) | machine, deepspeed=deepspeed)
    arguments.get_warmup_steps(100)
    _fsdp_plugin(arguments.fsdp_plugin_args)
    return arguments


def _fsdp_plugin(arguments: Mapping[str, Any] | None) -> Any:
    """Return Accelerate's FSDP plugin from Trainer's arguments, which win, and the launcher's variables."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    if arguments is None and os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return None
    given = dict(arguments or {})
    version = given.get("fsdp_version", int(os.environ.get("FSDP_VERSION", "1")))
    if version not in (1, 2):
        raise ValueError(f"fsdp_version is {version}, and can be 1 or 2")
    # FSDP1's broadcast of the weights already needs a GPU at this point.
    on_gpu = {"sync_module_states": False, "cpu_ram_efficient_loading": False} if version == 1 else {}
    return FullyShardedDataParallelPlugin(**given | on_gpu)


def _read_script(named: dict[str, Any] | None, found: EngineSettings) -> Any:
    """Return the plugin that a script's `Accelerator()` makes from its launcher's variables, or from the file alone."""
    from accelerate.utils import DeepSpeedPlugin

    if found.launched is None and named is None:
        return None
    if found.launched is None:
        named = _accepted(named, lambda less: DeepSpeedPlugin(hf_ds_config=less), found)
        return DeepSpeedPlugin(hf_ds_config=named)
    try:
        found.fsdp = _fsdp_plugin(None)
        return DeepSpeedPlugin() if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" else None
    except Exception as error:
        found.refuse("Accelerate", "the options", None, f"Accelerator() stops with {type(error).__name__}: {error}.")
        return None


def _read_dynamo(found: EngineSettings) -> None:
    from accelerate.utils import TorchDynamoPlugin

    if found.arguments is not None:
        found.dynamo = TorchDynamoPlugin(backend=found.arguments.torch_compile_backend).backend.value
    elif found.launched is not None:
        found.dynamo = TorchDynamoPlugin().backend.value


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def _read_deepspeed(settings: Settings, plugin: Any, found: EngineSettings) -> None:
    """Fill in "auto" as Trainer and Accelerate do, record what they stop on, and read DeepSpeed's config."""
    _set_precision(plugin, found)
    if found.arguments is not None:
        _fill_by_trainer(settings, plugin, found)
    config = plugin.hf_ds_config.config
    for auto, value in list(parsers.leaves(config)):
        if value == "auto":
            config = _fill_last(config, auto, found)
    _check_batch(config, found)
    reader = lambda less: parsers.deepspeed_settings(less, {})  # noqa: E731
    refused: set[str] = set()  # the size of a micro batch is put back, and may fail again
    while (key := culprit(config, reader)) is not None and key not in refused:
        refused.add(key)
        _refuse_for_deepspeed(key, dict(parsers.leaves(config))[key], found)
        config = {"train_micro_batch_size_per_gpu": 1} | without(config, key)  # DeepSpeed reads no file without it
    try:
        found.config, ignored = reader(config)
        found.defaults, _ = reader({"train_micro_batch_size_per_gpu": 1})
    except Exception as error:
        found.refuse("DeepSpeed", "the file", None, f"DeepSpeed stops with {type(error).__name__}.")
        return
    for name in ignored:
        if name in (settings.deepspeed or {}):
            effect = "DeepSpeed does not know this key and ignores it."
            found.problems.append(Problem("DeepSpeed", name, found.deepspeed.get(name), "warning", effect))


def _refuse_for_deepspeed(key: str, value: Any, found: EngineSettings) -> None:
    """Record a value that DeepSpeed refuses, and where it comes from if the file has "auto"."""
    if dict(parsers.leaves(found.deepspeed)).get(key) == "auto":
        effect = f"The training arguments fill in {json.dumps(value)}, and DeepSpeed stops: it cannot use this value."
        found.refuse("DeepSpeed", key, "auto", effect)
    else:
        found.refuse("DeepSpeed", key, value, "DeepSpeed stops: it does not know this key or cannot use its value.")


def _set_precision(plugin: Any, found: EngineSettings) -> None:
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if found.arguments is not None:
        precision = found.arguments.mixed_precision
    try:
        plugin.set_mixed_precision(precision)
    except ValueError:
        found.stops["mixed_precision"] = f"Accelerate stops: {precision} beside the other half precision."


def _fill_by_trainer(settings: Settings, plugin: Any, found: EngineSettings) -> None:
    """Let transformers fill in "auto" and compare, as it does after loading the model."""
    from transformers.integrations.deepspeed import propagate_args_to_deepspeed

    arguments = found.arguments
    if getattr(arguments, "hf_deepspeed_config", None) is None:
        propagate_args_to_deepspeed(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)), arguments)
    read = plugin.hf_ds_config
    written = read.get_value("scheduler.params.total_num_steps")
    steps = settings.steps or (arguments.max_steps if arguments.max_steps > 0 else None)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=HIDDEN_SIZE))
    with suppress(ValueError):  # It lists the mismatches.
        read.trainer_config_finalize(arguments, model, steps or (written if isinstance(written, int) else 1))
    by_steps = {"scheduler.params.total_num_steps"}
    if 0 < arguments.warmup_steps < 1:
        by_steps.add("scheduler.params.warmup_num_steps")
    for line in read.mismatches:
        key = re.split(r"[ =]", line.removeprefix("- ds "))[0]
        if steps or key not in by_steps:
            found.stops[key] = "Transformers stops once the model is loaded on every rank."


def _fill_last(config: dict[str, Any], key: str, found: EngineSettings) -> dict[str, Any]:
    """Fill in an "auto" that Trainer leaves, as `Accelerator.prepare` does, or record that nothing does."""
    filled: dict[str, Any] = dict(FILLED_BY_ACCELERATE)
    if found.arguments is None:
        filled |= {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1}
        found.left_to_script += [key] if key not in FILLED_BY_ACCELERATE else []
    if key in filled:
        *path, last = key.split(".")
        section = config
        for part in path:
            section = section[part]
        section[last] = filled[key]
        return config
    script = ("train_batch_size", *(f"optimizer.params.{name}" for name in ("lr", "weight_decay")))
    sized = key.startswith(("scheduler.params.", "zero_optimization.reduce", "zero_optimization.stage3_"))
    by_itself = found.launched is None and found.arguments is None
    if not by_itself and (found.arguments is not None or not (key in script or sized)):
        found.refuse("DeepSpeed", key, "auto", 'Nothing fills in this "auto", and the run stops. Write a value.')
    return without(config, key)


def _check_batch(config: dict[str, Any], found: EngineSettings) -> None:
    """Record what DeepSpeed stops on in the batch sizes, and change ``config`` so that it can be read."""
    total, micro, accumulation = (config.get(key) for key in BATCH)
    groups = (config.get("tensor_parallel") or {}).get("autotp_size") or 1
    ranks = found.world_size // groups if isinstance(groups, int) and groups > 0 else found.world_size
    if total is None and micro is None:
        names = "train_micro_batch_size_per_gpu nor train_batch_size"
        found.stops["train_micro_batch_size_per_gpu"] = (
            f"DeepSpeed stops: its file has a number for neither {names}, and nothing fills one in. Write the first."
        )
        config["train_micro_batch_size_per_gpu"] = 1
    elif all(isinstance(size, int) for size in (total, micro, accumulation)):
        product = micro * accumulation * ranks  # type: ignore[operator]
        if total != product and not found.stops.keys() & {*BATCH}:
            sizes = f"{micro} x {accumulation} steps x {ranks} ranks make {product}"
            found.stops["train_batch_size"] = f"DeepSpeed stops: {sizes}."
        del config["train_batch_size"]

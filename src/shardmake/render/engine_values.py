"""The value of each setting that trains, read from what the libraries understood.

A row of `shardmake.config.settings` is read by its names. A row that the libraries combine, convert or ignore has a
function here, by the name of the row.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

from shardmake.config.settings import ACCUMULATION, MICRO_BATCH, SETTINGS, TOTAL_BATCH, Setting
from shardmake.render.comparison import EngineSettings, Library

Read = Callable[[EngineSettings], Any]
Ask = Callable[[EngineSettings, Any], Any]
SHORTEST_WARMUP: Final = 2
"""Steps that DeepSpeed's schedules warm up for at least, whatever is written."""


def value_that_trains(row: Setting, found: EngineSettings) -> Any:
    """Return the value of ``row`` that trains: DeepSpeed's if it decides, else Trainer's or FSDP's."""
    return _RUNS[row.name](found) if row.name in _RUNS else _by_names(row, found)


def _by_names(row: Setting, found: EngineSettings) -> Any:
    if row.trainer and row.trainer[0].startswith(FSDP_SECTION):
        return _in_fsdp_plugin(row.trainer[0].removeprefix(FSDP_SECTION), found)
    section = row.deepspeed_keys[0].partition(".")[0] if row.deepspeed_keys else ""
    is_given = section not in ("optimizer", "scheduler") or section_of(found, section) is not None
    if section == "zero_optimization" or (section and found.config is not None and is_given):
        return in_deepspeed(row.deepspeed_keys[0], found)
    if row.name in _OPTIMIZERS_OWN:
        return _OPTIMIZERS_OWN[row.name](found)
    return plain(getattr(found.arguments, row.trainer[0], None)) if row.trainer else None


def in_trainer(row: Setting, argument: str, found: EngineSettings) -> Any:
    """Return the value of ``row`` in Trainer's arguments: that of ``argument``, unless several make it."""
    return _IN_TRAINER[row.name](found) if row.name in _IN_TRAINER else plain(getattr(found.arguments, argument))


def in_deepspeed(key: str, found: EngineSettings) -> Any:
    """Return DeepSpeed's value, or its default, for a dotted key; None if DeepSpeed leaves it to others."""
    config, (*path, name) = found.config, key.split(".")
    if config is None:
        return "none" if name == "device" else None
    match path:
        case []:
            return None if name in (MICRO_BATCH, TOTAL_BATCH) else getattr(config, name)
        case ["zero_optimization"]:
            return plain(getattr(config.zero_config, name.removeprefix("stage3_")))
        case ["zero_optimization", which]:
            return _offload(getattr(config.zero_config, which), which, name, int(config.zero_optimization_stage))
        case ["optimizer" | "scheduler" as kind]:
            return getattr(config, f"{kind}_name")
        case ["optimizer", _]:
            section = section_of(found, "optimizer")
            return None if section is None else section.get(name, _optimizer_default(found, name))
        case ["scheduler", _]:
            return _of_schedule(name, found)
    return _precision(found)


def _offload(offload: Any, which: str, name: str, stage: int) -> Any:
    """Return the device or the path of an offload section. Only stage 3 swaps to NVMe, and offloads parameters."""
    if name == "nvme_path":
        return None if offload is None or offload.nvme_path is None else str(offload.nvme_path)
    device = "none" if offload is None else plain(offload.device)
    return "none" if stage < (1 if which == "offload_optimizer" and device != "nvme" else 3) else device


def _of_schedule(name: str, found: EngineSettings) -> Any:
    section, parameter = section_of(found, "scheduler"), schedule_parameters(found).get(name)
    if section is None or parameter is None:
        return None
    value = section.get(name, None if parameter.default is inspect.Parameter.empty else parameter.default)
    return max(SHORTEST_WARMUP, value) if name == "warmup_num_steps" and isinstance(value, int) else value


def section_of(found: EngineSettings, name: str) -> dict[str, Any] | None:
    """Return the parameters of the optimizer or the scheduler of the DeepSpeed file, or None without that section."""
    if found.config is None or getattr(found.config, f"{name}_name") is None:
        return None
    return getattr(found.config, f"{name}_params") or {}


def _optimizer_default(found: EngineSettings, name: str) -> Any:
    """Return the default of a parameter of DeepSpeed's or torch's optimizer class."""
    optimizer = optimizer_class(found)
    parameter = inspect.signature(optimizer).parameters.get(name) if optimizer else None
    default = parameter.default if parameter else None
    return list(default) if isinstance(default, tuple) else default


def optimizer_class(found: EngineSettings) -> Any:
    """Return the class of the optimizer in the DeepSpeed file; None for an unknown one."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    name = found.config.optimizer_name
    if name in ("adam", "adamw"):
        if found.config.optimizer_params and found.config.optimizer_params.get("torch_adam"):
            return torch.optim.AdamW
        return DeepSpeedCPUAdam if _offloads_optimizer(found) else FusedAdam
    optimizer = getattr(torch.optim, {"adagrad": "Adagrad"}.get(name, name), None)
    return optimizer if inspect.isclass(optimizer) else None


def schedule_parameters(found: EngineSettings) -> dict[str, inspect.Parameter]:
    """Return the parameters of the schedule in the DeepSpeed file, empty for an unknown one."""
    import torch
    from deepspeed.runtime import lr_schedules

    name = str(found.config.scheduler_name)
    schedule = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    return dict([*inspect.signature(schedule).parameters.items()][1:]) if inspect.isclass(schedule) else {}


FSDP_SECTION: Final = "fsdp_config."
PLUGIN_NAMES: Final = {"version": "fsdp_version", "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}
"""Accelerate's names of keys of Trainer's ``fsdp_config``."""


def _in_fsdp_plugin(argument: str, found: EngineSettings) -> Any:
    read = getattr(found.fsdp, PLUGIN_NAMES.get(argument, argument), None)
    if argument == "cpu_offload" and not isinstance(read, bool):
        read = getattr(read, "offload_params", type(read).__name__ == "CPUOffloadPolicy")
    return getattr(read, "name", read)


# --- batches ----------------------------------------------------------------------------------------------------------


def _micro_batch(found: EngineSettings) -> Any:
    """Trainer's own loop decides: it reads the batches. Without Trainer, "auto" leaves it to the script."""
    if found.arguments is not None:
        return found.arguments.per_device_train_batch_size
    return None if found.deepspeed.get(MICRO_BATCH, "auto") == "auto" else getattr(found.config, MICRO_BATCH, None)


def _batch(found: EngineSettings) -> Any:
    if found.arguments is None:
        is_open = "auto" in (found.deepspeed.get(MICRO_BATCH, "auto"), found.deepspeed.get(ACCUMULATION))
        total = None if is_open else getattr(found.config, TOTAL_BATCH, None)
        return None if total is None else total // found.world_size * found.data_ranks
    one = found.arguments.per_device_train_batch_size * found.arguments.gradient_accumulation_steps
    return one * found.data_ranks


# --- optimizer and schedule -------------------------------------------------------------------------------------------


def _learning_rate(found: EngineSettings) -> Any:
    """Return the highest learning rate: the scheduler's of the DeepSpeed file, else the optimizer's."""
    schedule = section_of(found, "scheduler")
    if schedule is not None:
        name = found.config.scheduler_name
        if key := {"OneCycle": "cycle_max_lr", "LRRangeTest": "lr_range_test_min_lr"}.get(name):
            return schedule.get(key, f"that of {name}")
        default = {"WarmupLR": None, "WarmupDecayLR": 0.001}  # None stands for the optimizer's learning rate
        if name in default and (rate := schedule.get("warmup_max_lr", default[name])):
            return rate
    return _by_names(SETTINGS["learning rate"], found)


VARIES: Final = "OneCycle's"


def _betas_that_run(found: EngineSettings) -> Any:
    """Return the betas, or a word if DeepSpeed's OneCycle changes them with the learning rate."""
    betas, schedule = _by_names(SETTINGS["betas"], found), section_of(found, "scheduler") or {}
    is_cycle = found.config is not None and found.config.scheduler_name == "OneCycle"
    return VARIES if betas and is_cycle and schedule.get("cycle_momentum", True) else betas


def _betas(found: EngineSettings) -> list[float]:
    return [found.arguments.adam_beta1, found.arguments.adam_beta2]


def _of_adam(value: Read) -> Read:
    """Return ``value``, or None with an optimizer of Trainer that does not have Adam's parameters."""

    def read(found: EngineSettings) -> Any:
        name = str(plain(getattr(found.arguments, "optim", "")))
        return value(found) if any(kind in name for kind in ("adam", "ademamix", "lion")) else None

    return read


def _max_steps(found: EngineSettings) -> int | None:
    return steps if (steps := getattr(found.arguments, "max_steps", -1)) > 0 else None


SAME_SCHEDULE: Final = {"constant_with_warmup": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
"""DeepSpeed's name of each of Trainer's schedules, as the documentation of transformers pairs them."""


def plain(value: Any) -> Any:
    """Return the value of an enum's member."""
    return getattr(value, "value", value)


def optimizer_family(name: Any) -> str:
    """Return one name for the optimizers of Trainer and DeepSpeed that compute the same update."""
    text = str(plain(name)).lower()
    names = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adam": "adamw", "deepspeedcpuadam": "adamw"}
    return names.get(text, text.removesuffix("_32bit"))


def _optimizer(found: EngineSettings) -> Any:
    if found.arguments is None or getattr(found.config, "optimizer_name", None) is not None:
        return getattr(found.config, "optimizer_name", None)
    if _offloads_optimizer(found) and found.config.zero_force_ds_cpu_optimizer:
        is_adamw = optimizer_family(found.arguments.optim) == "adamw"
        return "DeepSpeedCPUAdam" if is_adamw else "Adam (DeepSpeedCPUAdam, L2 weight decay)"
    return plain(found.arguments.optim)


def _warmup_of_trainer(found: EngineSettings) -> Any:
    """Return the warm-up of Trainer's schedule: a ratio as long as the number of steps is unknown."""
    if found.arguments is None:
        return None
    is_constant = plain(found.arguments.lr_scheduler_type) == "constant"
    return 0 if is_constant else _steps_of_ratio(found, found.arguments.warmup_steps)


def _steps_of_ratio(found: EngineSettings, value: Any) -> Any:
    known = 0 < value < 1 and found.arguments.max_steps > 0
    return found.arguments.get_warmup_steps(found.arguments.max_steps) if known else value


def _ask_warmup(found: EngineSettings, value: Any) -> Any:
    """Return Trainer's warm-up as DeepSpeed counts it; a ratio asks for nothing as long as the steps are unknown."""
    steps = _steps_of_ratio(found, value)
    if section_of(found, "scheduler") is None:
        return steps
    return None if 0 < steps < 1 else max(SHORTEST_WARMUP, int(steps))


# --- precision and engine ---------------------------------------------------------------------------------------------


def _precision(found: EngineSettings) -> str:
    """Return DeepSpeed's precision, or what Accelerate is asked for without it: by Trainer, or by the launcher."""
    if found.config is None:
        asked = found.arguments or found.launched
        return _ask_precision(found, getattr(asked, "mixed_precision", None) or "no") or "fp32"
    if found.config.torch_autocast_enabled:
        return f"{str(found.config.torch_autocast_dtype).removeprefix('torch.')} autocast"
    return "bf16" if found.config.bfloat16_config.enabled else "fp16" if found.config.float16_config.enabled else "fp32"


def _ask_precision(found: EngineSettings, value: Any) -> str | None:
    return None if str(value).lower() == "no" else str(value).lower()


def _offloads_optimizer(found: EngineSettings) -> bool:
    offload = found.config.zero_config.offload_optimizer if found.config is not None else None
    return offload is not None and plain(offload.device) in ("cpu", "nvme")


def engine_that_trains(found: EngineSettings) -> str:
    """Return the words for the library that trains."""
    plain_engine = "DDP" if found.data_ranks > 1 else "one process"
    is_refused = any(one.library == "DeepSpeed" and one.key == "the file" for one in found.problems)
    return "DeepSpeed" if found.config is not None or is_refused else "FSDP" if found.fsdp is not None else plain_engine


# --- the rows that are not read by their names ------------------------------------------------------------------------

_RUNS: Final[dict[str, Read]] = {
    "batch per rank": _micro_batch,
    "total batch": _batch,
    "learning rate": _learning_rate,
    "betas": _betas_that_run,
    "optimizer": _optimizer,
    "precision": _precision,
    "compilation": lambda found: found.dynamo.lower(),
}
"""Values that train."""
_OPTIMIZERS_OWN: Final[dict[str, Read]] = {
    "betas": _of_adam(_betas),
    "epsilon": _of_adam(lambda found: found.arguments.adam_epsilon),
    "warm-up steps": _warmup_of_trainer,
    "total steps": _max_steps,
}
"""Values that train with Trainer's own optimizer and schedule."""
_IN_TRAINER: Final[dict[str, Read]] = {
    "total batch": _batch,
    "betas": _betas,
    "total steps": _max_steps,
    "precision": lambda found: "bf16" if found.arguments.bf16 else "fp16" if found.arguments.fp16 else "fp32",
}
"""Values of Trainer's arguments."""
_ASKS: Final[dict[tuple[Library, str], Ask]] = {
    ("Trainer", "schedule"): lambda found, value: (
        SAME_SCHEDULE.get(value, value) if getattr(found.config, "scheduler_name", None) else value
    ),
    ("Trainer", "warm-up steps"): _ask_warmup,
    ("Trainer", "total steps"): lambda found, value: None if section_of(found, "scheduler") is None else value,
    ("Trainer", "compilation"): lambda found, value: str(found.arguments.torch_compile_backend or "no").lower(),
    ("DeepSpeed", "optimizer"): lambda found, value: found.config.optimizer_name,
    ("DeepSpeed", "precision"): lambda found, value: _precision(found),
    ("Accelerate", "precision"): _ask_precision,
    ("Accelerate", "NVMe path of the optimizer"): lambda found, value: None if value == "none" else value,
    ("Accelerate", "NVMe path of the parameters"): lambda found, value: None if value == "none" else value,
    ("Accelerate", "16-bit weights on save"): lambda found, value: str(value).lower() == "true",
    ("Accelerate", "compilation"): lambda found, value: str(value).lower(),
}
"""Written values as they are compared with what trains; None if a value asks for nothing."""


def asked_by(library: Library, row: Setting, found: EngineSettings, value: Any) -> Any:
    """Return what a ``value`` in the file of ``library`` asks for."""
    if library == "Accelerate" and row.is_plain:
        return value if found.config is not None and value != "auto" else None
    ask = _ASKS.get((library, row.name))
    return ask(found, value) if ask else value

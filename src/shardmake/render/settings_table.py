"""The settings that more than one of Trainer, DeepSpeed and Accelerate has: one entry each.

An entry says where each library keeps the setting, and how to read what will run from what the libraries understood
(`shardmake.render.engine_settings`). `compare` makes a `Row` of each entry.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from shardmake.config.deepspeed_keys import OPTIMIZER_REMOVED, is_removed_optimizer
from shardmake.config.user_file_keys import judge
from shardmake.config.user_files import UserFile
from shardmake.core.temporary import temporary_folder
from shardmake.render import parsers
from shardmake.render.comparison import Comparison, Library, Problem, Row, Settings, Value
from shardmake.render.engine_settings import EngineSettings, read_settings

Runs = Callable[[EngineSettings], Any]
Ask = Callable[[EngineSettings, Any], Any]
ADD_AUTO: Final = 'Write "auto" in the DeepSpeed file.'


@dataclass(frozen=True)
class Setting:
    """One setting and the key of each library.

    ``engine`` returns DeepSpeed's default, None if DeepSpeed leaves it to others; ``runs`` returns the value that
    trains. ``trainer_name`` is the name of Trainer's value if several arguments make it. The ``ask`` functions turn
    a written value into one to compare with it, or into None if it asks for nothing. ``advice`` follows if
    something else trains.
    """

    name: str
    runs: Runs
    trainer: tuple[str, ...] = ()
    deepspeed: tuple[str, ...] = ()
    accelerate: str | None = None
    engine: Runs = lambda found: None
    ask_trainer: Ask = lambda found, value: value
    ask_deepspeed: Ask = lambda found, value: value
    ask_accelerate: Ask = lambda found, value: value
    show_trainer: Ask = lambda found, value: value
    trainer_name: str = ""
    advice: str = ADD_AUTO


# --- what runs --------------------------------------------------------------------------------------------------------


def _engine_or_trainer(attribute: str, argument: str) -> Runs:
    return lambda found: getattr(found.config, attribute) if found.config else getattr(found.arguments, argument, None)


def _trainer_or_engine(attribute: str, argument: str) -> Runs:
    """Trainer's own loop decides: it reads the batches. Without Trainer, "auto" leaves it to the script."""

    def value(found: EngineSettings) -> Any:
        if found.arguments is not None:
            return getattr(found.arguments, argument)
        return None if found.deepspeed.get(attribute, "auto") == "auto" else getattr(found.config, attribute, None)

    return value


def _section(found: EngineSettings, name: str) -> dict[str, Any] | None:
    """Return the parameters of the optimizer or the scheduler of the DeepSpeed file, or None without that section."""
    if found.config is None or getattr(found.config, f"{name}_name") is None:
        return None
    return getattr(found.config, f"{name}_params") or {}


def _optimizer_default(found: EngineSettings, name: str) -> Any:
    """Return the default of a parameter of DeepSpeed's or torch's optimizer class."""
    optimizer = _optimizer_class(found)
    parameter = inspect.signature(optimizer).parameters.get(name) if optimizer else None
    default = parameter.default if parameter else None
    return list(default) if isinstance(default, tuple) else default


def _optimizer_class(found: EngineSettings) -> Any:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    name = found.config.optimizer_name
    if name in ("adam", "adamw"):
        if found.config.optimizer_params and found.config.optimizer_params.get("torch_adam"):
            return torch.optim.AdamW
        return DeepSpeedCPUAdam if _offloads_optimizer(found) else FusedAdam
    optimizer = getattr(torch.optim, {"adagrad": "Adagrad"}.get(name, name), None)
    return optimizer if inspect.isclass(optimizer) else None


def _parameter(name: str, argument: Runs) -> tuple[Runs, Runs]:
    """Return DeepSpeed's value of a parameter of its optimizer, and the value that trains."""

    def engine(found: EngineSettings) -> Any:
        section = _section(found, "optimizer")
        return None if section is None else section.get(name, _optimizer_default(found, name))

    return engine, lambda found: engine(found) if _section(found, "optimizer") is not None else argument(found)


def _learning_rate(found: EngineSettings) -> Any:
    """Return the highest learning rate: the scheduler's of the DeepSpeed file, else the optimizer's."""
    schedule = _section(found, "scheduler")
    if schedule is not None:
        name = found.config.scheduler_name
        if name in ("OneCycle", "LRRangeTest"):
            key = {"OneCycle": "cycle_max_lr", "LRRangeTest": "lr_range_test_min_lr"}[name]
            return schedule.get(key, f"that of {name}")
        if name in ("WarmupLR", "WarmupDecayLR") and (rate := schedule.get("warmup_max_lr", _DEFAULT_RATES[name])):
            return rate
    return _parameter("lr", lambda found: getattr(found.arguments, "learning_rate", None))[1](found)


_DEFAULT_RATES: Final = {"WarmupLR": None, "WarmupDecayLR": 0.001}
"""The default of ``warmup_max_lr``; None stands for the optimizer's learning rate."""


SHORTEST_WARMUP: Final = 2
"""Steps that DeepSpeed's schedules warm up for at least, whatever is written."""


def _scheduled(key: str, argument: Runs) -> tuple[Runs, Runs]:
    """Return DeepSpeed's value of a parameter of its schedule, None if it has none, and the value that trains."""

    def engine(found: EngineSettings) -> Any:
        section, parameter = _section(found, "scheduler"), _schedule_parameters(found).get(key)
        if section is None or parameter is None:
            return None
        value = section.get(key, None if parameter.default is inspect.Parameter.empty else parameter.default)
        return max(SHORTEST_WARMUP, value) if key == "warmup_num_steps" and isinstance(value, int) else value

    return engine, lambda found: engine(found) if _section(found, "scheduler") is not None else argument(found)


def _schedule_parameters(found: EngineSettings) -> dict[str, inspect.Parameter]:
    """Return the parameters of the schedule in the DeepSpeed file, empty for an unknown one."""
    import torch
    from deepspeed.runtime import lr_schedules

    name = str(found.config.scheduler_name)
    schedule = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if not inspect.isclass(schedule):
        return {}
    return dict(list(inspect.signature(schedule).parameters.items())[1:])


def _scheduler(found: EngineSettings) -> Any:
    return getattr(found.config, "scheduler_name", None) or _plain(getattr(found.arguments, "lr_scheduler_type", None))


SAME_SCHEDULE: Final = {
    "constant_with_warmup": "WarmupLR",
    "linear": "WarmupDecayLR",
    "cosine": "WarmupCosineLR",
}
"""DeepSpeed's name of each of Trainer's schedules, as the documentation of transformers pairs them."""


def _ask_scheduler(found: EngineSettings, value: Any) -> Any:
    in_file = getattr(found.config, "scheduler_name", None)
    return SAME_SCHEDULE.get(_plain(value), _plain(value)) if in_file else _plain(value)


def _plain(value: Any) -> Any:
    """Return the value of an enum's member."""
    return getattr(value, "value", value)


def optimizer_family(name: Any) -> str:
    """Return one name for the optimizers of Trainer and DeepSpeed that compute the same update."""
    text = str(_plain(name)).lower()
    names = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adam": "adamw", "deepspeedcpuadam": "adamw"}
    return names.get(text, text.removesuffix("_32bit"))


def _optimizer(found: EngineSettings) -> Any:
    if found.config is not None and found.config.optimizer_name is not None:
        return found.config.optimizer_name
    if found.arguments is None:
        return None
    if _offloads_optimizer(found) and found.config.zero_force_ds_cpu_optimizer:
        is_adamw = optimizer_family(found.arguments.optim) == "adamw"
        return "DeepSpeedCPUAdam" if is_adamw else "Adam (DeepSpeedCPUAdam, L2 weight decay)"
    return _plain(found.arguments.optim)


def _precision(found: EngineSettings) -> str:
    if found.config is None:
        return _names_precision(_launched_precision(found))
    if found.config.torch_autocast_enabled:
        return f"{str(found.config.torch_autocast_dtype).removeprefix('torch.')} autocast"
    return "bf16" if found.config.bfloat16_config.enabled else "fp16" if found.config.float16_config.enabled else "fp32"


def _trainer_precision(found: EngineSettings, value: Any) -> str:
    return "bf16" if found.arguments.bf16 else "fp16" if found.arguments.fp16 else "fp32"


def _launched_precision(found: EngineSettings) -> str:
    """Return what Accelerate is asked for if DeepSpeed is not used: by Trainer, or by the launcher."""
    if found.arguments is not None:
        return str(found.arguments.mixed_precision)
    return str(getattr(found.launched, "mixed_precision", None) or "no")


def _names_precision(name: Any) -> str:
    return "fp32" if str(name).lower() == "no" else str(name).lower()


def _ask_precision(found: EngineSettings, value: Any) -> str | None:
    return None if str(value).lower() == "no" else _names_precision(value)


def _offloads_optimizer(found: EngineSettings) -> bool:
    offload = found.config.zero_config.offload_optimizer if found.config is not None else None
    return offload is not None and _plain(offload.device) in ("cpu", "nvme")


NVME_STAGE: Final = 3
"""DeepSpeed's optimizer of stages 1 and 2 does not swap to NVMe."""


def _device(which: str, stages: tuple[int, ...]) -> Runs:
    def device(found: EngineSettings) -> Any:
        offload = getattr(found.config.zero_config, which) if found.config is not None else None
        if offload is None or (stage := int(found.config.zero_optimization_stage)) not in stages:
            return "none"
        device = _plain(offload.device)
        return "none" if device == "nvme" and stage < NVME_STAGE else device

    return device


def _path(which: str) -> Runs:
    def path(found: EngineSettings) -> Any:
        offload = getattr(found.config.zero_config, which) if found.config is not None else None
        return None if offload is None or offload.nvme_path is None else str(offload.nvme_path)

    return path


def _zero(attribute: str) -> Runs:
    return lambda found: _plain(getattr(found.config.zero_config, attribute)) if found.config is not None else None


def _engine(found: EngineSettings) -> str:
    if found.config is not None:
        return "DeepSpeed"
    if found.fsdp is not None:
        return "FSDP"
    return "DDP" if found.data_ranks > 1 else "one process"


def _compile(found: EngineSettings) -> str:
    return found.dynamo.lower()


def _fsdp(attribute: str) -> Runs:
    def value(found: EngineSettings) -> Any:
        read = getattr(found.fsdp, attribute, None)
        if attribute == "cpu_offload" and not isinstance(read, bool):
            read = getattr(read, "offload_params", type(read).__name__ == "CPUOffloadPolicy")
        return getattr(read, "name", read)

    return value


def _of_adam(value: Runs) -> Runs:
    """Return ``value``, or None with an optimizer of Trainer that does not have Adam's parameters."""

    def read(found: EngineSettings) -> Any:
        name = str(_plain(getattr(found.arguments, "optim", "")))
        return value(found) if any(kind in name for kind in ("adam", "ademamix", "lion")) else None

    return read


_LR, _BETAS, _EPS, _DECAY = (
    _parameter("lr", lambda found: getattr(found.arguments, "learning_rate", None)),
    _parameter("betas", _of_adam(lambda found: _betas(found, None))),
    _parameter("eps", _of_adam(lambda found: found.arguments.adam_epsilon)),
    _parameter("weight_decay", lambda found: getattr(found.arguments, "weight_decay", None)),
)
_WARMUP = _scheduled("warmup_num_steps", lambda found: _warmup_of_trainer(found))
_TOTAL = _scheduled(
    "total_num_steps", lambda found: steps if (steps := getattr(found.arguments, "max_steps", -1)) > 0 else None
)


def _betas(found: EngineSettings, value: Any) -> list[float]:
    return [found.arguments.adam_beta1, found.arguments.adam_beta2]


GAS: Final = "gradient_accumulation_steps"


def _batch(found: EngineSettings, value: Any = None) -> Any:
    if found.arguments is None:
        is_open = "auto" in (found.deepspeed.get("train_micro_batch_size_per_gpu", "auto"), found.deepspeed.get(GAS))
        total = None if is_open else getattr(found.config, "train_batch_size", None)
        return None if total is None else total // found.world_size * found.data_ranks
    one = found.arguments.per_device_train_batch_size * found.arguments.gradient_accumulation_steps
    return one * found.data_ranks


def _warmup_of_trainer(found: EngineSettings) -> Any:
    """Return the warm-up of Trainer's schedule: a ratio as long as the number of steps is unknown."""
    if found.arguments is None:
        return None
    if _plain(found.arguments.lr_scheduler_type) == "constant":
        return 0
    return _steps_of_ratio(found, found.arguments.warmup_steps)


def _steps_of_ratio(found: EngineSettings, value: Any) -> Any:
    known = 0 < value < 1 and found.arguments.max_steps > 0
    return found.arguments.get_warmup_steps(found.arguments.max_steps) if known else value


def _ask_warmup(found: EngineSettings, value: Any) -> Any:
    """Return Trainer's warm-up as DeepSpeed counts it; a ratio asks for nothing as long as the steps are unknown."""
    steps = _steps_of_ratio(found, value)
    if _section(found, "scheduler") is None:
        return steps
    return None if 0 < steps < 1 else max(SHORTEST_WARMUP, int(steps))


def _betas_that_run(found: EngineSettings) -> Any:
    """Return the betas, or a word if DeepSpeed's OneCycle changes them with the learning rate."""
    betas, schedule = _BETAS[1](found), _section(found, "scheduler") or {}
    is_cycle = found.config is not None and found.config.scheduler_name == "OneCycle"
    return VARIES if betas and is_cycle and schedule.get("cycle_momentum", True) else betas


VARIES: Final = "OneCycle's"


SETTINGS: Final = (
    Setting(
        "batch per rank",
        _trainer_or_engine("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        ("per_device_train_batch_size",),
        ("train_micro_batch_size_per_gpu",),
    ),
    Setting(
        "accumulation steps",
        lambda found: getattr(found.config or found.arguments, "gradient_accumulation_steps", None),
        ("gradient_accumulation_steps",),
        ("gradient_accumulation_steps",),
        "gradient_accumulation_steps",
        engine=lambda found: found.config.gradient_accumulation_steps,
        ask_accelerate=lambda found, value: value if found.config is not None and value != "auto" else None,
        advice="The engine counts this number: its total batch size and throughput are wrong. Trainer's own loop still "
        f"accumulates its number, with this version of Accelerate. {ADD_AUTO}",
    ),
    Setting(
        "total batch",
        _batch,
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        ("train_batch_size",),
        ask_trainer=_batch,
        show_trainer=_batch,
        trainer_name="batch per rank x accumulation steps x ranks",
    ),
    Setting(
        "gradient clipping",
        _engine_or_trainer("gradient_clipping", "max_grad_norm"),
        ("max_grad_norm",),
        ("gradient_clipping",),
        "gradient_clipping",
        engine=lambda found: found.config.gradient_clipping,
        ask_accelerate=lambda found, value: value if found.config is not None and value != "auto" else None,
    ),
    Setting(
        "learning rate",
        _learning_rate,
        ("learning_rate",),
        ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
        engine=_LR[0],
    ),
    Setting(
        "betas",
        _betas_that_run,
        ("adam_beta1", "adam_beta2"),
        ("optimizer.params.betas",),
        engine=_BETAS[0],
        ask_trainer=_betas,
        show_trainer=_betas,
        trainer_name="adam_beta1 and adam_beta2",
        advice=f"{ADD_AUTO} OneCycle changes the betas unless cycle_momentum is false.",
    ),
    Setting("epsilon", _EPS[1], ("adam_epsilon",), ("optimizer.params.eps",), engine=_EPS[0]),
    Setting("weight decay", _DECAY[1], ("weight_decay",), ("optimizer.params.weight_decay",), engine=_DECAY[0]),
    Setting(
        "optimizer",
        lambda found: _optimizer(found),
        ("optim",),
        ("optimizer.type",),
        engine=lambda found: found.config.optimizer_name,
        ask_deepspeed=lambda found, value: found.config.optimizer_name,
        advice="Remove the optimizer from the DeepSpeed file, or optim from the arguments; with offload, "
        "zero_force_ds_cpu_optimizer: false keeps Trainer's.",
    ),
    Setting(
        "schedule",
        _scheduler,
        ("lr_scheduler_type",),
        ("scheduler.type",),
        engine=lambda found: found.config.scheduler_name,
        ask_trainer=_ask_scheduler,
        advice="Remove the scheduler from the DeepSpeed file, or lr_scheduler_type from the arguments.",
    ),
    Setting(
        "warm-up steps",
        _WARMUP[1],
        ("warmup_steps",),
        ("scheduler.params.warmup_num_steps",),
        engine=_WARMUP[0],
        ask_trainer=_ask_warmup,
        advice=f"{ADD_AUTO} Trainer's schedule constant has no warm-up; constant_with_warmup has one.",
    ),
    Setting(
        "total steps",
        _TOTAL[1],
        ("max_steps",),
        ("scheduler.params.total_num_steps",),
        engine=_TOTAL[0],
        ask_trainer=lambda found, value: value if value and _section(found, "scheduler") is not None else None,
        show_trainer=lambda found, value: value if value > 0 else None,
    ),
    Setting(
        "precision",
        _precision,
        ("bf16", "fp16"),
        ("bf16.enabled", "fp16.enabled", "torch_autocast.enabled"),
        "mixed_precision",
        engine=_precision,
        ask_trainer=_trainer_precision,
        show_trainer=_trainer_precision,
        trainer_name="the precision",
        ask_deepspeed=lambda found, value: _precision(found),
        ask_accelerate=_ask_precision,
        advice="Set the same precision everywhere, or remove all but one.",
    ),
    Setting("ZeRO stage", _zero("stage"), (), ("zero_optimization.stage",), "zero_stage", _zero("stage")),
    Setting(
        "optimizer offload",
        _device("offload_optimizer", (1, 2, 3)),
        (),
        ("zero_optimization.offload_optimizer.device",),
        "offload_optimizer_device",
        _device("offload_optimizer", (1, 2, 3)),
        advice="ZeRO stages 1 to 3 offload the optimizer to the CPU, and stage 3 alone to NVMe.",
    ),
    Setting(
        "parameter offload",
        _device("offload_param", (3,)),
        (),
        ("zero_optimization.offload_param.device",),
        "offload_param_device",
        _device("offload_param", (3,)),
        advice="Only ZeRO stage 3 offloads parameters.",
    ),
    *(
        Setting(
            f"NVMe path of the {name}",
            _path(f"offload_{which}"),
            (),
            (f"zero_optimization.offload_{which}.nvme_path",),
            f"offload_{which}_nvme_path",
            _path(f"offload_{which}"),
            ask_accelerate=lambda found, value: None if value == "none" else value,
        )
        for name, which in (("optimizer", "optimizer"), ("parameters", "param"))
    ),
    Setting(
        "16-bit weights on save",
        _zero("gather_16bit_weights_on_model_save"),
        (),
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save",),
        "zero3_save_16bit_model",
        _zero("gather_16bit_weights_on_model_save"),
        ask_accelerate=lambda found, value: str(value).lower() == "true",
    ),
    Setting(
        "compilation",
        _compile,
        ("torch_compile", "torch_compile_backend"),
        (),
        "dynamo_backend",
        ask_trainer=lambda found, value: str(found.arguments.torch_compile_backend or "no").lower(),
        ask_accelerate=lambda found, value: str(value).lower(),
        advice="Set torch_compile in the training arguments alone.",
    ),
    Setting(
        "FSDP version", _fsdp("fsdp_version"), ("fsdp_config.version",), (), "fsdp_version",
        advice="Trainer's fsdp_config wins.",
    ),
    *(
        Setting(
            f"FSDP {argument.replace('_', ' ')}",
            _fsdp(attribute),
            (f"fsdp_config.{argument}",),
            (),
            f"fsdp_{option}",
            advice="Trainer's fsdp_config wins. Write it there alone.",
        )
        for argument, attribute, option in (
            ("reshard_after_forward", "reshard_after_forward", "reshard_after_forward"),
            ("state_dict_type", "state_dict_type", "state_dict_type"),
            ("cpu_offload", "cpu_offload", "offload_params"),
            ("activation_checkpointing", "activation_checkpointing", "activation_checkpointing"),
            ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "transformer_layer_cls_to_wrap"),
            ("backward_prefetch", "backward_prefetch", "backward_prefetch"),
            ("use_orig_params", "use_orig_params", "use_orig_params"),
        )
    ),
)  # fmt: skip


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(settings: Settings, folder: Path) -> Comparison:
    """Return the comparison of ``settings``; run it in a process of its own, with an empty ``folder``."""
    found = read_settings(settings, folder)
    rows = [_engine_row(settings, found)]
    found.problems = [problem for problem in found.problems if problem.key not in found.stops]
    refused = {problem.key for problem in found.problems if problem.level == "error"}
    for setting in SETTINGS:
        if refused.intersection(_keys(setting)) or (setting.name.startswith("FSDP") and found.fsdp is None):
            continue
        try:
            if values := _values(setting, settings, found):
                rows.append(_row(setting, values, found))
        except (TypeError, ValueError, AttributeError, ArithmeticError):  # a type that no library checks
            effect = "The libraries do not check the type of this value, and the run stops later."
            library: Library = "DeepSpeed" if setting.deepspeed else "Trainer"
            key = (setting.deepspeed or setting.trainer)[0]
            found.refuse(library, key, dict(parsers.leaves(found.deepspeed)).get(key), effect)
    return Comparison(rows, [*found.problems, *_impossible(found)])


def _engine_row(settings: Settings, found: EngineSettings) -> Row:
    runs, values = _engine(found), dict[Library, Value]()
    if settings.trainer is not None:
        asked = "DeepSpeed" if settings.deepspeed is not None and settings.named_by_trainer else None
        asked = asked or ("FSDP" if settings.trainer.get("fsdp") else None)
        values["Trainer"] = Value(asked, asked is not None, "deepspeed" if asked == "DeepSpeed" else "fsdp")
    if found.launched is not None:
        kind = (settings.accelerate or {}).get("distributed_type")
        values["Accelerate"] = Value(kind, kind is not None, "distributed_type")
    if "fsdp" in found.stops:
        return Row("engine", values, None, "stops", found.stops["fsdp"])
    asked = values["Trainer"].value if "Trainer" in values else None
    if found.launched is not None:
        asked = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP"}.get(str(values["Accelerate"].value), asked)
    if settings.deepspeed is not None and not found.uses_deepspeed:
        effect = "The DeepSpeed file is not used: neither the training arguments nor the launcher name it."
        return Row("engine", values, runs, "differs", effect)
    if asked is not None and asked != runs:
        return Row("engine", values, runs, "differs", f"{runs} runs, silently.")
    return Row("engine", values, runs, "equal")


def _values(setting: Setting, settings: Settings, found: EngineSettings) -> dict[Library, Value]:
    values: dict[Library, Value] = {}
    if setting.trainer and found.arguments is not None:
        values["Trainer"] = _trainer_value(setting, settings, found)
    if setting.deepspeed and found.config is not None:
        values["DeepSpeed"] = _deepspeed_value(setting, found)
    if setting.accelerate is not None and found.launched is not None:
        written = _written_for_launcher(settings)
        has = setting.accelerate in written or not setting.deepspeed or found.launcher == "deepspeed_launcher"
        if has and hasattr(found.launched, setting.accelerate):
            value = getattr(found.launched, setting.accelerate)
            key = written.get(setting.accelerate, setting.accelerate)
            values["Accelerate"] = Value(value, setting.accelerate in written, key)
    return values


def _trainer_value(setting: Setting, settings: Settings, found: EngineSettings) -> Value:
    given = dict(parsers.leaves(settings.trainer or {}))
    key = next((key for key in setting.trainer if key in given), setting.trainer[0])
    if key.startswith("fsdp_config."):
        name = key.removeprefix("fsdp_config.")
        defaults = found.arguments.fsdp_plugin_args or {}
        section = found.arguments.fsdp_config if isinstance(found.arguments.fsdp_config, dict) else {}
        value = section.get(name, defaults.get(PLUGIN_NAMES.get(name, name)))
        return Value(value, key in given or key.replace(".", ".fsdp_") in given, key)
    value = setting.show_trainer(found, _plain(getattr(found.arguments, key)))
    return Value(value, key in given, setting.trainer_name or key)


PLUGIN_NAMES: Final = {
    "version": "fsdp_version",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
}
"""Accelerate's names of keys of Trainer's ``fsdp_config``."""


def _deepspeed_value(setting: Setting, found: EngineSettings) -> Value:
    given = dict(parsers.leaves(found.deepspeed))
    written = [key for key in setting.deepspeed if key in given]
    # Of two keys, the one that says yes: bf16.enabled beside fp16.enabled.
    key = next((key for key in written if given[key]), written[0] if written else setting.deepspeed[0])
    if written:
        return Value(given[key], True, key)
    by_section = key.startswith(("optimizer.", "scheduler."))
    return Value(setting.engine(found if by_section else replace(found, config=found.defaults)), False, key)


def _written_for_launcher(settings: Settings) -> dict[str, str]:
    """Return the written key of each option of `accelerate launch` that file or flags give."""
    written = {
        flag.removeprefix("--").partition("=")[0].replace("-", "_"): flag
        for flag in settings.flags
        if flag.startswith("--")
    }
    for key, value in (settings.accelerate or {}).items():
        if isinstance(value, dict):
            prefix = f"{key.removesuffix('_config')}_" if key in ("fsdp_config", "dynamo_config") else ""
            names = {name: name if name.startswith(prefix) else f"{prefix}{name}" for name in map(str, value)}
            written = {full: f"{key}.{name}" for name, full in names.items()} | written
        else:
            written.setdefault(key, key)
    return written


def _row(setting: Setting, values: dict[Library, Value], found: EngineSettings) -> Row:
    stop = next((found.stops[key] for key in _keys(setting) if key in found.stops), None)
    if stop is not None:
        return Row(setting.name, values, None, "stops", stop)
    runs = None if {*setting.deepspeed} & {*found.left_to_script} else setting.runs(found)
    asks = {"Trainer": setting.ask_trainer, "DeepSpeed": setting.ask_deepspeed, "Accelerate": setting.ask_accelerate}
    written = {library: value for library, value in values.items() if value.written and value.value != "auto"}
    nobody = not written and "Trainer" in values and not _in_file(setting, values)
    asked = {library: asks[library](found, value.value) for library, value in written.items()}
    if nobody:
        asked = {"Trainer": setting.ask_trainer(found, values["Trainer"].value)}
    if runs is None or all(value is None or same_value(setting.name, value, runs) for value in asked.values()):
        return Row(setting.name, values, runs, "equal")
    return Row(setting.name, values, runs, "differs", f"{runs} runs, silently. {setting.advice}")


def _in_file(setting: Setting, values: dict[Library, Value]) -> bool:
    return "DeepSpeed" in values and values["DeepSpeed"].written


def _keys(setting: Setting) -> list[str]:
    return [
        *setting.deepspeed,
        *([f"accelerate {setting.accelerate}", setting.accelerate] if setting.accelerate else []),
    ]


def same_value(setting: str, asked: Any, runs: Any) -> bool:
    """Return whether two values of the row ``setting`` mean the same."""
    if setting == "optimizer":
        return optimizer_family(asked) == optimizer_family(runs)
    if isinstance(asked, str) or isinstance(runs, str):
        asked, runs = (",".join(map(str, one)) if isinstance(one, list | tuple) else one for one in (asked, runs))
        return str(asked).lower() == str(runs).lower()
    return bool(
        list(asked) == list(runs)
        if isinstance(asked, list | tuple) and isinstance(runs, list | tuple)
        else asked == runs
    )


def _impossible(found: EngineSettings) -> Iterator[Problem]:
    """Yield what DeepSpeed stops on only when it builds the optimizer."""
    if found.config is None:
        return
    for which in ("offload_optimizer", "offload_param"):
        offload = getattr(found.config.zero_config, which)
        if offload is not None and _plain(offload.device) == "nvme" and offload.nvme_path is None:
            key = f"zero_optimization.{which}.nvme_path"
            yield Problem("DeepSpeed", key, None, "error", "Offload to NVMe needs a folder on the node's own disk.")
    yield from _impossible_schedule(found)
    yield from _facts(found)
    name, stage = found.config.optimizer_name, int(found.config.zero_optimization_stage)
    if name is not None and _optimizer_class(found) is None and name not in _deepspeed_optimizers():
        gone = "DeepSpeed stops: neither it nor torch has it."
        effect = OPTIMIZER_REMOVED if is_removed_optimizer(name) else gone
        yield Problem("DeepSpeed", "optimizer.type", name, "error", effect)
    elif name is not None and stage and not found.config.zero_allow_untested_optimizer and not _is_tested(found):
        effect = "DeepSpeed stops: with ZeRO it needs zero_allow_untested_optimizer: true."
        yield Problem("DeepSpeed", "optimizer.type", name, "error", effect)


def _facts(found: EngineSettings) -> Iterator[Problem]:
    """Yield the keys of the DeepSpeed file that do something else than they say: one key of each section and row."""
    seen = set()
    for one in judge(UserFile("deepspeed", "", "", found.deepspeed), is_script=True):
        group = (one.key.partition(".")[0], one.rule.fact)
        if one.rule.fact and not one.is_idle and one.rule.fate != "removed" and group not in seen:
            seen.add(group)
            level: Literal["warning", "note"] = "warning" if one.rule.fate in ("ignored", "unmergeable") else "note"
            yield Problem("DeepSpeed", one.key, one.value, level, one.rule.fact)


def _impossible_schedule(found: EngineSettings) -> Iterator[Problem]:
    name = found.config.scheduler_name
    if name is None:
        return
    known = _schedule_parameters(found)
    if not known:
        yield Problem("DeepSpeed", "scheduler.type", name, "error", "DeepSpeed stops: neither it nor torch has it.")
        return
    given = found.config.scheduler_params or {}
    missing = [key for key, one in known.items() if one.default is inspect.Parameter.empty and key not in given]
    unknown = [key for key in given if key not in known]
    for keys, effect in ((missing, "needs this parameter"), (unknown, "does not know this parameter")):
        for key in keys:
            effect_of_key = f"DeepSpeed stops: {name} {effect}."
            yield Problem("DeepSpeed", f"scheduler.params.{key}", given.get(key), "error", effect_of_key)


def _deepspeed_optimizers() -> list[str]:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    return list(DEEPSPEED_OPTIMIZERS)


def _is_tested(found: EngineSettings) -> bool:
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    name, optimizer = found.config.optimizer_name, _optimizer_class(found)
    return name in ("lion", "muon") or optimizer in ZERO_SUPPORTED_OPTIMIZERS


def answer(request: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the comparison for each of the request's settings."""
    answers = []
    for one in request:
        with temporary_folder("compare") as folder:
            answers.append(asdict(compare(Settings(**one), folder)))
    return answers

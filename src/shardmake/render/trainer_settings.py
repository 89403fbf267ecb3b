"""Training arguments and the launcher's variables as Trainer, or a script's `Accelerator`, reads them."""

import copy
import difflib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from shardmake.config.settings import ACCUMULATION
from shardmake.render import parsers
from shardmake.render.comparison import EngineSettings, Problem, Settings


def read_trainer(settings: Settings, named: dict[str, Any] | None, found: EngineSettings, folder: Path) -> Any:
    """Let TrainingArguments read its values and the DeepSpeed file; return Accelerate's DeepSpeed plugin, if any."""
    from transformers import SchedulerType
    from transformers.training_args import OptimizerNames

    def refuse(key: str, value: Any) -> None:
        allowed: Any = {"lr_scheduler_type": SchedulerType, "optim": OptimizerNames}.get(key)
        known = f" Use one of {', '.join(one.value for one in allowed)}." if allowed else ""
        found.refuse("Trainer", key, value, f"Transformers stops: it cannot use this value.{known}")

    given = _usable_arguments(settings.trainer or {}, found)
    values = parsers.usable(given, lambda less: _training_arguments(less, None, folder)[0], refuse)
    if named is not None and values.get("fsdp"):
        found.stops["fsdp"] = "Trainer stops: it uses DeepSpeed or FSDP, not both."
        values.pop("fsdp")
    deepspeed = _accepted(named, lambda less: _training_arguments(values, less, folder)[0], found)
    try:
        found.arguments, ignored = _training_arguments(values, deepspeed, folder)
        found.ignored += ignored
    except Exception as error:
        found.refuse("Trainer", "the arguments", None, f"Transformers stops with {type(error).__name__}.")
        return None
    found.fsdp = _fsdp_plugin(found.arguments.fsdp_plugin_args)
    if found.fsdp is not None and found.fsdp.activation_checkpointing and found.arguments.gradient_checkpointing:
        effect = "Trainer stops: gradient_checkpointing is true in the training arguments as well. Keep one of both."
        found.stops["fsdp_activation_checkpointing"] = effect
    return found.arguments.deepspeed_plugin


def _accepted(
    deepspeed: dict[str, Any] | None, attempt: Callable[[dict[str, Any]], Any], found: EngineSettings
) -> dict[str, Any] | None:
    """Return the DeepSpeed file without the keys that transformers or Accelerate stop on."""
    effect = "Transformers and Accelerate stop: they cannot use this value."
    refuse = lambda key, value: found.refuse("DeepSpeed", key, value, effect)  # noqa: E731
    return None if deepspeed is None else parsers.usable(deepspeed, attempt, refuse)


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
    found.ignored += [key for key in given if key not in known]
    hints = get_type_hints(TrainingArguments)
    kept = [key for key in given if key in known and key not in NOT_COMPARED]
    typed = {key: _typed(key, copy.deepcopy(given[key]), hints[key], found) for key in kept}
    values = {key: value for key, value in typed.items() if value is not None}
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
    ACCUMULATION: (1, math.inf),
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon"), (0, math.inf)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, 1)),
}
"""Smallest value and upper bound of numbers that transformers does not check: those of torch and of its optimizers."""
PLAIN_TYPES: Final = {int, float, bool, str, type(None)}
NOT_COMPARED: Final = ("deepspeed", "output_dir", "use_cpu", "ddp_backend", "local_rank", "no_cuda", "tf32")
"""Arguments of the machine and of paths; the check runs on a machine without a GPU."""


def _training_arguments(
    values: Mapping[str, Any], deepspeed: dict[str, Any] | None, folder: Path
) -> tuple[Any, list[str]]:
    """Return TrainingArguments for the CPU, and the keys of ``fsdp_config`` that they never read."""
    from transformers import TrainingArguments

    given = copy.deepcopy(dict(values)) | {"use_cpu": True, "ddp_backend": "gloo", "output_dir": str(folder / "output")}
    section = given.get("fsdp_config")
    watched = parsers.Watched(section if isinstance(section, dict) else {})
    given |= {"fsdp_config": watched} if watched else {}
    arguments = TrainingArguments(**given, deepspeed=deepspeed)
    arguments.get_warmup_steps(100)
    _fsdp_plugin(arguments.fsdp_plugin_args)
    unseen = watched.unseen if arguments.fsdp_plugin_args is not None else []
    return arguments, [f"fsdp_config.{key}" for key in unseen]


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


def read_script(named: dict[str, Any] | None, found: EngineSettings) -> Any:
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


def read_dynamo(found: EngineSettings) -> None:
    """Set the compiler's backend that Trainer or the launcher asks for."""
    from accelerate.utils import TorchDynamoPlugin

    if found.arguments is not None:
        found.dynamo = TorchDynamoPlugin(backend=found.arguments.torch_compile_backend).backend.value
    elif found.launched is not None:
        found.dynamo = TorchDynamoPlugin().backend.value

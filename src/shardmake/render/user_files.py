"""Merge the user's own DeepSpeed or Accelerate file into the rendered ones.

The file may set what the plan leaves open. It may repeat what the plan or the run decides (sizes, engine, precision,
learning rate) or leave it to "auto", but not change it. The error lists every contradiction with both values and the
one that would have won, and nothing is rendered. Every value that is taken over is reported.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from shardmake.config.models import Run
from shardmake.core.errors import ConfigError
from shardmake.render.accelerate_file import IGNORED_IN_FILE
from shardmake.render.check import Files
from shardmake.render.lint import REFUSED_BESIDE_DEEPSPEED_FILE, SHARED, TITLES, Kind, read_source
from shardmake.render.parsers import leaves
from shardmake.run.plan import Choice
from shardmake.run.training_settings import TrainingSettings

STOPS: Final = "Transformers would have stopped, once the model is loaded on every rank."
ACCELERATE_STOPS: Final = "Accelerate would have stopped: it refuses this key beside a DeepSpeed file."
FILE_WINS: Final = "Your file would have won, and another training than the planned one would have run."
ARGUMENTS_WIN: Final = "The training arguments would have won."
PLANNED_DEEPSPEED: Final = {
    **dict.fromkeys(SHARED, STOPS),
    "train_batch_size": "DeepSpeed would have stopped on the product of the others.",
    "zero_optimization.stage": FILE_WINS,
    "tensor_parallel.autotp_size": FILE_WINS,
    "zero_optimization.offload_optimizer.device": FILE_WINS,
    "zero_optimization.offload_param.device": FILE_WINS,
}
"""Keys of a DeepSpeed file that the plan or the run decides, and the effect of another value."""

FSDP_PLANNED: Final = (
    "version",
    "reshard_after_forward",
    "sharding_strategy",
    "offload_params",
    "state_dict_type",
    "cpu_ram_efficient_loading",
    "activation_checkpointing",
)
PLANNED_ACCELERATE: Final = {
    "distributed_type": FILE_WINS,
    "num_machines": FILE_WINS,
    "num_processes": FILE_WINS,
    "use_cpu": "use_cpu would have won: the launcher silently starts one plain process.",
    "mixed_precision": "The training arguments would have won where they ask for bf16 or fp16, else your file.",
    "deepspeed_config.deepspeed_config_file": "The command line would have won. To use that file, name it in the run.",
    "deepspeed_config.deepspeed_multinode_launcher": FILE_WINS,
    **dict.fromkeys([f"deepspeed_config.{key}" for key in REFUSED_BESIDE_DEEPSPEED_FILE], ACCELERATE_STOPS),
    **dict.fromkeys([f"fsdp_config.fsdp_{key}" for key in FSDP_PLANNED], ARGUMENTS_WIN),
}
"""The same for an Accelerate file."""

ON_COMMAND_LINE: Final = ("machine_rank", "main_process_ip", "main_process_port", *IGNORED_IN_FILE)
"""Keys of an Accelerate file that are known only at launch, or that accelerate ignores in a file."""

_ADVICE: Final = 'Remove those keys from your file (or write "auto" in a DeepSpeed file), or change the run to match.'


def merge_own_files(files: Files, run: Run, choice: Choice) -> tuple[Files, list[str]]:
    """Return ``files`` with the additions of the run's own files, and a line for each value taken over or left out.

    Raises `ConfigError` with every contradiction.
    """
    conflicts: list[str] = []
    changes: list[str] = []
    if run.deepspeed_config:
        files = replace(files, deepspeed=_merge_deepspeed(run.deepspeed_config, files, choice, conflicts, changes))
    if run.accelerate_config:
        files = _merge_accelerate(run.accelerate_config, files, run, conflicts, changes)
    if conflicts:
        raise ConfigError("\n".join(["Your own files contradict the run and its plan:", *conflicts, _ADVICE]))
    return files, changes


def _merge_deepspeed(
    name: str, files: Files, choice: Choice, conflicts: list[str], changes: list[str]
) -> dict[str, Any]:
    if not choice.is_deepspeed:
        raise ConfigError(
            f"deepspeed_config names {name}, but strategy {choice.strategy} does not use DeepSpeed. Remove "
            "deepspeed_config, or set strategy to one of DeepSpeed's (zero1, zero2, zero3 ...)."
        )
    own, planned = _read(name, "deepspeed"), _planned_deepspeed(files, choice)
    conflicts += contradictions(name, own, planned, PLANNED_DEEPSPEED)
    # The product of the others; on CPU, DeepSpeed reads the file before it knows the world size, and would refuse it.
    own.pop("train_batch_size", None)
    merged, taken = overlay(files.deepspeed, _fill_auto(own, planned | dict(leaves(files.deepspeed))))
    changes += [f"{name}: {line}" for line in taken]
    return merged


def _merge_accelerate(name: str, files: Files, run: Run, conflicts: list[str], changes: list[str]) -> Files:
    own = _read(name, "accelerate")
    changes += [f"{name}: {key} is left out; it stands on the command line" for key in ON_COMMAND_LINE if key in own]
    own = {key: value for key, value in own.items() if key not in ON_COMMAND_LINE}
    if run.deepspeed_config:
        own.get("deepspeed_config", {}).pop("deepspeed_config_file", None)
    winners = PLANNED_ACCELERATE | ({"mixed_precision": ACCELERATE_STOPS} if files.deepspeed else {})
    conflicts += contradictions(name, own, dict(leaves(files.accelerate)), winners)
    merged, taken = overlay(files.accelerate, own)
    changes += [f"{name}: {line}" for line in taken]
    return replace(files, accelerate=merged, training=_training_with(files, merged))


def _read(path: str, kind: Kind) -> dict[str, Any]:
    source = read_source(Path(path))
    if source.kind != kind:
        raise ConfigError(f"{kind}_config names {path}, which looks like {TITLES[source.kind]}.")
    return source.values


def _planned_deepspeed(files: Files, choice: Choice) -> dict[str, Any]:
    """Return the value of each key that the run's own file may not change, with "auto" resolved."""
    spec, arguments = choice.spec, files.training.arguments
    return {
        **{key: arguments[argument] for key, argument in SHARED.items()},
        "train_batch_size": choice.global_batch_size,
        "zero_optimization.stage": spec.zero_stage,
        "tensor_parallel.autotp_size": choice.tensor_parallel,
        "zero_optimization.offload_optimizer.device": spec.offload_optimizer or "none",
        "zero_optimization.offload_param.device": spec.offload_param or "none",
    }


def contradictions(
    name: str, own: Mapping[str, Any], planned: Mapping[str, Any], winners: Mapping[str, str]
) -> list[str]:
    """Return a line for every key of ``own`` that contradicts the plan, with the value that would have won."""
    return [
        f"  {key}: {value!r} in {name}, {_format(planned, key)} in the plan. {winners[key]}"
        for key, value in leaves(own)
        if key in winners and value != "auto" and value != planned.get(key)
    ]


def _format(planned: Mapping[str, Any], key: str) -> str:
    return repr(planned[key]) if key in planned else "not set"


def _fill_auto(values: Mapping[str, Any], planned: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``values`` with the planned value for each "auto"; Trainer fills in those without one."""
    return {
        key: _fill_auto(value, planned, f"{prefix}{key}.")
        if isinstance(value, Mapping)
        else planned.get(f"{prefix}{key}", value)
        if value == "auto"
        else value
        for key, value in values.items()
    }


def overlay(rendered: dict[str, Any], own: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return ``rendered`` with every value of ``own``, and a line for each value that is new or differs."""
    merged, before = deepcopy(rendered), dict(leaves(rendered))
    changes = []
    for key, value in leaves(own):
        if before.get(key) != value:
            changes.append(f"{key} is {value!r}" + (f" instead of {before[key]!r}" if key in before else ""))
        place = merged
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return merged, changes


def _training_with(files: Files, accelerate: Mapping[str, Any]) -> TrainingSettings:
    """Return the training file with FSDP's settings from the Accelerate file, which Trainer's own would override."""
    settings = files.training.arguments.get("fsdp_config")
    if settings is None:
        return files.training
    launched = {key.removeprefix("fsdp_"): value for key, value in accelerate["fsdp_config"].items()}
    added = {key: value for key, value in launched.items() if key not in ("offload_params", "sharding_strategy")}
    added["transformer_layer_cls_to_wrap"] = added["transformer_layer_cls_to_wrap"].split(",")
    return files.training.with_arguments(fsdp_config={**settings, **added})

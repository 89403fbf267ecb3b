"""Settings as the libraries read them: pass them through the launcher, Trainer and Accelerate up to DeepSpeed's config.

Everything here runs in a process of its own, without a GPU, without weights and without communication
(`shardmake.render.parsers`). A value that a library refuses is recorded and removed, so that one mistake does not hide
the others.
"""

import copy
import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from shardmake.config.deepspeed_keys import find_removed
from shardmake.config.settings import ACCUMULATION, MICRO_BATCH, SETTINGS, TOTAL_BATCH
from shardmake.core.nested import leaves, overlay
from shardmake.core.private_names import private
from shardmake.render import parsers
from shardmake.render.comparison import EngineSettings, Library, Problem, Settings
from shardmake.render.launcher_settings import VARIABLES, launch
from shardmake.render.trainer_settings import read_dynamo, read_script, read_trainer

MAPPINGS: Final = (
    "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "bf16", "fp16",
    "optimizer", "optimizer.params", "scheduler", "scheduler.params", "torch_autocast", "compile", "checkpoint",
    "tensor_parallel", "activation_checkpointing", "aio", "data_types", "comms_logger", "flops_profiler",
)  # fmt: skip
"""Keys of a DeepSpeed file that hold a mapping."""
BATCH: Final = (TOTAL_BATCH, MICRO_BATCH, ACCUMULATION)
REFUSED_BESIDE_DEEPSPEED_FILE: Final = tuple(
    row.accelerate[0].rpartition(".")[2]
    for row in SETTINGS.values()
    if row.deepspeed_keys and row.accelerate and row.accelerate[0].startswith("deepspeed_config.")
)
"""Keys of accelerate's ``deepspeed_config`` section that it refuses beside a DeepSpeed file."""
FILLED_BY_ACCELERATE: Final = {row.deepspeed_keys[0]: row.auto for row in SETTINGS.values() if row.auto is not None}
"""Values that `Accelerator.prepare` puts in place of an "auto" that is still there."""
HIDDEN_SIZE: Final = 64
"""Stands in for the model's, from which Trainer computes bucket sizes for "auto"."""


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
            launch(settings, deepspeed, found, folder)
        named = deepspeed if settings.named_by_trainer or settings.accelerate is None else None
        if named is not None or "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ:
            _drop_refused_fields(found)
        plugin = read_script(named, found) if settings.trainer is None else read_trainer(settings, named, found, folder)
        found.uses_deepspeed = named is not None or plugin is not None
        if plugin is not None:
            _read_deepspeed(settings, plugin, found)
        read_dynamo(found)
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
    private(AcceleratorState).reset_state(reset_partial_state=True)
    ranks = PartialState(cpu=use_cpu, **({"backend": "gloo"} if use_cpu else {})).num_processes
    if found.world_size > ranks:
        total = found.deepspeed.get(TOTAL_BATCH) if found.deepspeed else "auto"
        if found.uses_deepspeed and (total == "auto" or (total is not None and settings.trainer is not None)):
            found.stops[TOTAL_BATCH] = "DeepSpeed stops: Accelerate counts one rank, and DeepSpeed counts all."
        if settings.trainer is not None and settings.trainer.get("fsdp"):
            found.stops["fsdp"] = "Trainer stops: FSDP needs several ranks, and without a GPU each rank counts one."
        effect = "Without a GPU, Accelerate takes each rank for the only one, and all ranks train on the same rows."
        library: Library = "Accelerate" if settings.trainer is None else "Trainer"
        by_run = "Start the script as a run of Shardmake, which corrects this."
        advice = by_run if settings.trainer is None else "Set use_cpu: true."
        found.refuse(library, "use_cpu", None, f"{effect} {advice}")
    return int(ranks)


def _drop_refused_fields(found: EngineSettings) -> None:
    """Record the settings of an Accelerate file that Accelerate refuses beside a DeepSpeed file, and remove them."""
    fields = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    refused = {*fields} & {*REFUSED_BESIDE_DEEPSPEED_FILE, "mixed_precision"}
    for name in refused:
        found.stops[f"accelerate {name}"] = "Accelerate stops on this key beside a DeepSpeed file. Remove it."
        os.environ.pop(f"ACCELERATE_{name.upper()}", None)
        os.environ.pop(f"ACCELERATE_DEEPSPEED_{name.upper()}", None)
    os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(name for name in fields if name not in refused)


def _enter_world(size: int) -> None:
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        del os.environ[name]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_PORT": "1"}
    parsers.pretend_world(size)


def _leave_world() -> None:
    import torch.distributed
    from accelerate.state import AcceleratorState, PartialState

    private(AcceleratorState).reset_state(reset_partial_state=True)
    private(PartialState).reset_state()
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
        copied = parsers.without(copied, key)
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
            effect = "The libraries compare text and numbers as different values."
            if f"{prefix}{key}" in SETTINGS["ZeRO stage"].deepspeed:
                effect = (
                    "DeepSpeed reads the text as a number, but transformers does not: with stage 3, each rank would "
                    "load the whole model before it is partitioned."
                )
            found.refuse("DeepSpeed", f"{prefix}{key}", value, f"{effect} Write it without quotes: {json.dumps(read)}.")
            section[key] = read


def _number_or_boolean(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number if number == number else None


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def _read_deepspeed(settings: Settings, plugin: Any, found: EngineSettings) -> None:
    """Fill in "auto" as Trainer and Accelerate do, record what they stop on, and read DeepSpeed's config."""
    _set_precision(plugin, found)
    if found.arguments is not None:
        _fill_by_trainer(plugin, found)
    config = plugin.hf_ds_config.config
    for auto, value in list(leaves(config)):
        if value == "auto":
            config = _fill_last(config, auto, found)
    _check_batch(config, found)
    reader = parsers.deepspeed_settings
    refused: set[str] = set()  # the size of a micro batch is put back, and may fail again
    while (key := parsers.culprit(config, reader)) is not None and key not in refused:
        refused.add(key)
        value, effect = dict(leaves(config))[key], f"DeepSpeed stops: {_own_reason(config)}."
        if dict(leaves(found.deepspeed)).get(key) == "auto":
            filled = f"The training arguments fill in {json.dumps(value)}, and DeepSpeed stops"
            value, effect = "auto", f"{filled}: it cannot use this value."
        found.refuse("DeepSpeed", key, value, effect)
        config = {MICRO_BATCH: 1} | parsers.without(config, key)  # DeepSpeed reads no file without it
    try:
        found.config, ignored = reader(config)
        found.defaults, _ = reader({MICRO_BATCH: 1})
    except Exception as error:
        found.refuse("DeepSpeed", "the file", None, f"DeepSpeed stops with {type(error).__name__}: {_words(error)}.")
        return
    for name in ignored:
        if name in (settings.deepspeed or {}):
            effect = "DeepSpeed does not know this key and ignores it."
            found.problems.append(Problem("DeepSpeed", name, found.deepspeed.get(name), "warning", effect))


def _own_reason(config: dict[str, Any]) -> str:
    """Return why DeepSpeed stops on ``config``: in its own words if keys contradict each other."""
    own = ""
    try:
        parsers.deepspeed_settings(copy.deepcopy(config))
    except AssertionError as error:
        own = _words(error)
    except (Exception, SystemExit):
        pass
    return own or "it does not know this key or cannot use its value"


def _words(error: Exception) -> str:
    return " ".join(str(error).partition("[type=")[0].split())[:200]


def _set_precision(plugin: Any, found: EngineSettings) -> None:
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if found.arguments is not None:
        precision = found.arguments.mixed_precision
    try:
        plugin.set_mixed_precision(precision)
    except ValueError:
        found.stops["mixed_precision"] = f"Accelerate stops: {precision} beside the other half precision."


def _fill_by_trainer(plugin: Any, found: EngineSettings) -> None:
    """Let transformers fill in "auto" and compare, as it does after loading the model."""
    from transformers.integrations.deepspeed import propagate_args_to_deepspeed

    arguments = found.arguments
    if getattr(arguments, "hf_deepspeed_config", None) is None:
        propagate_args_to_deepspeed(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)), arguments)
    read = plugin.hf_ds_config
    (total_steps,), warm_up_steps = SETTINGS["total steps"].unplanned, SETTINGS["warm-up steps"].unplanned
    written = read.get_value(total_steps)
    steps = arguments.max_steps if arguments.max_steps > 0 else None
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=HIDDEN_SIZE))
    with suppress(ValueError):  # It lists the mismatches.
        read.trainer_config_finalize(arguments, model, steps or (written if isinstance(written, int) else 1))
    by_steps = {total_steps, *(warm_up_steps if 0 < arguments.warmup_steps < 1 else ())}
    for line in read.mismatches:
        key = re.split(r"[ =]", line.removeprefix("- ds "))[0]
        if steps or key not in by_steps:
            found.stops[key] = "Transformers stops once the model is loaded on every rank."


def _fill_last(config: dict[str, Any], key: str, found: EngineSettings) -> dict[str, Any]:
    """Fill in an "auto" that Trainer leaves, as `Accelerator.prepare` does, or record that nothing does."""
    filled: dict[str, Any] = dict(FILLED_BY_ACCELERATE)
    if found.arguments is None:
        filled |= {ACCUMULATION: 1, MICRO_BATCH: 1}
        found.left_to_script += [key] if key not in FILLED_BY_ACCELERATE else []
    if key in filled:
        return overlay(config, {key: filled[key]})
    script = (TOTAL_BATCH, SETTINGS["learning rate"].unplanned[0], *SETTINGS["weight decay"].unplanned)
    sized = key.startswith(("scheduler.params.", "zero_optimization.reduce", "zero_optimization.stage3_"))
    by_itself = found.launched is None and found.arguments is None
    if not by_itself and (found.arguments is not None or not (key in script or sized)):
        found.refuse("DeepSpeed", key, "auto", 'Nothing fills in this "auto", and the run stops. Write a value.')
    return parsers.without(config, key)


def _check_batch(config: dict[str, Any], found: EngineSettings) -> None:
    """Record what DeepSpeed stops on in the batch sizes, and change ``config`` so that it can be read."""
    total, micro, accumulation = (config.get(key) for key in BATCH)
    groups = (config.get("tensor_parallel") or {}).get("autotp_size") or 1
    ranks = found.world_size // groups if isinstance(groups, int) and groups > 0 else found.world_size
    if total is None and micro is None:
        names = f"{MICRO_BATCH} nor {TOTAL_BATCH}"
        found.stops[MICRO_BATCH] = (
            f"DeepSpeed stops: its file has a number for neither {names}, and nothing fills one in. Write the first."
        )
        config[MICRO_BATCH] = 1
    elif all(isinstance(size, int) for size in (total, micro, accumulation)):
        product = micro * accumulation * ranks  # type: ignore[operator]
        if total != product and not found.stops.keys() & {*BATCH}:
            sizes = f"{micro} x {accumulation} steps x {ranks} ranks make {product}"
            found.stops[TOTAL_BATCH] = f"DeepSpeed stops: {sizes}."
        del config[TOTAL_BATCH]

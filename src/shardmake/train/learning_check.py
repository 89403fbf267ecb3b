"""Check that the optimizer, the schedule, the batch and the precision are the planned ones, before the first step.

Each rank reads them from the engine, the optimizer, the scheduler and the data loader that will train, not from the
arguments that asked for them: a DeepSpeed file may replace any of them silently.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from shardmake.config.settings import ACCUMULATION, SETTINGS, Setting
from shardmake.core.nested import leaves, same
from shardmake.run.engine import LearningSettings
from shardmake.run.length import planned_rates, rates
from shardmake.run.plan import Choice
from shardmake.run.training_settings import TrainingSettings
from shardmake.train.engine_check import compute_dtype, dtype_name, is_deepspeed_engine, refuse_differences


@dataclass(frozen=True)
class BuiltTraining:
    """The objects that will train: the wrapped model, the optimizer, the scheduler and the batches of one rank.

    ``precision`` is Accelerate's name of the compute data type; ``steps`` is the number of optimizer steps in all.
    """

    model: Any
    optimizer: Any
    scheduler: Any
    batches: Any
    arguments: TrainingArguments
    precision: str
    autocasts: bool
    steps: int


def describe_learning(built: BuiltTraining, settings: TrainingSettings) -> LearningSettings:
    """Return what the training learns with."""
    model, arguments = built.model, built.arguments
    deepspeed = is_deepspeed_engine(model)
    optimizer = _unwrapped(model.basic_optimizer if deepspeed else built.optimizer, "optimizer")
    engines_own = model.lr_scheduler if deepspeed else None
    scheduler = _unwrapped(engines_own or built.scheduler, "scheduler")
    held = {
        name: getattr(model, row.deepspeed[0])() if deepspeed else getattr(arguments, row.trainer[0])
        for name, row in _rows().items()
        if row.is_plain
    }
    decays = {float(group["weight_decay"]) for group in optimizer.param_groups}
    # ZeRO drops an empty group of weights that decay; `ds_shape` is the shape of a weight that ZeRO-3 has sharded.
    dimensions = {len(getattr(p, "ds_shape", p.shape)) for p in model.parameters() if p.requires_grad}
    first, dtype = optimizer.param_groups[0], compute_dtype(model, built.precision)
    betas, is_transformers_own = first.get("betas"), isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    return LearningSettings(
        optimizer=type(optimizer).__name__,
        learning_rate=float(first.get("initial_lr", first["lr"])),
        betas=list(betas) if betas else None,
        epsilon=first["eps"] if betas else None,
        weight_decay=max(decays) if any(size > 1 for size in dimensions) else arguments.weight_decay,
        decays_vectors=max(decays) > 0 and 0.0 not in decays and any(size < 2 for size in dimensions),
        schedule=str(arguments.lr_scheduler_type.value) if is_transformers_own else type(scheduler).__name__,
        warmup_steps=arguments.get_warmup_steps(built.steps),
        steps=built.steps,
        group_rates=sorted({float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}),
        rates=rates(scheduler, built.steps),
        dtype=dtype,
        autocast=_autocast(built, deepspeed, dtype),
        global_batch_size=built.batches.total_batch_size * held[ACCUMULATION],
        own_files=settings.own_files,
        **held,
    )


def _rows() -> dict[str, Setting]:
    """Return the settings of one training argument in `LearningSettings`, by the name there."""
    rows = {row.key or row.trainer[0]: row for row in SETTINGS.values() if len(row.trainer) == 1}
    return {name: row for name, row in rows.items() if name in LearningSettings.model_fields}


def planned_learning(
    settings: TrainingSettings, choice: Choice, arguments: TrainingArguments, steps: int
) -> dict[str, Any]:
    """Return the planned value of each field of `LearningSettings` that the plan or the run decides."""
    given, expected = settings.arguments, settings.expected
    spec, replaced = settings.optimizer_row, settings.optimizer
    warmup = arguments.get_warmup_steps(steps)
    class_name = spec.class_name or Trainer.get_optimizer_cls_and_kwargs(arguments)[0].__name__
    betas = {
        "betas": [given["adam_beta1"], given["adam_beta2"]] if spec.has_betas else None,
        "epsilon": given["adam_epsilon"] if spec.has_betas else None,
    }
    return {
        **{name: given[row.trainer[0]] for name, row in _rows().items()},
        "optimizer": replaced.class_name.rpartition(".")[2] if replaced else class_name,
        **(betas if spec.class_name else {}),  # others have their own
        "decays_vectors": False,
        "schedule": given["lr_scheduler_type"],
        "warmup_steps": warmup,
        "group_rates": sorted({given["learning_rate"], *settings.learning_rates.values()}),
        "rates": planned_rates(
            given["lr_scheduler_type"], given["learning_rate"], warmup, steps, given.get("lr_scheduler_kwargs")
        ),
        "dtype": expected.dtype,
        "autocast": None if choice.is_deepspeed or expected.dtype == "float32" else expected.dtype,
        "global_batch_size": choice.global_batch_size,
    }


def check_learning(found: LearningSettings, planned: Mapping[str, Any]) -> None:
    """Raise `EngineMismatchError` with every difference between ``found`` and ``planned``."""
    values = {name: value for name, value in found.as_json().items() if name in planned}
    differing = {name: (planned[name], value) for name, value in values.items() if not _close(value, planned[name])}
    refuse_differences("The training would not learn with the planned settings.", differing)


def check_deepspeed_file(model: Any, rendered: Mapping[str, Any]) -> None:
    """Raise `EngineMismatchError` if DeepSpeed runs with other values than those of the rendered file."""
    if not is_deepspeed_engine(model):
        return
    running = dict(leaves(model.config))
    planned = {key: value for key, value in leaves(rendered) if value != "auto"}
    differing = {key: (value, running.get(key)) for key, value in planned.items() if not same(value, running.get(key))}
    refuse_differences("DeepSpeed does not run with the rendered file.", differing)


def _unwrapped(wrapper: Any, attribute: str) -> Any:
    """Return the innermost optimizer or scheduler; Accelerate and DeepSpeed wrap it, under the same name."""
    while hasattr(wrapper, attribute):
        wrapper = getattr(wrapper, attribute)
    return wrapper


def _autocast(built: BuiltTraining, deepspeed: bool, dtype: str) -> str | None:
    if deepspeed:
        return dtype_name(built.model.torch_autocast_dtype()) if built.model.torch_autocast_enabled() else None
    return dtype if built.autocasts else None


def _close(found: Any, planned: Any) -> bool:
    """Return True for equal values; rates may differ in the last digits of fp32, in which some optimizers hold them."""
    if isinstance(found, list) and isinstance(planned, list):
        return len(found) == len(planned) and all(map(_close, found, planned))
    if isinstance(found, float) and isinstance(planned, int | float) and not isinstance(planned, bool):
        return math.isclose(found, planned, rel_tol=1e-6, abs_tol=1e-15)
    return same(found, planned)

"""The facts of a training as rows of a table: data, settings, engine and outcome.

Shardmake's own trainings state what their last attempt learned with, as its ranks found it in the built engine. A
user's script may not follow them. Of a script only those settings are stated that its ranks or its metrics showed.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from shardmake.config.choices import TORCH_DTYPES
from shardmake.config.methods import METHODS
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.settings import SETTINGS
from shardmake.core.units import plural
from shardmake.report.history import hours_name
from shardmake.report.records import Records, public_name
from shardmake.run.engine import Engine
from shardmake.run.sources import PinnedSource
from shardmake.run.training_settings import AdapterMethod, ScriptProgram, TrainingSettings

UNKNOWN: Final = "set by the script"
_SCRIPTS_OWN: Final = "optimizer, schedule, weight decay, gradient clipping, sequence length, method, seed"
_PRECISIONS: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_APIS: Final = {
    "accelerate": "Accelerate", "trainer": "transformers' Trainer", "deepspeed": "DeepSpeed", "torch": "PyTorch",
}  # fmt: skip
_DIGITS: Final = 16
"""Digits of a SHA-256 that are shown."""


def training_facts(records: Records) -> dict[str, str]:
    """Return each fact of the training by its name; those without a value are left out."""
    settings = _script_settings(records) if records.is_script else _own_settings(records)
    return {name: value for name, value in {**_inputs(records), **settings, **_outcome(records)}.items() if value}


def _inputs(records: Records) -> dict[str, str]:
    run, data = records.run, records.data
    first = records.sources.model.first if records.sources else None
    read_by_script = "" if not records.is_script else "; the script may have read other data"
    examples = f"{plural(data.train.examples, 'example')}, {plural(data.train.tokens, 'token')}"
    return {
        "Base model": _named(first.name if first else run.model, first, run.revision) + records.runs_before,
        "Data": "; ".join(_sources(records, "train")) + read_by_script,
        "Examples": f"{plural(len(data.sources['train']['files']), 'file')}, read by the script"
        if run.data.is_raw
        else f"{examples} in {plural(data.train.sequences, 'sequence')}{read_by_script}",
        "Data format": "" if records.is_script else data.describe_format(),
        "Evaluation data": "; ".join(_sources(records, "eval")) if run.data.eval else "",
    }


def _sources(records: Records, split: Literal["train", "eval"]) -> Iterator[str]:
    """Yield each source of a split's examples, with the examples that were used if there are several."""
    data = records.run.data
    used = {share.name: share for share in getattr(records.data, split).sources}
    fetched: Sequence[PinnedSource] = getattr(records.sources, split) if records.sources else []
    for number, one in enumerate(data.sources if split == "train" else data.eval_sources):
        pinned = fetched[number] if fetched else None
        several = one.label in used
        name = _named(one.source, pinned, data.only(one).revision)
        files = records.data.sources.get(f"{split}/{one.label}" if several else split, {}).get("files", [])
        name += f", SHA-256 `{files[0]['sha256'][:_DIGITS]}...`" if len(files) == 1 else ""  # one local file
        yield name + (f" ({used[one.label].describe()})" if several else "")


def _named(source: str, pinned: PinnedSource | None, revision: str | None) -> str:
    """Return the public name with the fetched commit, or else the configured revision."""
    commit = pinned.commit if pinned and pinned.commit else revision
    return public_name(source) + (f" at `{commit}`" if commit else "")


def _own_settings(records: Records) -> dict[str, str]:
    settings, choice = records.settings, records.used.choice
    values, section = settings.arguments, settings.objective_settings
    # the values of the run's own DeepSpeed and Accelerate files, without paths
    shown = [f"{key} {value!r}" for key, value in settings.own_files.items() if "/" not in str(value)]
    rate, schedule = values["learning_rate"], values["lr_scheduler_type"]
    is_best = records.run.final_checkpoint == "best"
    return {
        "Objective": OBJECTIVES[settings.objective].label + (f" with {section.describe()}" if section else ""),
        "Method": _method(records),
        "Optimizer": _optimizer(settings),
        **_learning(rate, schedule, values["warmup_steps"], float(values["weight_decay"]), False),
        "Schedule": ", ".join(f"{name} {value}" for name, value in (values.get("lr_scheduler_kwargs") or {}).items()),
        **_values(values),
        "Length": _length(records),
        "Checkpoint": f"that of step {records.merge.step}, with the lowest evaluation loss" if is_best else "",
        "Global batch": f"{plural(choice.global_batch_size, 'sequence')} = {choice.micro_batch_size} per forward pass "
        f"x {plural(choice.gradient_accumulation_steps, 'accumulation step')} x {choice.readers}",
        "Sequence length": f"{records.used.workload.sequence_length:,} tokens"
        + (", packed" if records.used.workload.packing else ", one example each"),
        "Precision": _precision(records.used.precision, records),
        "Attention": settings.model.attention.replace("_", " "),
        "Seed": str(values["seed"]),
        "Strategy": _strategy(records),
        "World size": f"{plural(choice.world_size, 'rank')} on {plural(choice.nodes, 'node')}",
        **_learned(records),
        "Other learning rates": ", ".join(f"{rate:g} for `{name}`" for name, rate in settings.learning_rates.items()),
        "Own settings files": ", ".join(shown),
    }


def _values(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that one value states, from training arguments or what the ranks found."""
    rows = [row for row in SETTINGS.values() if row.label]
    return {row.label: row.shown.format(given[name]) for row in rows for name in {row.key, *row.trainer} & {*given}}


def _learned(records: Records) -> dict[str, str]:
    """Return the settings that the ranks found in the engine, which replace the rendered ones."""
    found = records.training.learning
    if found is None:
        return {}
    facts = {
        **_learning(found.learning_rate, found.schedule, found.warmup_steps, found.weight_decay, found.decays_vectors),
        **_values(found.as_json()),
    }
    if found.autocast:
        facts["Precision"] = _precision(f"{_PRECISIONS.get(found.autocast, found.autocast)} under autocast", records)
    return facts


def _learning(rate: float, schedule: str, warmup: float, decay: float, decays_vectors: bool) -> dict[str, str]:
    """Return the facts of a schedule; ``warmup`` is a number of steps (int) or a part of all steps (float)."""
    steps = plural(warmup, "step") if isinstance(warmup, int) else f"{warmup:.3g} of all steps"
    return {
        "Weight decay": f"{decay:g}{'' if decays_vectors or not decay else ', not on norms and biases'}",
        "Learning rate": f"{rate:g} at its peak, {schedule.replace('_', ' ')} schedule",
        "Warm-up": steps if warmup and schedule != "constant" else "none",
    }


def _method(records: Records) -> str:
    method = records.settings.method
    label = METHODS[method.kind].label
    if not isinstance(method, AdapterMethod):
        frozen = ", ".join(f"`{pattern}`" for pattern in records.settings.freeze)
        return label + (f"; not trained: {frozen}" if frozen else "")
    layers = method.targets if isinstance(method.targets, str) else ", ".join(method.targets)
    adapter = records.sources.adapter if records.sources else None
    rows = f"rows of the tokens {', '.join(map(repr, method.train_tokens))}; " if method.train_tokens else ""
    start = f"continues the adapter {public_name(adapter.name)}; " if adapter else ""
    return (
        f"{label}: rank {method.rank}, alpha {method.alpha}, dropout "
        f"{method.dropout:g}, on {layers}; {rows}{start}merged into the base model"
    )


def _optimizer(settings: TrainingSettings) -> str:
    values, spec = settings.arguments, settings.optimizer_row
    label = spec.label + (", fused" if values["optim"] == spec.fused else "")
    if settings.optimizer and not spec.own_class:
        label = settings.optimizer.class_name.rpartition(".")[2]
    if spec.has_betas:
        label += f", betas {values['adam_beta1']:g} and {values['adam_beta2']:g}, epsilon {values['adam_epsilon']:g}"
    return label


def _length(records: Records) -> str:
    training, epochs = records.training, records.settings.arguments.get("num_train_epochs")
    tokens = "" if training.tokens is None else f", {training.tokens:,} tokens"
    steps = UNKNOWN if training.steps is None else plural(training.steps, "optimizer step")
    if planned := records.planned_steps:
        return f"{steps} of {planned:,}, until the evaluation loss no longer fell{tokens}"
    return steps + (f" ({epochs:g} {'epoch' if epochs == 1 else 'epochs'})" if epochs else "") + tokens


def _precision(training: str, records: Records) -> str:
    dtype, modules = records.merge.verification.dtype, records.merge.peft_modules
    merged = f"; {plural(modules, 'merged module')} compared with PEFT's" if modules else ""
    return f"{training} in training, {_PRECISIONS.get(dtype, dtype)} in these files{merged}"


def _strategy(records: Records) -> str:
    """Return the strategy of the last attempt, with the reason of the plan if it is the planned one."""
    planned, used = records.planned.choice, records.used.choice
    if used != planned:
        sizes = f"micro batch {used.micro_batch_size}"
        return f"{used.strategy}, {sizes}: a fallback of the plan, which began with {planned.strategy}"
    reason = records.planned.reason
    return reason if reason.startswith(used.strategy) else f"{used.strategy}: {reason}"


def _script_settings(records: Records) -> dict[str, str]:
    found, program = records.training.trained, records.settings.program
    digest = f" (SHA-256 `{program.sha256[:_DIGITS]}...`)" if isinstance(program, ScriptProgram) else ""
    api = f" with {_APIS[found.api]}" if found and found.api else ""
    name = Path(records.run.script or "").name
    started, rates = records.used.choice.world_size, records.history.series("learning_rate")[1]
    return {
        "Trained by": f"`{name}`{digest}{api}",
        "Engine": found.describe() if found else f"{UNKNOWN}; the plan was {records.used.choice.strategy}",
        "World size": plural(found.world_size, "rank") if found else f"{plural(started, 'rank')} were started",
        "Precision": _precision(_PRECISIONS.get(found.dtype, found.dtype) if found else UNKNOWN, records),
        "Global batch": _found_batch(found),
        "Rows": "different on every rank, compared at the first step" if found and found.rows_compared else "",
        "Length": _length(records) if records.training.steps is not None else UNKNOWN,
        "Learning rate": _found_rate(found, rates, records.run.learning_rate),
        "Other settings": f"{UNKNOWN}: {_SCRIPTS_OWN}",
    }


def _found_rate(found: Engine | None, logged: Sequence[float], wanted: float | None) -> str:
    if found is None or found.learning_rate is None:
        return f"{max(logged):g}, the highest that the script logged" if logged else UNKNOWN
    other = wanted is not None and wanted != found.learning_rate
    return f"{found.learning_rate:g} at its peak" + (f", set by the script; the run has {wanted:g}" if other else "")


def _found_batch(found: Engine | None) -> str:
    if found is None or found.global_batch_size is None:
        return UNKNOWN
    total = plural(found.global_batch_size, "sequence")
    if found.micro_batch_size is None or found.gradient_accumulation_steps is None:
        return total
    steps = plural(found.gradient_accumulation_steps, "accumulation step")
    return f"{total} = {found.micro_batch_size} per forward pass x {steps} x {plural(found.world_size, 'rank')}"


def _outcome(records: Records) -> dict[str, str]:
    training, history = records.training, records.history
    hours = f"{history.hours:.2f} h, {history.device_hours:.2f} {hours_name(on_gpus=records.on_gpus)}"
    finished = datetime.fromtimestamp(training.finished_at, UTC).strftime("%Y-%m-%d")
    commit = records.attempt.commit if records.attempt else None
    return {
        "Training loss at the end": "" if training.loss is None else f"{training.loss:.4f}",
        "Hardware": _hardware(records),
        "Time": f"{hours if history.spans else 'hours not recorded'}, {plural(training.attempts, 'attempt')}, "
        f"finished {finished}",
        "Libraries": ", ".join(f"{name} {version}" for name, version in training.versions.items())
        + (f" at `{commit}`" if commit else ""),
    }


def _hardware(records: Records) -> str:
    """Return the devices of the last attempt, named as in the cluster file."""
    if records.attempt is None:
        return ""
    count, nodes = records.attempt.world_size, plural(records.attempt.nodes, "node")
    kind = plural(count, "CPU rank") if records.on_cpu else f"{count} x {records.attempt.accelerator.upper()}"
    service = records.attempt.service_nodes
    more = f", and {plural(service, 'node')} for the service" if service else ""
    return f"{kind} on {nodes}{more}"

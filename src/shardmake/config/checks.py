"""Checks of whole runs and configurations, after those of their keys, and chains of runs.

In a chain, the base model of a run is the finished model of another one: ``model: run:NAME``.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath, PurePosixPath
from typing import Any, Final

from shardmake.config.methods import METHODS
from shardmake.config.models import OBJECTIVE_SECTIONS, Config, Push, Run, Section
from shardmake.config.objectives import OBJECTIVES, ObjectiveSpec
from shardmake.config.script_file import SCRIPT_VARIABLES, SERVICE_VARIABLES, check_variables
from shardmake.config.values import RUN
from shardmake.core.errors import nearest

PREFIX: Final = "run:"


def contradictions(section: Section) -> list[str]:
    """Return a line for each contradiction in a run or a configuration, whose keys are valid."""
    if isinstance(section, Run):
        idle = [f"{row.describe(section)}." for row in IDLE_KEYS if row.is_idle(section)]
        return idle or _raised(check_objective, section) or _raised(check_service, section)
    if not isinstance(section, Config):
        return []
    lines = [f"runs.{name}: {line}" for name, run in section.runs.items() for line in contradictions(run)]
    pushes = {name: run.push for name, run in section.runs.items() if run.push}
    return lines or _raised(check_distinct, pushes, key="runs: ") or _raised(check_chains, section.runs, section.sweeps)


def _raised(check: Callable[..., None], *values: Any, key: str = "") -> list[str]:
    try:
        check(*values)
    except ValueError as error:
        return [f"{key}{str(error).removesuffix('.')}."]
    return []


@dataclass(frozen=True)
class IdleKey:
    """A key or a section that some runs do not use, and which is refused there unless it has its default."""

    key: str
    works: Callable[[Run], bool]
    """Returns whether the key has an effect in a run."""
    beside: str
    """The setting with which it has none, after "has no effect with"; ``{run}`` is the run."""
    change: str = ""
    """The change that gives it an effect, as the start of a sentence."""
    switch: str = ""
    """A key of the run without which even default values are refused: who writes them asks for something else."""

    def is_idle(self, run: Run) -> bool:
        """Return whether ``run`` has the key and does not use it."""
        value: Any = run
        default: Any = None
        for part in self.key.split("."):
            if value is None or part not in value.model_fields_set:
                return False
            default = type(value).model_fields[part].get_default(call_default_factory=True)
            value = getattr(value, part)
        asked = value != default or (self.switch != "" and self.switch not in run.model_fields_set)
        return asked and not self.works(run)

    def describe(self, run: Run) -> str:
        """Return what to do about the key, without the full stop."""
        remove = f"{self.change}, or remove" if self.change else "Remove"
        return f"{self.key} has no effect with {self.beside.format(run=run)}. {remove} {self.key}"


def _pushes_to_hub(run: Run) -> bool:
    return run.push is not None and any(to.startswith("hub:") for to in run.push.destinations)


def _idle(
    keys: str, works: Callable[[Run], bool], beside: str, change: str = "", switch: str = ""
) -> Iterator[IdleKey]:
    return (IdleKey(key, works, beside, change, switch) for key in keys.split())


_ADAPTERS: Final = " or ".join(name for name, spec in METHODS.items() if spec.has_adapters)
_METHOD: Final = "method: {run.method}"
_OBJECTIVE: Final = "objective: {run.objective}"
IDLE_KEYS: Final = (
    *(
        IdleKey(name, lambda run, name=name: run.objective == name, _OBJECTIVE, f"Set objective: {name}")  # type: ignore[misc]
        for name in OBJECTIVE_SECTIONS
    ),
    *_idle("lora", lambda run: run.method_spec.has_adapters, _METHOD, f"Set method: {_ADAPTERS}", "method"),
    *_idle(
        "warmup_ratio", lambda run: run.scheduler != "constant" or run.warmup_ratio == 0, "scheduler: {run.scheduler}",
        "Set scheduler: constant_with_warmup",
    ),
    *_idle(
        "resume_from", lambda run: run_before(run.model) is None, "model: {run.model}", "Name that run's base model",
    ),
    *_idle("resume_from", lambda run: not run.lora.adapter, "lora.adapter: {run.lora.adapter}", "Remove lora.adapter"),
    *_idle(
        "profile memory_snapshot freeze torch_compile learning_rates lora.adapter lora.train_tokens",
        lambda run: run.script is None, "script: {run.script}", "Remove script",
    ),
    *_idle(
        "freeze", lambda run: not run.method_spec.has_adapters, f"{_METHOD}, which trains adapters alone",
        "Set method: full",
    ),
    *_idle(
        "checkpoints.early_stopping",
        lambda run: run.script is None and (run.eval_every_steps != "never" or run.checkpoints.keep_best),
        "a training that does not evaluate", "Set eval_every_steps: auto",
    ),
    *_idle(
        "final_checkpoint", lambda run: run.script is None and run.checkpoints.keep_best,
        "checkpoints.keep_best: false", "Set checkpoints.keep_best: true",
    ),
    *_idle("data.eval_fraction", lambda run: run.data.eval is None, "data.eval", "Remove data.eval"),
    *_idle(
        "evaluation.lm_eval_path evaluation.lm_eval_limit", lambda run: bool(run.evaluation.lm_eval),
        "an empty evaluation.lm_eval", "Name the tasks in evaluation.lm_eval",
    ),
    *_idle(
        "push.private push.revision push.pull_request", _pushes_to_hub, "a destination that is not on the hub",
        "Add hub:ORG/NAME to push.to",
    ),
    *_idle(
        "evaluation.prompts evaluation.max_new_tokens evaluation.lm_eval evaluation.losses push.samples",
        lambda run: not OBJECTIVES[run.objective].new_head, f"{_OBJECTIVE}, whose model does not generate text",
    ),
)  # fmt: skip
"""Keys that have no effect in some runs. Beside them are those that `_refused_by_trl` refuses with some values."""


def check_objective(run: Run) -> None:
    """Raise `ValueError` for settings that the run's objective refuses."""
    spec = OBJECTIVES[run.objective]
    for message in _refused_by_trl(run, spec) if spec.trl else ():
        raise ValueError(message)


def _refused_by_trl(run: Run, spec: ObjectiveSpec) -> Iterator[str]:
    """Yield a message for each setting of ``run`` that TRL's trainers do not take."""
    objective, targets = f"objective: {run.objective}", run.lora.targets
    if run.packing:
        yield f"packing: true cannot be combined with {objective}, whose examples are padded. Set packing: false"
    if run.script is not None:
        yield (
            f"script cannot be combined with {objective}, which is an objective of Shardmake's own training. Remove "
            "one of them"
        )
    if run.loss != "plain":
        yield f"loss: {run.loss} cannot be combined with {objective}, which has a loss of its own. Remove loss"
    for key in ("freeze", "learning_rates", "torch_compile", "tensor_parallel", "sequence_parallel", "expert_parallel"):
        if getattr(run, key) != type(run).model_fields[key].get_default(call_default_factory=True):
            yield f"{key} is not supported with {objective}. Remove it"
    if run.lora.adapter and spec.new_head:
        yield f"lora.adapter cannot be combined with {objective}, whose new head the adapter does not have. Remove it"
    if run.lora.adapter and run.reference == "model":
        yield (
            f"lora.adapter cannot be combined with {objective} and its reference: model, which is the base model "
            f"without the adapter. Set {run.objective}.reference: precomputed"
        )
    if run.method_spec.has_adapters and run.lora.dropout > 0:
        yield f"lora.dropout has no effect with {objective}, for which TRL turns dropout off. Remove it"
    if spec.head_adapter and run.method_spec.has_adapters and targets != "all-linear" and "lm_head" in targets:
        yield (
            f"lora.targets: an adapter of lm_head has no effect with {objective}, because {spec.head_adapter}. "
            "Remove lm_head"
        )
    if spec.compares_batch and run.micro_batch_size == 1:
        yield (
            f"micro_batch_size: 1 cannot be combined with {objective}, which compares the examples of a micro batch. "
            "Set 2 or more, or auto"
        )
    if run.data.loss_on == "all":
        yield f"data.loss_on: all has no effect with {objective}, which learns from answers. Remove loss_on"
    if run.data.turns != "auto":
        yield f"data.turns has no effect with {objective}, which learns an answer as one example. Remove turns"


def check_service(run: Run) -> None:
    """Raise a `ValueError` if the settings of a service contradict the run or each other."""
    if run.service is None and run.service_nodes is None:
        return
    if run.service is None:
        raise ValueError(
            "service_nodes need a service with a command. Add the section service, or remove service_nodes"
        )
    if run.service_nodes is None:
        raise ValueError("service needs nodes of its own. Set service_nodes: 1, or remove the section")
    if run.script is None:
        raise ValueError("service is for a script, which sends it requests. Set script, or remove the section")
    if run.nodes is None:
        raise ValueError(
            "service_nodes cannot be combined with a number of nodes that the plan chooses, because the service is "
            "made for a number of ranks. Set nodes"
        )
    check_variables("service.command", [run.service.command], (*SCRIPT_VARIABLES, *SERVICE_VARIABLES[:2]))


def check_distinct(pushes: Mapping[str, Push]) -> None:
    """Raise a `ValueError` if a destination is named twice, or is a folder inside another one.

    A push replaces what the last push left, so the second run would replace the model of the first.
    """
    named = [
        (_place(to, push), run, to)
        for run, push in pushes.items()
        for to in push.destinations
        if not (push.pull_request and to.startswith("hub:"))  # which replaces nothing
    ]
    order = {entry: number for number, entry in enumerate(named)}
    for pair in pairwise(sorted(named, key=lambda entry: (entry[0][0], entry[0][1].parts))):
        (_, path), (_, other_path) = places = [entry[0] for entry in pair]
        if places[0][0] == places[1][0] and other_path.is_relative_to(path):
            (_, first, to), (_, second, other) = sorted(pair, key=order.__getitem__)
            both = f"to {to!r} and" if first == second else f"to {to!r}, {second!r}"
            raise ValueError(
                f"run {first!r} pushes {both} to {other!r}. One would replace the other. Write {RUN} in push.to, such "
                f"as 'file:published/{RUN}', or name separate destinations"
            )


def _place(destination: str, push: Push) -> tuple[str, PurePosixPath]:
    """Return the kind of a destination and its normalized path; the hub ignores capitals and has branches."""
    kind, _, rest = destination.partition(":")
    if kind == "file":
        return kind, PurePosixPath(os.path.realpath(rest))
    if kind == "hub":
        return f"hub {push.revision or 'main'}", PurePosixPath(rest.lower())
    return kind.lower(), PurePosixPath(os.path.normpath(rest.lstrip("/")))


def run_before(model: str | None) -> str | None:
    """Return ``NAME`` if ``model``, or the path of an adapter, is ``run:NAME``, else None."""
    return model.removeprefix(PREFIX) if model and model.startswith(PREFIX) else None


def runs_before(run: Run) -> list[str]:
    """Return the runs that are finished before ``run`` is trained: that of its model, and that of its adapter."""
    return [name for name in map(run_before, (run.model, run.lora.adapter)) if name is not None]


def chain_of(name: str, runs: Mapping[str, Run]) -> list[str]:
    """Return the runs that lead to the run ``name``, each after those from which it starts, ``name`` last.

    The ``runs`` have passed `check_chains`.
    """
    before = [other for first in runs_before(runs[name]) for other in chain_of(first, runs)]
    return [*dict.fromkeys(before), name]


def with_first_model(name: str, runs: Mapping[str, Run]) -> Run:
    """Return the run ``name`` with the base model from which its chain starts: it has the same sizes and tokenizer."""
    first = runs[name]
    while (before := run_before(first.model)) is not None:
        first = runs[before]
    return runs[name].model_copy(update={"model": first.model, "revision": first.revision})


def check_chains(runs: Mapping[str, Run], sweeps: Mapping[str, Sequence[str]]) -> None:
    """Raise a `ValueError`, which starts with the key, for a ``run:NAME`` from which a run cannot start."""
    for name, run in runs.items():
        if (adapter := run_before(run.lora.adapter)) is not None:
            key = f"runs.{name}.lora.adapter"
            _check_known(key, adapter, runs, sweeps)
            _check_circle(key, name, {other: run_before(one.lora.adapter) for other, one in runs.items()})
            _check_same_adapters(key, run, adapter, runs[adapter])
        if (before := run_before(run.model)) is not None:
            _check_known(f"runs.{name}.model", before, runs, sweeps)
            _check_circle(f"runs.{name}.model", name, {other: run_before(one.model) for other, one in runs.items()})
            if run.revision is not None:
                raise ValueError(f"runs.{name}.revision: {run.model} has no revisions. Remove revision")
        elif (other := _run_with_folder(run.model, runs)) is not None and runs[other].script is None:
            raise ValueError(
                f"runs.{name}.model: {run.model!r} is the model of run {other!r}, and this run would not wait for it. "
                f"Write {PREFIX}{other}"
            )


_WHOLE: Final = {"embed_tokens", "lm_head"}
"""Targets with which PEFT saves whole weights beside the adapter."""


def _check_same_adapters(key: str, run: Run, before: str, other: Run) -> None:
    """Raise a `ValueError` unless both runs have the same base model, and adapters of the same shape."""
    starts = {"script": other.script, "resume_from": other.resume_from}
    starts["lora.train_tokens"] = ", ".join(other.lora.train_tokens)
    starts["lora.targets"] = ", ".join(sorted(_WHOLE.intersection(other.lora.targets)))
    if odd := [f"{name}: {value}" for name, value in starts.items() if value]:
        raise ValueError(
            f"{key}: the adapter of run {before!r} cannot be continued with its {'; '.join(odd)}. Start from its "
            f"merged model instead: model: {PREFIX}{before}"
        )
    ours, theirs = (
        {
            "adapters": one.method_spec.has_adapters,
            **one.model_dump(include={"model", "revision"}),
            **one.lora.model_dump(exclude={"adapter", "dropout"}),
        }
        for one in (run, other)
    )
    if different := [f"{name}: {value}, not {ours[name]}" for name, value in theirs.items() if value != ours[name]]:
        raise ValueError(
            f"{key}: run {before!r} trains another kind of adapter ({'; '.join(different)}). Set the same in both "
            f"runs, as with base: {before}"
        )


def _check_known(key: str, before: str, runs: Mapping[str, Run], sweeps: Mapping[str, Sequence[str]]) -> None:
    if before in sweeps:
        points = ", ".join(PREFIX + run for run in sweeps[before])
        raise ValueError(f"{key}: {before!r} is a sweep, which has several models. Name one of its runs: {points}")
    if before not in runs:
        known = ", ".join(PREFIX + run for run in runs if run != key.split(".")[1]) or "none besides this one"
        raise ValueError(f"{key}: run {before!r} does not exist.{nearest(before, runs)} The runs are: {known}")
    if OBJECTIVES[runs[before].objective].new_head:
        raise ValueError(
            f"{key}: run {before!r} trains a reward model, which has no head for text and cannot be a base model. Name "
            "a run of another objective"
        )


def _check_circle(key: str, name: str, befores: Mapping[str, str | None]) -> None:
    """Raise a `ValueError` if ``befores`` lead back to the run ``name``; another circle is its own runs' error."""
    chain = [name]
    while (before := befores[chain[0]]) in befores:
        assert before is not None, "None is not the name of a run"
        if before == name:
            circle = " -> ".join([before, *chain])
            what = key.rpartition(".")[2]
            raise ValueError(
                f"{key}: this run would start from its own {what} ({circle}). Name a base {what} in one of these runs"
            )
        if before in chain:
            return
        chain.insert(0, before)


def _run_with_folder(model: str, runs: Mapping[str, Run]) -> str | None:
    parts = PurePath(model).parts
    name = parts[1] if len(parts) == 3 and (parts[0], parts[2]) == ("runs", "model") else None
    return name if name in runs else None

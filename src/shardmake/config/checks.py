"""Checks of whole runs and configurations, after those of their keys, and chains of runs.

In a chain, the base model of a run is the finished model of another one: ``model: run:NAME``.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import PurePath, PurePosixPath
from typing import Any, Final

from shardmake.config.methods import METHODS
from shardmake.config.models import OBJECTIVE_SECTIONS, Config, Push, Run, Section
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.script_file import SCRIPT_VARIABLES, SERVICE_VARIABLES, variable_problems
from shardmake.config.values import RUN
from shardmake.core.errors import nearest

PREFIX: Final = "run:"


def contradictions(section: Section) -> list[str]:
    """Return a line for each contradiction in a run or a configuration, whose keys are valid."""
    if isinstance(section, Run):
        idle = [problem for row in IDLE_KEYS for problem in row.problems(section)]
        return idle or _first(_refused_by_trl(section), _service_problems(section))
    if not isinstance(section, Config):
        return []
    lines = [f"runs.{name}: {line}" for name, run in section.runs.items() for line in contradictions(run)]
    pushes = {name: run.push for name, run in section.runs.items() if run.push}
    return lines or _first(_equal_destinations(pushes), _chain_problems(section.runs, section.sweeps))


def _first(*checks: Iterator[str]) -> list[str]:
    return [f"{problem.removesuffix('.')}." for problem in islice(chain(*checks), 1)]


@dataclass(frozen=True)
class IdleKeys:
    """Keys or sections that some runs do not use, and that are refused there unless they have their defaults."""

    keys: str
    works: Callable[[Run], bool]
    """Returns whether the keys have an effect in a run."""
    beside: str
    """The setting with which they have none, after "has no effect with"; ``{run}`` is the run."""
    change: str = ""
    """The change that gives them an effect, as the start of a sentence."""
    switch: str = ""
    """A key of the run without which even default values are refused: who writes them asks for something else."""

    def problems(self, run: Run) -> Iterator[str]:
        """Yield what to do about each key that ``run`` has and does not use."""
        remove = f"{self.change}, or remove" if self.change else "Remove"
        for key in () if self.works(run) else self.keys.split():
            value: Any = run
            default: Any = None
            for part in key.split("."):
                if value is None or part not in value.model_fields_set:
                    break
                default = type(value).model_fields[part].get_default(call_default_factory=True)
                value = getattr(value, part)
            else:
                if value != default or (self.switch and self.switch not in run.model_fields_set):
                    yield f"{key} has no effect with {self.beside.format(run=run)}. {remove} {key}."


_ADAPTERS: Final = " or ".join(name for name, spec in METHODS.items() if spec.has_adapters)
_METHOD: Final = "method: {run.method}"
_OBJECTIVE: Final = "objective: {run.objective}"
IDLE_KEYS: Final = (
    *(
        IdleKeys(name, lambda run, name=name: run.objective == name, _OBJECTIVE, f"Set objective: {name}")  # type: ignore[misc]
        for name in OBJECTIVE_SECTIONS
    ),
    IdleKeys("lora", lambda run: run.method_spec.has_adapters, _METHOD, f"Set method: {_ADAPTERS}", "method"),
    IdleKeys(
        "warmup_ratio", lambda run: run.scheduler != "constant" or run.warmup_ratio == 0, "scheduler: {run.scheduler}",
        "Set scheduler: constant_with_warmup",
    ),
    IdleKeys(
        "resume_from", lambda run: run_before(run.model) is None, "model: {run.model}", "Name that run's base model",
    ),
    IdleKeys(
        "resume_from", lambda run: not run.lora.adapter, "lora.adapter: {run.lora.adapter}", "Remove lora.adapter",
    ),
    IdleKeys(
        "profile memory_snapshot freeze torch_compile learning_rates lora.adapter lora.train_tokens",
        lambda run: run.script is None, "script: {run.script}", "Remove script",
    ),
    IdleKeys(
        "freeze", lambda run: not run.method_spec.has_adapters, f"{_METHOD}, which trains adapters alone",
        "Set method: full",
    ),
    IdleKeys(
        "checkpoints.early_stopping",
        lambda run: run.script is None and (run.eval_every_steps != "never" or run.checkpoints.keep_best),
        "a training that does not evaluate", "Set eval_every_steps: auto",
    ),
    IdleKeys(
        "final_checkpoint", lambda run: run.script is None and run.checkpoints.keep_best,
        "checkpoints.keep_best: false", "Set checkpoints.keep_best: true",
    ),
    IdleKeys("data.eval_fraction", lambda run: run.data.eval is None, "data.eval", "Remove data.eval"),
    IdleKeys(
        "evaluation.lm_eval_path evaluation.lm_eval_limit", lambda run: bool(run.evaluation.lm_eval),
        "an empty evaluation.lm_eval", "Name the tasks in evaluation.lm_eval",
    ),
    IdleKeys(
        "push.private push.revision push.pull_request",
        lambda run: run.push is not None and any(to.startswith("hub:") for to in run.push.destinations),
        "a destination that is not on the hub", "Add hub:ORG/NAME to push.to",
    ),
    IdleKeys(
        "evaluation.prompts evaluation.max_new_tokens evaluation.lm_eval evaluation.losses push.samples",
        lambda run: not OBJECTIVES[run.objective].new_head, f"{_OBJECTIVE}, whose model does not generate text",
    ),
)  # fmt: skip
"""Keys that have no effect in some runs. Beside them are those that `_refused_by_trl` refuses with some values."""


def _refused_by_trl(run: Run) -> Iterator[str]:
    """Yield a message for each setting of ``run`` that TRL's trainers do not take, if one trains its objective."""
    spec, adapter, has_adapters = OBJECTIVES[run.objective], run.lora.adapter, run.method_spec.has_adapters
    objective = f"objective: {run.objective}"
    idle, excluded = f"has no effect with {objective}", f"cannot be combined with {objective}"
    own = ("freeze", "learning_rates", "torch_compile", "tensor_parallel", "sequence_parallel", "expert_parallel")
    fields = type(run).model_fields
    refused: dict[str, Any] = {
        f"packing: true {excluded}, whose examples are padded. Set packing: false": run.packing,
        f"script {excluded}, which is an objective of Shardmake's own training. Remove one of them": run.script,
        f"loss: {run.loss} {excluded}, which has a loss of its own. Remove loss": run.loss != "plain",
        **{
            f"{key} is not supported with {objective}. Remove it":
            getattr(run, key) != fields[key].get_default(call_default_factory=True) for key in own
        },
        f"lora.adapter {excluded}, whose new head the adapter does not have. Remove it": adapter and spec.new_head,
        f"lora.adapter {excluded} and its reference: model, which is the base model without the adapter. Set "
        f"{run.objective}.reference: precomputed": adapter and run.reference == "model",
        f"lora.dropout {idle}, for which TRL turns dropout off. Remove it": has_adapters and run.lora.dropout > 0,
        f"lora.targets: an adapter of lm_head {idle}, because {spec.head_adapter}. Remove lm_head":
        spec.head_adapter and has_adapters and "lm_head" in run.lora.targets,
        f"micro_batch_size: 1 {excluded}, which compares the examples of a micro batch. Set 2 or more, or auto":
        spec.compares_batch and run.micro_batch_size == 1,
        f"data.loss_on: all {idle}, which learns from answers. Remove loss_on": run.data.loss_on == "all",
        f"data.turns {idle}, which learns an answer as one example. Remove turns": run.data.turns != "auto",
    }  # fmt: skip
    yield from (message for message, is_refused in refused.items() if is_refused and spec.trl)


def _service_problems(run: Run) -> Iterator[str]:
    """Yield where the settings of a service contradict the run or each other."""
    if run.service is None:
        if run.service_nodes is not None:
            yield "service_nodes need a service with a command. Add the section service, or remove service_nodes"
        return
    if run.service_nodes is None:
        yield "service needs nodes of its own. Set service_nodes: 1, or remove the section"
    if run.script is None:
        yield "service is for a script, which sends it requests. Set script, or remove the section"
    if run.nodes is None:
        yield (
            "service_nodes cannot be combined with a number of nodes that the plan chooses, because the service is "
            "made for a number of ranks. Set nodes"
        )
    known = (*SCRIPT_VARIABLES, *SERVICE_VARIABLES[:2])
    yield from variable_problems("service.command", [run.service.command], known)


def _equal_destinations(pushes: Mapping[str, Push]) -> Iterator[str]:
    """Yield each destination that is named twice, or is a folder inside another one.

    A push replaces what the last push left, so the second run would replace the model of the first.
    """
    named = [
        (_place(to, push), run, to)
        for run, push in pushes.items()
        for to in push.destinations
        if not (push.pull_request and to.startswith("hub:"))  # which replaces nothing
    ]
    for pair in pairwise(sorted(named, key=lambda entry: (entry[0][0], entry[0][1].parts))):
        (kind, path), (other_kind, other_path) = (entry[0] for entry in pair)
        if kind == other_kind and other_path.is_relative_to(path):
            (_, first, to), (_, second, other) = sorted(pair, key=named.index)
            both = f"to {to!r} and" if first == second else f"to {to!r}, {second!r}"
            yield (
                f"runs: run {first!r} pushes {both} to {other!r}. One would replace the other. Write {RUN} in push.to, "
                f"such as 'file:published/{RUN}', or name separate destinations"
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

    The ``runs`` have passed `contradictions`.
    """
    before = [other for first in runs_before(runs[name]) for other in chain_of(first, runs)]
    return [*dict.fromkeys(before), name]


def with_first_model(name: str, runs: Mapping[str, Run]) -> Run:
    """Return the run ``name`` with the base model from which its chain starts: it has the same sizes and tokenizer."""
    first = runs[name]
    while (before := run_before(first.model)) is not None:
        first = runs[before]
    return runs[name].model_copy(update={"model": first.model, "revision": first.revision})


def _chain_problems(runs: Mapping[str, Run], sweeps: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield, after the key, why a run cannot start from a ``run:NAME``."""
    for name, run in runs.items():
        if (adapter := run_before(run.lora.adapter)) is not None:
            key = f"runs.{name}.lora.adapter"
            yield from _unknown(key, adapter, runs, sweeps)
            yield from _circle(key, name, {other: run_before(one.lora.adapter) for other, one in runs.items()})
            yield from _other_adapters(key, run, adapter, runs[adapter])
        if (before := run_before(run.model)) is not None:
            key = f"runs.{name}.model"
            yield from _unknown(key, before, runs, sweeps)
            yield from _circle(key, name, {other: run_before(one.model) for other, one in runs.items()})
            if run.revision is not None:
                yield f"runs.{name}.revision: {run.model} has no revisions. Remove revision"
        elif (other := _run_with_folder(run.model, runs)) is not None and runs[other].script is None:
            yield (
                f"runs.{name}.model: {run.model!r} is the model of run {other!r}, and this run would not wait for it. "
                f"Write {PREFIX}{other}"
            )


_WHOLE: Final = {"embed_tokens", "lm_head"}
"""Targets with which PEFT saves whole weights beside the adapter."""


def _other_adapters(key: str, run: Run, before: str, other: Run) -> Iterator[str]:
    """Yield how the base models or the shapes of the adapters of both runs differ."""
    starts = {"script": other.script, "resume_from": other.resume_from}
    starts["lora.train_tokens"] = ", ".join(other.lora.train_tokens)
    starts["lora.targets"] = ", ".join(sorted(_WHOLE.intersection(other.lora.targets)))
    if odd := [f"{name}: {value}" for name, value in starts.items() if value]:
        yield (
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
        yield (
            f"{key}: run {before!r} trains another kind of adapter ({'; '.join(different)}). Set the same in both "
            f"runs, as with base: {before}"
        )


def _unknown(key: str, before: str, runs: Mapping[str, Run], sweeps: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield why ``before`` is not a run with a model to start from."""
    if before in sweeps:
        points = ", ".join(PREFIX + run for run in sweeps[before])
        yield f"{key}: {before!r} is a sweep, which has several models. Name one of its runs: {points}"
    elif before not in runs:
        known = ", ".join(PREFIX + run for run in runs if run != key.split(".")[1]) or "none besides this one"
        yield f"{key}: run {before!r} does not exist.{nearest(before, runs)} The runs are: {known}"
    elif OBJECTIVES[runs[before].objective].new_head:
        yield (
            f"{key}: run {before!r} trains a reward model, which has no head for text and cannot be a base model. Name "
            "a run of another objective"
        )


def _circle(key: str, name: str, befores: Mapping[str, str | None]) -> Iterator[str]:
    """Yield the circle in which ``befores`` lead back to the run ``name``; another one is its own runs' error."""
    members, before = [name], befores[name]
    while before is not None and before in befores and before not in members:
        members.insert(0, before)
        before = befores[before]
    if before == name:
        circle, what = " -> ".join([name, *members]), key.rpartition(".")[2]
        yield f"{key}: this run would start from its own {what} ({circle}). Name a base {what} in one of these runs"


def _run_with_folder(model: str, runs: Mapping[str, Run]) -> str | None:
    parts = PurePath(model).parts
    name = parts[1] if len(parts) == 3 and (parts[0], parts[2]) == ("runs", "model") else None
    return name if name in runs else None

"""Chains of runs: a run whose base model is the finished model of another run, ``model: run:NAME``."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from shardmake.config.objectives import OBJECTIVES
from shardmake.core.errors import nearest

if TYPE_CHECKING:
    from shardmake.config.models import Run

PREFIX: Final = "run:"


def run_before(model: str) -> str | None:
    """Return ``NAME`` if ``model`` is ``run:NAME``, else None."""
    return model.removeprefix(PREFIX) if model.startswith(PREFIX) else None


def chain_of(name: str, runs: Mapping[str, "Run"]) -> list[str]:
    """Return the runs that lead to the run ``name``, the one with a base model of its own first, ``name`` last.

    The models of ``runs`` have passed `check_chains`.
    """
    chain = [name]
    while (before := run_before(runs[chain[0]].model)) is not None:
        chain.insert(0, before)
    return chain


def with_first_model(name: str, runs: Mapping[str, "Run"]) -> "Run":
    """Return the run ``name`` with the base model from which its chain starts: it has the same sizes and tokenizer."""
    first = runs[chain_of(name, runs)[0]]
    return runs[name].model_copy(update={"model": first.model, "revision": first.revision})


def check_chains(runs: Mapping[str, "Run"], sweeps: Mapping[str, Sequence[str]]) -> None:
    """Raise a `ValueError`, which starts with the key, for a ``run:NAME`` that cannot be a base model."""
    for name, run in runs.items():
        if (before := run_before(run.model)) is not None:
            _check_known(name, before, runs, sweeps)
            _check_circle(name, runs)
            if run.revision is not None:
                raise ValueError(f"runs.{name}.revision: {run.model} has no revisions. Remove revision")
        elif (other := _run_with_folder(run.model, runs)) is not None and runs[other].script is None:
            raise ValueError(
                f"runs.{name}.model: {run.model!r} is the model of run {other!r}, and this run would not wait for it. "
                f"Write {PREFIX}{other}"
            )


def _check_known(name: str, before: str, runs: Mapping[str, "Run"], sweeps: Mapping[str, Sequence[str]]) -> None:
    key = f"runs.{name}.model"
    if before in sweeps:
        points = ", ".join(PREFIX + run for run in sweeps[before])
        raise ValueError(f"{key}: {before!r} is a sweep, which has several models. Name one of its runs: {points}")
    if before not in runs:
        known = ", ".join(PREFIX + run for run in runs if run != name) or "none besides this one"
        raise ValueError(f"{key}: run {before!r} does not exist.{nearest(before, runs)} The runs are: {known}")
    if OBJECTIVES[runs[before].objective].new_head:
        raise ValueError(
            f"{key}: run {before!r} trains a reward model, which has no head for text and cannot be a base model. Name "
            "a run of another objective"
        )


def _check_circle(name: str, runs: Mapping[str, "Run"]) -> None:
    """Raise a `ValueError` if the models lead back to the run ``name``; another circle is reported for its own runs."""
    chain = [name]
    while (before := run_before(runs[chain[0]].model)) in runs:
        assert before is not None, "None is not the name of a run"
        if before == name:
            circle = " -> ".join([before, *chain])
            raise ValueError(
                f"runs.{name}.model: this run would start from its own model ({circle}). Name a base model in one of "
                "these runs"
            )
        if before in chain:
            return
        chain.insert(0, before)


def _run_with_folder(model: str, runs: Mapping[str, "Run"]) -> str | None:
    """Return the run whose final model the path ``model`` names, if it is one of ``runs``."""
    parts = PurePath(model).parts
    name = parts[1] if len(parts) == 3 and (parts[0], parts[2]) == ("runs", "model") else None
    return name if name in runs else None

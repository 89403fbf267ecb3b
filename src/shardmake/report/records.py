"""Everything that the report and the model card read from a run's folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from shardmake.config.checks import run_before
from shardmake.config.models import EvalSource, Run
from shardmake.core.hub import is_hub_id
from shardmake.report.flops import utilization
from shardmake.report.history import TrainingHistory, attempt_of, read_history
from shardmake.run.attempt import Attempt
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan
from shardmake.run.receipts import DataReceipt, MergeReceipt, TrainingReceipt
from shardmake.run.sources import Sources, read_sources
from shardmake.run.training_settings import TrainingSettings


@dataclass(frozen=True)
class Records:
    """The records of a run that was trained, merged and evaluated."""

    name: str
    run: Run
    planned: Plan
    used: Plan
    """The plan of the last attempt: the planned choice, or one of its fallbacks."""
    settings: TrainingSettings
    """The rendered settings of the last attempt."""
    attempt: Attempt | None
    """The last attempt; None if its folder was removed."""
    training: TrainingReceipt
    history: TrainingHistory
    utilization: tuple[list[int], list[float]] | None
    memory: MemoryEstimates
    data: DataReceipt
    sources: Sources | None
    merge: MergeReceipt
    evaluation: EvaluationResult

    @classmethod
    def read(cls, run: Run, rundir: RunDir) -> Self:
        """Read the records; raise `ShardmakeError` if a required stage has not run."""
        evaluation, training = EvaluationResult.read(rundir.evaluation), TrainingReceipt.read(rundir.train_receipt)
        planned, history = Plan.read(rundir.plan), read_history(rundir)
        last = attempt_of(rundir, training.attempts)
        return cls(
            name=rundir.name, run=run, planned=planned, used=Plan.read_if_exists(last.plan) or planned,
            settings=TrainingSettings.read_if_exists(last.training) or TrainingSettings.read(rundir.training),
            attempt=Attempt.read_if_exists(last.settings), training=training, history=history,
            utilization=utilization(run, rundir, history), memory=MemoryEstimates.read(rundir.memory),
            data=DataReceipt.read(rundir.data_receipt), sources=read_sources(rundir),
            merge=MergeReceipt.read(rundir.model_receipt), evaluation=evaluation,
        )  # fmt: skip

    @property
    def is_script(self) -> bool:
        """Return whether a user's script trained."""
        return self.run.script is not None

    @property
    def planned_steps(self) -> int | None:
        """Return the steps of which the training made only some (`checkpoints.early_stopping`), else None."""
        found, steps = self.training.learning, self.training.steps
        return found.steps if found is not None and steps is not None and steps < found.steps else None

    @property
    def on_cpu(self) -> bool:
        """Return whether the ranks ran without GPUs."""
        return self.attempt is not None and self.attempt.accelerator == "cpu"

    @property
    def on_gpus(self) -> bool:
        """Return whether the ranks ran on GPUs; neither is known if the last attempt's folder was removed."""
        return self.attempt is not None and not self.on_cpu

    @property
    def hub_model(self) -> str | None:
        """Return the model of the hub (`org/name`) from which training started, also over the models of other runs.

        None if that model came from another place, by the record of the fetch.
        """
        if self.sources is None:
            return self.run.model if is_hub_id(self.run.model) else None
        first = self.sources.model.first
        return first.name if first.commit is not None else None

    @property
    def base(self) -> str:
        """Return the public name of the base model, with the runs of Shardmake that trained it before this one."""
        return public_name(self.sources.model.first.name if self.sources else self.run.model) + self.runs_before

    @property
    def runs_before(self) -> str:
        """Return the runs whose models led from the first base model to this run, as the rest of its name."""
        names: list[str] = []
        model = self.sources.model if self.sources else None
        while model is not None and model.origin is not None:
            names.insert(0, run_before(model.name) or Path(str(self.run.resume_from)).name)
            model = model.origin
        return f" after the {'run' if len(names) == 1 else 'runs'} {' and '.join(names)}" if names else ""

    @property
    def hub_datasets(self) -> list[str]:
        """Return the training data that came from the hub (`org/name`), by the record of the fetch."""
        names = [one.source.partition(":")[0] for one in self.run.data.sources]
        if self.sources is None:
            return [name for name in names if is_hub_id(name)]
        return [name for name, source in zip(names, self.sources.train, strict=True) if source.commit is not None]


def public_name(source: str) -> str:
    """Return the public name of ``source``: a complete hub id (``org/name:split``), or the last part of a path."""
    return source if is_hub_id(source.partition(":")[0]) else Path(source).name


def public_names(sources: Sequence[EvalSource]) -> str:
    """Return the public names of all ``sources`` of examples."""
    return ", ".join(public_name(one.source) for one in sources)


_ROOT: Final = r"(?:~|\$\{?[A-Za-z_]\w*\}?|\.\.(?=/)|/(?!/))"
"""The start of a path outside the checkout; a URL and a path relative to the checkout do not start like this."""
_SLASHES: Final = r"(?:(?<=file:)//)?"
_WHOLE: Final = re.compile(rf"((?:--?[\w-]+=)?(?:file:)?){_SLASHES}{_ROOT}[^\n]*/([^/\n]+/?)")
_QUOTED: Final = re.compile(rf"(?<=([\"'])){_ROOT}[^\"'\n]*/([^\"'/\n]+)(?=\1)")
_WORD: Final = re.compile(rf"(?<![\w./-]){_SLASHES}{_ROOT}[^\s:\"']*/([^\s:/\"']+)")


def hide_folders(value: str) -> str:
    """Return ``value``, the whole of which may be a path with spaces, without the folders of absolute paths.

    Before such a path may stand ``file:`` or the name of an option.
    """
    whole = _WHOLE.fullmatch(value)
    return f"{whole[1]}.../{whole[2]}" if whole else hide_folders_in_text(value)


_KEY_LIKE: Final = re.compile(r"(?<![\w/.-])(?=\w*\d)(?=\w*[A-Za-z])[\w+=]{32,}(?![\w/.-])")


def hide_keys(text: str) -> str:
    """Return ``text``, an argument or a prompt, with three dots for each word that is random enough for a key."""
    return _KEY_LIKE.sub("...", text)


def hide_folders_in_text(text: str) -> str:
    """Return a command or a sentence without the folders of absolute paths; one with spaces must be in quotes."""
    return _WORD.sub(r".../\1", _QUOTED.sub(r".../\2", text))

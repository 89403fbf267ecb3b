"""The comparison of several runs: settings that differ, and results, of which the best are marked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final, Literal, cast

from shardmake.config.effects import STAGES, result_keys
from shardmake.config.models import Cluster, Run
from shardmake.core.atomic import digest, write_text
from shardmake.core.secrets import redact
from shardmake.core.units import format_bytes
from shardmake.report import figures
from shardmake.report.figures import Memory
from shardmake.report.history import TrainingHistory, attempt_of, hours_name, read_history
from shardmake.report.plots import find_memory
from shardmake.run.attempt import Attempt
from shardmake.run.evaluation import EvaluationResult, format_perplexity
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan
from shardmake.run.receipts import DataReceipt, TrainingReceipt, content_of
from shardmake.run.settings import current, read_settings

Best = Literal["lowest", "highest"]
_TASK_METRICS: Final[Mapping[str, Best]] = {
    **dict.fromkeys(("acc", "acc_norm", "exact_match", "f1", "mcc"), "highest"),
    **dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"), "lowest"),
}
"""Metrics of lm_eval of which it is known which value is better; no value of another one is marked."""


@dataclass(frozen=True)
class ComparedRun:
    """The records of one run. A run that has not finished a stage lacks those of the stage."""

    name: str
    settings: Mapping[str, str]
    """Settings that the training reads: those that it ran with, or else those of the configuration."""
    plan: Plan | None
    """The plan of the last attempt, or else the run's plan."""
    attempt: Attempt | None
    history: TrainingHistory
    training: TrainingReceipt | None
    data: DataReceipt | None
    evaluation: EvaluationResult | None
    memory: Memory | None
    """None for a run on CPUs."""
    is_script: bool
    """A program of the user trains, and counts its tokens itself."""

    @classmethod
    def read(cls, run: Run, cluster: Cluster, rundir: RunDir) -> "ComparedRun":
        """Read the records of a run; raise `ShardmakeError` if one of them cannot be read."""
        history, training = read_history(rundir), TrainingReceipt.read_if_exists(rundir.train_receipt)
        last = attempt_of(rundir, history.spans[-1].number) if history.spans else None
        attempt = Attempt.read_if_exists(last.settings) if last else None
        planned = Plan.read_if_exists(rundir.plan)
        used = (Plan.read_if_exists(last.plan) if last else None) or planned
        estimates = MemoryEstimates.read_if_exists(rundir.memory)
        memory = None
        if planned and used and estimates and not cluster.is_cpu:
            memory = find_memory(estimates, planned.choice, used.choice, history)
        now = current("train", run, cluster)
        ran_with = (read_settings("train", rundir) or read_settings("render", rundir) or now).values
        return cls(
            name=rundir.name, settings={key: ran_with.get(key, value) for key, value in now.values.items()}, plan=used,
            attempt=attempt, history=history, training=training, data=DataReceipt.read_if_exists(rundir.data_receipt),
            evaluation=EvaluationResult.read_if_exists(rundir.evaluation), memory=memory,
            is_script=run.script is not None,
        )  # fmt: skip

    @property
    def evaluated_on(self) -> str:
        """Digest of what determines the evaluated examples and their tokens, in any order; empty without data.

        Held-out examples of the training data are chosen by the seed, so their files are compared.
        """
        if self.data is None:
            return ""
        separate = {key: source for key, source in self.data.sources.items() if key.partition("/")[0] == "eval"}
        if not separate:
            return digest([self.data.tokenizer, *(file.sha256 for file in self.data.eval.files)])
        ordered = {"eval_fraction", "order", "packing", "seed", "mix"}
        settings = self.data.settings.model_dump(exclude=ordered)
        layout = [self.data.data_format, self.data.columns, self.data.loss_on_assistant]
        return digest([self.data.tokenizer, content_of({"sources": separate}), settings, layout])


@dataclass(frozen=True)
class ResultColumn:
    """One result of every run, None where it is not known; memory is in bytes."""

    name: str
    values: tuple[float | None, ...]
    text: Callable[[float], str]
    best: int | None
    """Index of the run with the best value; None if no value is better."""

    def cells(self) -> list[str]:
        """Return the values as text, the best one with an asterisk."""
        texts = ["" if value is None else self.text(value) for value in self.values]
        return [f"{text} *" if index == self.best else text for index, text in enumerate(texts)]


@dataclass(frozen=True)
class Comparison:
    """Several runs, side by side."""

    runs: Sequence[ComparedRun]
    settings: Mapping[str, Sequence[str]]
    """Settings that differ: the value of each run, by key."""
    results: Sequence[ResultColumn]
    notes: Sequence[str]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and a row for each run, as text."""
        columns = {
            "run": [run.name for run in self.runs],
            **{column.name: column.cells() for column in self.results},
            **{key: list(values) for key, values in self.settings.items()},
        }
        return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON data; a result that is not known is null."""
        runs = [
            {
                "run": run.name,
                "settings": {key: values[index] for key, values in self.settings.items()},
                "results": {column.name: column.values[index] for column in self.results},
                "best": [column.name for column in self.results if column.best == index],
            }
            for index, run in enumerate(self.runs)
        ]
        return {"runs": runs, "notes": list(self.notes)}


def compare(runs: Mapping[str, Run], cluster: Cluster, folder: Path) -> Comparison:
    """Compare runs whose folders are below ``folder``. Raises `ShardmakeError` if a record cannot be read."""
    found = [ComparedRun.read(run, cluster, RunDir(folder / name)) for name, run in runs.items()]
    return Comparison(found, differing_settings(found), _results(found), _notes(found))


Column = tuple[Callable[[ComparedRun], float | None], Callable[[float], str], Best | None]
"""How a value is read and shown, and which one is better."""


def _columns(runs: Sequence[ComparedRun]) -> dict[str, Column]:
    """Return the columns by name; no value of evaluations of different examples is better than another."""
    on_gpus = all(run.attempt is None or run.attempt.accelerator != "cpu" for run in runs)
    evaluations = [run.evaluation for run in runs if run.evaluation]
    is_same = _same_evaluation_data(runs)
    low, high = cast(tuple[Best | None, Best | None], ("lowest", "highest") if is_same else (None, None))
    return {
        "steps": (partial(_last, "step"), _WHOLE, None),
        "tokens": (partial(_known, "training.tokens"), _WHOLE, None),
        "training loss": (partial(_last, "loss"), _EXACT, None),
        "base loss": (partial(_known, "evaluation.base.loss"), _EXACT, None),
        "evaluation loss": (partial(_known, "evaluation.tuned.loss"), _EXACT, low),
        "perplexity": (partial(_known, "evaluation.tuned.perplexity"), format_perplexity, low),
        **{
            f"{name}, %": (partial(_share, name), "{:.1f}".format, high)
            for name in dict.fromkeys(name for found in evaluations for name in found.shares)
        },
        **{
            f"{task} {metric}": (partial(_task, task, metric), _EXACT, _TASK_METRICS.get(metric.partition(",")[0]))
            for task, metric in dict.fromkeys((one.task, one.metric) for found in evaluations for one in found.tasks)
        },
        "tokens/s": (partial(_known, "history.speed"), _WHOLE, "highest"),
        hours_name(on_gpus=on_gpus): (_hours, "{:,.2f}".format, "lowest"),
        "memory predicted": (partial(_known, "memory.predicted"), _size, None),
        "memory measured": (partial(_known, "memory.measured"), _size, "lowest"),
    }


_WHOLE: Final = "{:,.0f}".format
_EXACT: Final = "{:.4f}".format


def _size(size: float) -> str:
    return format_bytes(int(size))


def _known(path: str, run: ComparedRun) -> float | None:
    """Return the value at a dotted path; None if a record on the way is missing."""
    return reduce(lambda found, name: getattr(found, name, None), path.split("."), cast(Any, run))


def _last(key: str, run: ComparedRun) -> float | None:
    return next(reversed(run.history.series(key)[1]), None)


def _hours(run: ComparedRun) -> float | None:
    return run.history.device_hours if run.history.spans else None


def _share(name: str, run: ComparedRun) -> float | None:
    share = run.evaluation.shares[name] if run.evaluation else None
    return None if share is None else 100 * share


def _task(task: str, metric: str, run: ComparedRun) -> float | None:
    scores = run.evaluation.tasks if run.evaluation else []
    return next((score.tuned for score in scores if (score.task, score.metric) == (task, metric)), None)


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all runs, by key: those without effect on a result are last."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    values = {key: [run.settings.get(key, "") for run in runs] for key in keys}
    matter = {key for stage in STAGES for key in result_keys(stage)}
    return {key: values[key] for key in sorted(values, key=lambda key: key not in matter) if len(set(values[key])) > 1}


def _results(runs: Sequence[ComparedRun]) -> list[ResultColumn]:
    """Return the results that at least one run has.

    Only runs that have finished their training can be the best, and not if all are equal.
    """
    columns = []
    for name, (read, text, best) in _columns(runs).items():
        values = tuple(map(read, runs))
        known = {index: value for index, value in enumerate(values) if value is not None}
        finished = {index: value for index, value in known.items() if runs[index].training}
        marked = None
        if best and len(set(finished.values())) > 1:
            marked = (min if best == "lowest" else max)(finished, key=finished.__getitem__)
        columns += [ResultColumn(name, values, text, marked)] if known else []
    return columns


def _same_evaluation_data(runs: Sequence[ComparedRun]) -> bool:
    return len({(run.evaluated_on, run.evaluation.tokens) for run in runs if run.evaluation}) <= 1


def _notes(runs: Sequence[ComparedRun]) -> list[str]:
    notes = []
    if unfinished := [run.name for run in runs if run.training is None]:
        notes.append(f"Not trained to the end, so never marked as the best: {', '.join(unfinished)}.")
    if len({run.settings["objective"] for run in runs}) > 1:
        notes.append("The runs have different objectives, so their training losses cannot be compared.")
    counting = [run for run in runs if run.training and run.training.tokens is not None]
    scripts = [run.name for run in counting if run.is_script]
    if 0 < len(scripts) < len(counting):
        notes.append(
            f"Tokens and tokens/s of {', '.join(scripts)} are as the script counted them, which may include padding; "
            "tokens of the other runs are those of their data, without padding."
        )
    if not _same_evaluation_data(runs):
        counted = ", ".join(f"{run.evaluation.tokens:,} ({run.name})" for run in runs if run.evaluation)
        notes.append(
            "The evaluations of these runs count other tokens: other examples, another tokenizer or chat template, "
            f"another sequence length or other learned tokens. Counted: {counted}. So no evaluation loss is marked as "
            "the best. With `data.eval`, runs of other seeds have the same examples."
        )
    return notes


TEMPLATE: Final = Path(__file__).with_name("compare.html.jinja")


def write_comparison(comparison: Comparison, title: str, page: Path) -> None:
    """Write ``page`` with the table of the comparison, and the losses over tokens of the runs that logged both."""
    from jinja2 import Environment, StrictUndefined

    histories = {run.name: run.history for run in comparison.runs}
    drawn = {name: history for name, history in histories.items() if history.series("loss", "tokens")[0]}
    header, rows = comparison.table()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(TEMPLATE.read_text()).render(
        title=title, settings=list(comparison.settings), results=len(comparison.results), header=header, rows=rows,
        losses=figures.as_svg("losses", figures.losses(drawn)) if drawn else "",
        missing=[name for name in histories if name not in drawn], notes=comparison.notes,
    )  # fmt: skip
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, redact(text))

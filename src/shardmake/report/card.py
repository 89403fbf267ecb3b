"""The model card: description, training, evaluation, usage.

A card contains only facts about the model: no paths, no host or user names, nothing from the environment. The text
depends only on the run's receipts, so the same run gives the same card.
"""

import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from shardmake.config.models import Run
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.hub import is_hub_id
from shardmake.report.figures import length_name
from shardmake.report.flops import utilization
from shardmake.report.history import TrainingHistory, attempt_of, read_history
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.receipts import DataReceipt, TrainingReceipt
from shardmake.run.sources import PinnedSource, Sources, localize, read_sources

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

TEMPLATE = Path(__file__).with_name("card.md.jinja")
PLOTS = {
    "loss": "Loss by optimizer step, stitched over the attempts",
    "optimizer": "Learning rate and gradient norm",
    "speed": "Tokens per second and MFU",
    "memory": "Memory, predicted against measured",
    "by-length": "Evaluation loss by the length of the example",
}
_PLACEHOLDER = "THIS_REPOSITORY_OR_FOLDER"
_WEIGHTS = {"keep": "the training's own"}
_MERGED = "merged into the base model"
_METHODS = {"full": "full fine-tuning", "lora": f"LoRA, {_MERGED}", "qlora": f"QLoRA, {_MERGED}"}


def render_card(run: Run, rundir: RunDir) -> str:
    """Return the card of a finished, evaluated run, as Markdown with a YAML header.

    Raises `ShardmakeError` if a required stage has not run.
    """
    from huggingface_hub import ModelCard

    evaluation = EvaluationResult.read(rundir.evaluation)
    training = TrainingReceipt.read(rundir.train_receipt)
    sources = read_sources(rundir)
    card = ModelCard.from_template(
        _metadata(run, rundir, evaluation),
        template_path=str(TEMPLATE),
        name=rundir.name,
        base=public_name(run.model),
        facts=_facts(run, rundir, sources, training),
        evaluation=evaluation,
        samples=[{key: _fenced(text) for key, text in sample} for sample in evaluation.samples],
        versions=training.versions,
        plots=PLOTS,
        place=_place(run),
        buckets=list(zip(evaluation.base.by_length, evaluation.tuned.by_length, strict=True)),
        length_name=length_name,
    )
    return str(card)


def _metadata(run: Run, rundir: RunDir, evaluation: EvaluationResult) -> "ModelCardData":
    from huggingface_hub import EvalResult, ModelCardData

    repository = run.data.train.partition(":")[0]  # of org/name:split
    data = public_name(run.data.train)
    perplexity = EvalResult(
        task_type="text-generation",
        dataset_type=data,
        dataset_name=f"{data} (evaluation split)",
        metric_type="perplexity",
        metric_value=round(evaluation.tuned.perplexity, 4),
    )
    return ModelCardData(
        base_model=run.model if is_hub_id(run.model) else None,
        datasets=[repository] if is_hub_id(repository) else None,
        library_name="transformers",
        license=_base_license(Path(localize(run, rundir).model)),
        model_name=rundir.name,
        pipeline_tag="text-generation",
        tags=["shardmake"],
        eval_results=[perplexity],
    )


def _place(run: Run) -> str:
    """Return the argument of `from_pretrained`: the hub name, if the model is pushed there."""
    names = [to.removeprefix("hub:") for to in (run.push.destinations if run.push else []) if to.startswith("hub:")]
    return names[0] if names else _PLACEHOLDER


def _base_license(model: Path) -> str | None:
    """Return the licence from the base model's card."""
    from huggingface_hub import ModelCard

    card = model / "README.md"
    return ModelCard.load(card, ignore_metadata_errors=True).data.license if card.is_file() else None


def _facts(run: Run, rundir: RunDir, sources: Sources | None, training: TrainingReceipt) -> dict[str, str]:
    """Return the rows of the table "Training"."""
    plan, history = Plan.read(rundir.plan), read_history(rundir)
    choice, used = plan.choice, utilization(run, rundir, history)
    data = DataReceipt.read_if_exists(rundir.data_receipt)
    loss = "not logged" if training.loss is None else f"{training.loss:.4f}"
    return {
        "Base model": _named(run.model, _commit(sources.model if sources else None, run.revision)),
        "Data": _named(run.data.train, _commit(sources.train if sources else None, run.data.revision)),
        **({"Data format": data.describe_format()} if data else {}),
        "Objective": OBJECTIVES[run.objective].label,
        "Method": _METHODS[run.method],
        "Strategy": f"{choice.strategy}. {plan.reason}",
        "Hardware": _hardware(training.world_size, history, rundir),
        "Ranks": f"{training.world_size} ({choice.nodes} x {choice.processes_per_node})",
        "Precision": f"{choice.precision} in training, {_WEIGHTS.get(run.dtype, run.dtype)} in these files",
        "Sequence length": f"{run.sequence_length} tokens{', packed' if run.packing else ''}",
        "Global batch": f"{run.global_batch_size} sequences",
        **_course(run, training),
        "Training loss at the end": loss,
        **({"MFU": f"{statistics.median(used.shares):.1%} of the dense peak"} if used else {}),
        "Time": f"{history.hours:.2f} h, {history.device_hours:.2f} device hours, {training.attempts} attempt(s)",
    }


def _hardware(world_size: int, history: TrainingHistory, rundir: RunDir) -> str:
    """Return the devices of the last attempt, named as in the cluster file."""
    last = attempt_of(rundir, history.spans[-1].number).read()
    kind = "CPU ranks" if last.accelerator == "cpu" else last.accelerator.upper()
    return f"{world_size} x {kind} on {last.nodes} node(s)"


def _course(run: Run, training: TrainingReceipt) -> dict[str, str]:
    """Return steps and learning rate; for a script only what it logged."""
    if run.script:
        steps = {} if training.steps is None else {"Steps": f"{training.steps} optimizer steps"}
        return {"Trained by": f"`{Path(run.script).name}`", **steps}
    return {
        "Steps": f"{training.steps} optimizer steps, {training.tokens:,} tokens",
        "Learning rate": f"{run.learning_rate:g}, {run.scheduler}",
    }


def _commit(source: PinnedSource | None, revision: str | None) -> str | None:
    """Return the fetched commit, or else the configured revision."""
    return source.commit if source and source.commit else revision


def _named(source: str, revision: str | None) -> str:
    return public_name(source) + (f" at `{revision}`" if revision else "")


def public_name(source: str) -> str:
    """Return the public name of ``source``: a complete hub id (``org/name:split``), or the last part of a path."""
    return source if is_hub_id(source.partition(":")[0]) else Path(source).name


def _fenced(text: str) -> str:
    """Return ``text`` as a code block with a fence longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"

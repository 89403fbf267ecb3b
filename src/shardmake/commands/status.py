"""The progress and the results of a run, from the files in its folder."""

from shardmake.config.models import Run
from shardmake.core.units import plural
from shardmake.run.attempt import SubmittedJob
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir
from shardmake.run.receipts import TrainingReceipt


def describe(run: Run, rundir: RunDir) -> str:
    """Return each stage, then the results, then the files to look at next."""
    stages = {
        "fetch": rundir.weights_receipt,
        "plan": rundir.plan,
        "render": rundir.training,
        "data": rundir.data_receipt,
        "train": rundir.train_receipt,
        "consolidate": rundir.model_receipt,
        "evaluate": rundir.evaluation,
        **({"push": rundir.push_receipt} if run.push else {}),
    }
    lines = [f"{rundir.name} in {rundir.root}"]
    lines += [f"  {'done' if path.exists() else 'open':<5} {stage}" for stage, path in stages.items()]
    if rundir.train_receipt.exists():
        lines += _training(TrainingReceipt.read(rundir.train_receipt))
    elif rundir.job.exists():
        lines.append(f"\nTraining is under way: job {SubmittedJob.read(rundir.job).id}.")
    if rundir.evaluation.exists():
        lines += _evaluation(EvaluationResult.read(rundir.evaluation))
    return "\n".join([*lines, *_where_next(run, rundir)])


def _training(receipt: TrainingReceipt) -> list[str]:
    length = "" if receipt.steps is None else f" {receipt.steps:,} steps"
    length += "" if receipt.tokens is None else f", {receipt.tokens:,} tokens,"
    ranks, attempts = plural(receipt.world_size, "rank"), plural(receipt.attempts, "attempt")
    return [f"\nTrained{length} with {receipt.strategy} on {ranks} in {attempts}."]


def _evaluation(evaluation: EvaluationResult) -> list[str]:
    base, tuned = evaluation.base, evaluation.tuned
    lines = [
        f"Evaluation loss {base.loss:.3f} -> {tuned.loss:.3f}, "
        f"perplexity {base.perplexity:,.1f} -> {tuned.perplexity:,.1f}."
    ]
    if evaluation.samples:
        sample = evaluation.samples[0]
        lines += ["\nPrompt:", _indent(sample.prompt), "The tuned model:", _indent(sample.tuned)]
    return lines


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def _where_next(run: Run, rundir: RunDir) -> list[str]:
    places = {
        "plan and its reasons": rundir.plan,
        "loss and speed, by step": rundir.metrics,
        "the model": rundir.model_receipt.parent,
        "evaluation": rundir.evaluation,
        "report": rundir.report,
    }
    lines = [f"  {what:<24} {path}" for what, path in places.items() if path.exists()]
    if run.push and rundir.push_receipt.exists():
        lines += [f"  {'pushed to':<24} {destination}" for destination in run.push.destinations]
    return ["\nWhere to look next:", *lines] if lines else []

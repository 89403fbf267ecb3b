"""The state of every stage of a run, from the files in its folder: read-only, also while the run is in progress."""

from collections.abc import Iterable, Mapping

from shardmake.commands.driver_state import describe_drivers
from shardmake.commands.training_state import TrainingState, query_queue, training_state
from shardmake.config.models import Cluster, Run
from shardmake.core.units import plural
from shardmake.launch.slurm_states import JobStatus
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir
from shardmake.run.receipts import PushReceipt, TrainingReceipt
from shardmake.run.settings import STAGES_BEFORE, changed_settings

DONE, OPEN, CHANGED, OUTDATED = "done", "open", "changed", "outdated"
Stages = dict[str, tuple[str, list[str]]]
Queue = Mapping[str, JobStatus] | None


def describe(run: Run, cluster: Cluster, rundir: RunDir) -> str:
    """Return each stage, the training, the results, and the files to look at next."""
    stages = stage_states(run, cluster, rundir)
    lines = [f"{rundir.name} in {rundir.root}"]
    for stage, (state, changes) in stages.items():
        lines.append(f"  {state:<8}  {stage}" + (f": {'; '.join(changes)}" if changes else ""))
    if any(state in (CHANGED, OUTDATED) for state, _ in stages.values()):
        lines.append("\nSettings changed since these stages ran. The next `snakemake` runs them again.")
    if training := unfinished_training(cluster, rundir, queue_of([rundir], cluster)):
        lines += [f"\nTraining: {training.headline}", *(f"  {line}" for line in training.details)]
        if any(stages[stage][0] == CHANGED for stage in ("plan", "render", "data")):
            lines.append("  It ran before the settings changed. If they change the result, training starts anew.")
    if cluster.executor == "slurm":
        lines += [f"\n{line}" for line in describe_drivers(rundir.root.parent, [rundir.name])]
    if rundir.train_receipt.exists():
        lines += _trained(TrainingReceipt.read(rundir.train_receipt), stages["train"][0])
    if rundir.evaluation.exists():
        lines += _evaluation(EvaluationResult.read(rundir.evaluation))
    return "\n".join([*lines, *_where_next(run, rundir)])


def stage_states(run: Run, cluster: Cluster, rundir: RunDir) -> Stages:
    """Return for each stage whether it is done with the current settings, and the settings that changed since.

    A stage is outdated if an earlier one that it uses is not done.
    """
    proofs = {
        "fetch": rundir.weights_receipt,
        "plan": rundir.plan,
        "render": rundir.training,
        "data": rundir.data_receipt,
        "train": rundir.train_receipt,
        "consolidate": rundir.model_receipt,
        "evaluate": rundir.evaluation,
        **({"push": rundir.push_receipt} if run.push else {}),
    }
    found: Stages = {}
    for stage, proof in proofs.items():
        changes = changed_settings(stage, run, cluster, rundir) if proof.exists() else []
        uses_old = any(_is_renewed(earlier, found[earlier][0]) for earlier in STAGES_BEFORE.get(stage, ()))
        state = OPEN if not proof.exists() else CHANGED if changes else OUTDATED if uses_old else DONE
        found[stage] = (state, changes)
    return found


def _is_renewed(stage: str, state: str) -> bool:
    """Return whether ``stage`` will have another result; the fetch is open as long as the weights are not here."""
    return state in (CHANGED, OUTDATED) or (state == OPEN and stage != "fetch")


def queue_of(rundirs: Iterable[RunDir], cluster: Cluster) -> Queue:
    """Return the queue of Slurm for the runs that have a job; None without Slurm or such a run."""
    jobs = [rundir for rundir in rundirs if rundir.job.exists()] if cluster.executor == "slurm" else []
    return query_queue(jobs) if jobs else None


def unfinished_training(cluster: Cluster, rundir: RunDir, queue: Queue) -> TrainingState | None:
    """Return the state of a training that has begun and not finished; ``queue`` is the answer of `queue_of`."""
    if rundir.train_receipt.exists():
        return None
    return training_state(rundir, slurm=cluster.executor == "slurm", queue=queue)


def _trained(receipt: TrainingReceipt, state: str) -> list[str]:
    length = "" if receipt.steps is None else f" {receipt.steps:,} steps"
    length += "" if receipt.tokens is None else f", {receipt.tokens:,} tokens,"
    ranks, attempts = plural(receipt.world_size, "rank"), plural(receipt.attempts, "attempt")
    old = "" if state == DONE else ", before the settings changed"
    return [f"\nTrained{length} with {receipt.strategy} on {ranks} in {attempts}{old}."]


def _evaluation(evaluation: EvaluationResult) -> list[str]:
    lines = []
    if evaluation.scores:
        base, tuned = evaluation.scores
        lines.append(
            f"Evaluation loss {base.loss:.3f} -> {tuned.loss:.3f}, "
            f"perplexity {base.perplexity_text(1)} -> {tuned.perplexity_text(1)}."
        )
        if evaluation.has_exact:
            lines.append(
                f"Held-out examples that greedy decoding answers word for word: {base.exact:.1%} -> {tuned.exact:.1%}."
            )
    if found := evaluation.reward_model:
        lines.append(f"Held-out pairs: preference accuracy {found.accuracy:.1%}, margin {found.margin:.4f}.")
    if evaluation.preferences:
        rewards = evaluation.preferences.rewards
        lines.append(f"Held-out pairs: reward accuracy {rewards.accuracies:.1%}, margin {rewards.margins:.4f}.")
    if labelled := evaluation.completions:
        lines.append(
            f"Held-out completions: reward accuracy {labelled.accuracy:.1%}, margin {labelled.rewards.margins:.4f}."
        )
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
        pushed = PushReceipt.read(rundir.push_receipt).destinations
        lines += [f"  {'pushed to':<24} {destination.to}" for destination in pushed]
    return ["\nWhere to look next:", *lines] if lines else []

"""Evaluate the base and the tuned model on held-out examples: loss, samples, benchmark tasks.

The tuned model is loaded with plain ``from_pretrained``, as its users load it; a missing or unexpected weight is an
error.
"""

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardmake.config.chat_template import fix_clock
from shardmake.config.models import Cluster, Dpo, Kto, Run
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.atomic import write_text
from shardmake.core.environment import UNUSED, hidden
from shardmake.core.run_folder import unlink
from shardmake.core.secrets import redact
from shardmake.evaluate.assess import Assessment, EvaluationSetup, assess_with_retries, held_out_answers
from shardmake.evaluate.backends import choose_backend, count_ranks, this_machine, weights_size
from shardmake.evaluate.harness import prepare_tasks
from shardmake.evaluate.prompts import question_in, read_prompts
from shardmake.evaluate.scores import ExampleLoss, as_record
from shardmake.run.evaluation import CompletionScore, EvaluationResult, PreferenceScore, Sample, TaskScore
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataReceipt
from shardmake.run.sources import localize, recorded_data, recorded_weights, refuse_changed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardmake.data.dataset import Sequences

logger = logging.getLogger(__name__)


def evaluate(run: Run, rundir: RunDir, cluster: Cluster | None = None) -> EvaluationResult:
    """Write and return ``evaluation.json``.

    Each rank scores a share of the sequences. A reward model is measured alone, because its base model has no head for
    rewards.
    Raises `ShardmakeError` if a model cannot be loaded completely or the evaluation split has no loss tokens.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads of torch spin otherwise, half of a small model's time
    with hidden(*UNUSED):
        import accelerate  # noqa: F401
        import datasets  # noqa: F401
        import transformers.generation.utils  # noqa: F401
        from transformers import AutoTokenizer

        from shardmake.data.dataset import Sequences
        from shardmake.data.examples import day_of

    run, wanted = localize(run, rundir), run.evaluation
    prepare_tasks(wanted)
    refuse_changed(rundir, {**recorded_weights(rundir), **recorded_data(rundir, "eval")})
    examples = Sequences(rundir.data, "eval")
    tokenizer = AutoTokenizer.from_pretrained(rundir.model)
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = fix_clock(tokenizer.chat_template, day_of(rundir))
    is_reward_model = bool(OBJECTIVES[run.objective].new_head)
    prompts = [] if is_reward_model else read_prompts(run, tokenizer, examples)
    machine = this_machine(cluster.nvme_path if cluster else None)
    backend = choose_backend(weights_size(rundir.model), machine) if wanted.backend == "auto" else wanted.backend
    ranks = count_ranks(backend, machine, wanted.processes)
    setup = EvaluationSetup(run, rundir, prompts, backend, ranks, wanted.batch_tokens, machine.nvme)
    result = _evaluate_reward_model(setup) if is_reward_model else _compare_models(setup, tokenizer, examples)
    result.write(rundir.evaluation)
    return result


def _compare_models(
    setup: EvaluationSetup, tokenizer: "PreTrainedTokenizerBase", examples: "Sequences"
) -> EvaluationResult:
    """Return the scores of the base and the tuned model; write the loss of each example if it is wanted."""
    run, rundir = setup.run, setup.rundir
    logger.info(f"Measuring the base and the tuned model on {len(examples):,} sequences, {setup}.")
    base, tuned = assess_with_retries([(run.model, run.revision), (str(rundir.model), None)], setup)
    sources = [source.name for source in DataReceipt.read(rundir.data_receipt).eval.sources]
    scores = as_record(base.losses, sources)
    result = EvaluationResult(
        sequences=len(examples),
        tokens=scores.tokens,
        backend=setup.backend,
        ranks=setup.ranks,
        base=scores,
        tuned=as_record(tuned.losses, sources),
        **_compare_answers(run, rundir, base, tuned),
        samples=_samples(tokenizer, setup.prompts, base, tuned),
        tasks=[
            TaskScore(task=task, metric=metric, base=value, tuned=tuned.tasks[task, metric])
            for (task, metric), value in sorted(base.tasks.items())
        ],
    )
    for name, found in zip(("base", "tuned"), result.scores or (), strict=True):
        logger.info(f"{name}: loss {found.loss:.4f}, perplexity {found.perplexity_text()}, {found.tokens:,} tokens")
    if compared := result.preferences or result.completions:
        logger.info(f"reward accuracy {result.shares['reward accuracy']:.1%}, margin {compared.rewards.margins:.4f}")
    unlink(rundir.evaluation_losses)
    if run.evaluation.losses:
        write_text(rundir.evaluation_losses, _losses_table(base.losses, tuned.losses))
        logger.info(f"The loss of each example is in {rundir.evaluation_losses}.")
    return result


def _evaluate_reward_model(setup: EvaluationSetup) -> EvaluationResult:
    """Return the rewards of the held-out pairs."""
    from shardmake.evaluate.preferences import score_rewards

    answers = held_out_answers(setup.run, setup.rundir)
    logger.info(
        f"Measuring the reward model on {len(answers) // 2:,} pairs, {setup}. Its base model has no head for rewards "
        "and is not measured."
    )
    (found,) = assess_with_retries([(str(setup.rundir.model), None)], setup)
    scores = score_rewards(found.pairs)
    logger.info(f"preference accuracy {scores.accuracy:.1%}, margin {scores.margin:.4f}")
    return EvaluationResult(
        sequences=len(answers),
        tokens=sum(answers.lengths()),
        backend=setup.backend,
        ranks=setup.ranks,
        base=None,
        tuned=None,
        reward_model=scores,
        samples=[],
        tasks=[],
    )


def _losses_table(base: Sequence[ExampleLoss], tuned: Sequence[ExampleLoss]) -> str:
    """Return a table with the loss of each held-out example under both models, as comma-separated values."""
    lines = [
        f"{one.sequence},{one.start},{one.tokens},{one.loss:.6g},{other.loss:.6g},{one.exact:d},{other.exact:d}\n"
        for one, other in zip(base, tuned, strict=True)
    ]
    return "".join(["sequence,start,tokens,base_loss,tuned_loss,base_exact,tuned_exact\n", *lines])


def _compare_answers(
    run: Run, rundir: RunDir, base: Assessment, tuned: Assessment
) -> dict[str, PreferenceScore | CompletionScore | None]:
    """Return the scores of held-out pairs or completions with labels, for an objective that learns from them."""
    from shardmake.data.dataset import Preferences
    from shardmake.evaluate.preferences import compare_answers, compare_completions

    match run.objective_settings:
        case Dpo(beta=beta):
            return {"preferences": compare_answers(base.pairs, tuned.pairs, beta)}
        case Kto(beta=beta):
            labels = Preferences(rundir.data, "eval").labels()
            return {"completions": compare_completions(base.pairs, tuned.pairs, labels, beta)}
    return {}


def _samples(
    tokenizer: "PreTrainedTokenizerBase", prompts: list[list[int]], base: Assessment, tuned: Assessment
) -> list[Sample]:
    def text(ids: list[int]) -> str:
        return redact(tokenizer.decode(ids, skip_special_tokens=True).strip())

    return [
        Sample(prompt=redact(question_in(tokenizer, prompt)), base=text(before), tuned=text(after))
        for prompt, before, after in zip(prompts, base.answers, tuned.answers, strict=True)
    ]

"""Evaluate the base and the tuned model on held-out examples: loss, samples, benchmark tasks.

The tuned model is loaded with plain ``from_pretrained``, as its users load it; a missing or unexpected weight is an
error.
"""

import gc
import logging
import multiprocessing
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from shardmake.config.models import Cluster, Dpo, EvaluationBackend, Kto, Run
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.atomic import write_text
from shardmake.core.errors import ConfigError
from shardmake.core.secrets import redact
from shardmake.core.units import plural
from shardmake.data.encode import encode_prompt
from shardmake.evaluate.backends import (
    Machine,
    RankInfo,
    choose_backend,
    count_ranks,
    load_model,
    process_group,
    rendezvous_of,
    this_machine,
    weights_size,
)
from shardmake.evaluate.harness import measure_tasks, prepare_tasks
from shardmake.evaluate.scores import (
    IGNORED,
    Example,
    Examples,
    PassOutOfMemoryError,
    Scores,
    combine,
    plan_passes,
    score,
)
from shardmake.run.evaluation import CompletionScore, EvaluationResult, PreferenceScore, Sample, TaskScore
from shardmake.run.model_class import ModelClass
from shardmake.run.paths import RunDir
from shardmake.run.plan import planned_class
from shardmake.run.receipts import DataReceipt
from shardmake.run.sources import localize

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from shardmake.evaluate.preferences import Answers

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
_PROMPTS = 3


def evaluate(run: Run, rundir: RunDir, cluster: Cluster | None = None) -> EvaluationResult:
    """Write and return ``evaluation.json``.

    Each rank scores a share of the sequences. A reward model is measured alone, because its base model has no head for
    rewards.
    Raises `ShardmakeError` if a model cannot be loaded completely or the evaluation split has no loss tokens.
    """
    from transformers import AutoTokenizer

    from shardmake.data.dataset import load

    run = localize(run, rundir)
    prepare_tasks(run.evaluation)
    examples = load(rundir.data, "eval")
    tokenizer = AutoTokenizer.from_pretrained(rundir.model)
    is_reward_model = bool(OBJECTIVES[run.objective].new_head)
    prompts = [] if is_reward_model else _prompts(run, tokenizer, examples)
    machine = this_machine(cluster.nvme_path if cluster else None)
    setup = _choose_setup(run, rundir, machine)
    model_class = planned_class(run, rundir)
    ours = EvaluationTask(run, rundir, str(rundir.model), model_class, None, prompts)
    if is_reward_model:
        return _evaluate_reward_model(ours, setup)
    logger.info(f"Measuring the base and the tuned model on {len(examples):,} sequences, {setup}.")
    models = [EvaluationTask(run, rundir, run.model, model_class, run.revision, prompts), ours]
    base, tuned = _assess_with_retries(models, setup)
    sources = [source.name for source in DataReceipt.read(rundir.data_receipt).eval.sources]
    result = EvaluationResult(
        sequences=len(examples),
        tokens=base.scores.total.tokens,
        backend=setup.backend,
        ranks=setup.ranks,
        base=base.scores.as_record(sources),
        tuned=tuned.scores.as_record(sources),
        preferences=_compare_pairs(run, base, tuned),
        completions=_compare_completions(run, rundir, base, tuned),
        samples=_samples(tokenizer, prompts, base, tuned),
        tasks=[
            TaskScore(task=task, metric=metric, base=value, tuned=tuned.tasks[task, metric])
            for (task, metric), value in sorted(base.tasks.items())
        ],
    )
    for name, found in zip(("base", "tuned"), result.scores or (), strict=True):
        logger.info(f"{name}: loss {found.loss:.4f}, perplexity {found.perplexity_text()}, {found.tokens:,} tokens")
    if result.preferences:
        rewards = result.preferences.rewards
        logger.info(f"reward accuracy {rewards.accuracies:.1%}, margin {rewards.margins:.4f}")
    if labelled := result.completions:
        logger.info(f"reward accuracy {labelled.accuracy:.1%}, margin {labelled.rewards.margins:.4f}")
    rundir.evaluation_losses.unlink(missing_ok=True)
    if run.evaluation.losses:
        write_text(rundir.evaluation_losses, _losses_table(base.scores, tuned.scores))
        logger.info(f"The loss of each example is in {rundir.evaluation_losses}.")
    result.write(rundir.evaluation)
    return result


def _evaluate_reward_model(task: "EvaluationTask", setup: "EvaluationSetup") -> EvaluationResult:
    """Write and return the rewards of the held-out pairs."""
    from shardmake.evaluate.preferences import score_rewards

    answers = _held_out_answers(task)
    logger.info(
        f"Measuring the reward model on {len(answers) // 2:,} pairs, {setup}. Its base model has no head for rewards "
        "and is not measured."
    )
    (found,) = _assess_with_retries([task], setup)
    scores = score_rewards(found.pairs)
    result = EvaluationResult(
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
    logger.info(f"preference accuracy {scores.accuracy:.1%}, margin {scores.margin:.4f}")
    result.write(task.rundir.evaluation)
    return result


def _losses_table(base: Scores, tuned: Scores) -> str:
    """Return a table with the loss of each held-out example under both models, as comma-separated values."""
    pairs = zip(base.examples, tuned.examples, strict=True)
    lines = [
        f"{one.sequence},{one.start},{one.tokens},{one.loss:.6g},{other.loss:.6g},{one.exact:d},{other.exact:d}\n"
        for one, other in pairs
    ]
    return "".join(["sequence,start,tokens,base_loss,tuned_loss,base_exact,tuned_exact\n", *lines])


@dataclass(frozen=True)
class EvaluationSetup:
    """How to run the models: backend, number of processes, tokens of a pass, folder on NVMe for offloaded weights."""

    backend: EvaluationBackend
    ranks: int
    batch_tokens: int
    nvme: str | None = None

    def __str__(self) -> str:
        return f"{self.backend} on {plural(self.ranks, 'rank')}"


def _choose_setup(run: Run, rundir: RunDir, machine: Machine) -> EvaluationSetup:
    wanted = run.evaluation
    backend = choose_backend(weights_size(rundir.model), machine) if wanted.backend == "auto" else wanted.backend
    return EvaluationSetup(backend, count_ranks(backend, machine, wanted.processes), wanted.batch_tokens, machine.nvme)


@dataclass(frozen=True)
class EvaluationTask:
    """A model to evaluate, and prompts (token ids) to continue.

    ``model_class`` is the planned class; None for a script, which decides by itself what it trains.
    """

    run: Run
    rundir: RunDir
    model: str
    model_class: ModelClass | None
    revision: str | None
    prompts: list[list[int]]


@dataclass(frozen=True)
class Assessment:
    """Scores of a model, its answers (token ids, by prompt), and its results by task and metric.

    ``pairs`` has the log-probabilities or rewards of the answers of pairs, by the number that
    `shardmake.evaluate.preferences.Answers` gives them. A reward model has nothing else.
    """

    scores: Scores
    answers: list[list[int]]
    tasks: dict[tuple[str, str], float | None]
    pairs: dict[int, float]


def _assess_with_retries(tasks: list[EvaluationTask], setup: EvaluationSetup) -> list[Assessment]:
    """Evaluate models; after a pass that did not fit the GPU, start again with half of its tokens.

    Passes are sorted by length, so the first one needs the most memory.
    """
    while True:
        try:
            return _assess(tasks, setup)
        except PassOutOfMemoryError as error:
            setup = replace(setup, batch_tokens=error.tokens // 2)
            logger.warning(
                f"A pass over {error.tokens:,} tokens ran out of GPU memory. Evaluation starts again with "
                f"{setup.batch_tokens:,} tokens a pass. Set evaluation.batch_tokens to this to save the time."
            )
        gc.collect()  # a model of this process, for the next one


def _assess(tasks: list[EvaluationTask], setup: EvaluationSetup) -> list[Assessment]:
    """Evaluate models one after the other, in this process or in one process per rank."""
    with rendezvous_of(setup.backend, setup.ranks) as rendezvous:
        ranks = [RankInfo(rank, setup.ranks, rendezvous) for rank in range(setup.ranks)]
        if rendezvous is None and setup.ranks == 1:
            return _assess_share(tasks, setup, ranks[0])
        shares = in_processes(partial(_assess_share, tasks, setup), ranks)
    return [_combine(list(of_one_model)) for of_one_model in zip(*shares, strict=True)]


def in_processes(function: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    """Return the results of ``function`` in one process per item.

    If one fails, the others are ended, because they may wait for it, and its error is raised.
    """
    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(len(items), mp_context=spawn) as pool:
        futures = [pool.submit(function, item) for item in items]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        if pending:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
        for future in done:
            future.result()
        return [future.result() for future in futures]


def _combine(shares: list[Assessment]) -> Assessment:
    pairs = {number: value for share in shares for number, value in share.pairs.items()}
    return Assessment(combine([share.scores for share in shares]), shares[0].answers, shares[0].tasks, pairs)


def _compare_pairs(run: Run, base: Assessment, tuned: Assessment) -> PreferenceScore | None:
    """Return the scores of the held-out pairs; None for an objective that does not learn from pairs."""
    from shardmake.evaluate.preferences import compare_answers

    settings = run.objective_settings
    return compare_answers(base.pairs, tuned.pairs, settings.beta) if isinstance(settings, Dpo) else None


def _compare_completions(run: Run, rundir: RunDir, base: Assessment, tuned: Assessment) -> CompletionScore | None:
    """Return the scores of held-out completions with labels; None for an objective that does not learn from them."""
    from shardmake.data.dataset import Completions
    from shardmake.evaluate.preferences import compare_completions

    settings = run.objective_settings
    if not isinstance(settings, Kto):
        return None
    return compare_completions(base.pairs, tuned.pairs, Completions(rundir.data, "eval").labels(), settings.beta)


def _assess_share(tasks: list[EvaluationTask], setup: EvaluationSetup, rank: RankInfo) -> list[Assessment]:
    """Evaluate on one rank: score every ``world_size``-th pass; the first rank also answers."""
    with process_group(rank):
        return [_assess_model(task, setup, rank) for task in tasks]


def _assess_model(task: EvaluationTask, setup: EvaluationSetup, rank: RankInfo) -> Assessment:
    """Evaluate one rank's share of one model. Ranks that gather layers together must run the same steps."""
    import torch

    from shardmake.data.dataset import load

    evaluation = task.run.evaluation
    network = load_model(
        task.model,
        setup.backend,
        rank,
        model_class=task.model_class,
        revision=task.revision,
        trust_remote_code=task.run.trust_remote_code,
        nvme=setup.nvme,
    )
    if OBJECTIVES[task.run.objective].new_head:
        return Assessment(Scores(), [], {}, _rate_pairs(network, task, setup, rank))
    examples = load(task.rundir.data, "eval")
    together = rank.rendezvous is not None
    own = _own_passes(examples.lengths(), setup, rank)
    sources = DataReceipt.read(task.rundir.data_receipt).eval.sources
    scores = score(network, examples, own, [source.sequences or 0 for source in sources])
    pairs = _score_pairs(network, task, setup, rank) if OBJECTIVES[task.run.objective].has_reference else {}
    answers_here = together or rank.number == 0
    answers = [_answer(network, prompt, evaluation.max_new_tokens) for prompt in task.prompts if answers_here]
    results = measure_tasks(network, task.rundir.model, evaluation, setup.batch_tokens) if answers_here else {}
    del network
    torch.cuda.empty_cache()  # another process may load the next model on this GPU
    return Assessment(scores, answers, results, pairs)


def _own_passes(lengths: list[int], setup: EvaluationSetup, rank: RankInfo) -> list[list[int]]:
    """Return the passes of a rank; with empty ones at the end if all ranks must run equally many."""
    passes = plan_passes(lengths, setup.batch_tokens, rank.world_size)
    own = passes[rank.number :: rank.world_size]
    if rank.rendezvous is not None:
        own += [[] for _ in range(-(-len(passes) // rank.world_size) - len(own))]
    return own


def _score_pairs(
    network: "PreTrainedModel", task: EvaluationTask, setup: EvaluationSetup, rank: RankInfo
) -> dict[int, float]:
    """Return the log-probabilities of a rank's share of the held-out answers, by number."""
    from shardmake.evaluate.preferences import score_answers

    answers = _held_out_answers(task)
    return score_answers(network, answers, _own_passes(answers.lengths(), setup, rank))


def _rate_pairs(
    network: "PreTrainedModel", task: EvaluationTask, setup: EvaluationSetup, rank: RankInfo
) -> dict[int, float]:
    """Return the rewards of a rank's share of the answers of the held-out pairs, by number."""
    from shardmake.evaluate.preferences import rate_answers

    answers = _held_out_answers(task)
    return rate_answers(network, answers, _own_passes(answers.lengths(), setup, rank))


def _held_out_answers(task: EvaluationTask) -> "Answers":
    from shardmake.data.dataset import Completions, Pairs
    from shardmake.evaluate.preferences import Answers, LabelledAnswers

    unpaired = isinstance(task.run.objective_settings, Kto)
    examples = (Completions if unpaired else Pairs)(task.rundir.data, "eval")
    kind = LabelledAnswers if unpaired else Answers
    return kind((examples[number] for number in range(len(examples))), task.run.sequence_length)


def _prompts(run: Run, tokenizer: "PreTrainedTokenizerBase", examples: Examples) -> list[list[int]]:
    """Return prompts as token ids: the configured ones in the chat template, or from the first examples."""
    if run.evaluation.prompts:
        return [_as_prompt(tokenizer, prompt) for prompt in run.evaluation.prompts]
    return [_opening(examples[index]) for index in range(min(_PROMPTS, len(examples)))]


def check_prompts(run: Run) -> None:
    """Raise a `ConfigError` if a prompt of the run is too long for the base model, or its chat template rejects it."""
    if not run.evaluation.prompts:
        return
    from transformers import AutoConfig

    from shardmake.data.examples import load_tokenizer

    tokenizer = load_tokenizer(run)
    positions = _positions(
        AutoConfig.from_pretrained(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    )
    for prompt in run.evaluation.prompts:
        length = len(_as_prompt(tokenizer, prompt))
        if positions is not None and length >= positions:
            raise ConfigError(
                f"evaluation.prompts: {prompt[:40]!r} has {length} tokens, but the model has only {positions} "
                "positions. Shorten the prompt."
            )


def _positions(config: Any) -> int | None:
    """Return the number of positions of a model; None if there is no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _as_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> list[int]:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        return encode_prompt(tokenizer, prompt)
    conversation = [{"role": "user", "content": prompt}]
    try:
        return list(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))
    except TemplateError as error:
        raise ConfigError(
            f"evaluation.prompts: the chat template of the base model rejects {prompt!r}: {error}. Remove the prompt, "
            "or use a template that accepts a single message of a user."
        ) from None


def _opening(example: Example) -> list[int]:
    """Return the tokens before the first loss token; for a text with loss from the start, the first tokens."""
    first = int((example["labels"] != IGNORED).nonzero()[0])
    return example["input_ids"][: first if first > 1 else 16].tolist()


def _samples(
    tokenizer: "PreTrainedTokenizerBase", prompts: list[list[int]], base: Assessment, tuned: Assessment
) -> list[Sample]:
    def text(ids: list[int]) -> str:
        return redact(tokenizer.decode(ids, skip_special_tokens=True).strip())

    return [
        Sample(prompt=redact(_question(tokenizer, prompt)), base=text(before), tuned=text(after))
        for prompt, before, after in zip(prompts, base.answers, tuned.answers, strict=True)
    ]


def _question(tokenizer: "PreTrainedTokenizerBase", prompt: list[int]) -> str:
    """Return the user's text of ``prompt`` without the chat template around it, or else all of its text."""
    if tokenizer.chat_template is not None:
        mark = "\N{OBJECT REPLACEMENT CHARACTER}"
        around = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
        )
        before, _, after = around.partition(mark)
        text = tokenizer.decode(prompt)
        if text.startswith(before) and text.endswith(after):
            return text[len(before) : len(text) - len(after)]
    return tokenizer.decode(prompt, skip_special_tokens=True).strip()


def _answer(network: "PreTrainedModel", prompt: list[int], max_new_tokens: int) -> list[int]:
    """Return the greedy continuation of ``prompt`` as token ids, up to the last position of the model."""
    import torch

    positions = _positions(network.config)
    room = max_new_tokens if positions is None else min(max_new_tokens, positions - len(prompt))
    if room < 1:
        return []
    ids = torch.tensor([prompt], device=network.device)
    with torch.inference_mode():
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=room,
            do_sample=False,
            pad_token_id=0,  # not used: one prompt at a time needs no padding
        )
    return output[0, len(prompt) :].tolist()

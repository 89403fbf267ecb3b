"""Measure models in the processes of an evaluation: each rank scores a share of the held-out examples."""

import gc
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from shardmake.config.models import EvaluationBackend, Run
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.units import plural
from shardmake.evaluate.backends import RankInfo, load_model, process_group, rendezvous_of
from shardmake.evaluate.harness import measure_tasks
from shardmake.evaluate.prompts import continue_prompt
from shardmake.evaluate.scores import ExampleLoss, PassOutOfMemoryError, in_order, plan_passes, score
from shardmake.run.paths import RunDir
from shardmake.run.plan import planned_class
from shardmake.run.receipts import DataReceipt

if TYPE_CHECKING:
    from shardmake.evaluate.preferences import Answers

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class EvaluationSetup:
    """The questions to each model, and how the models run."""

    run: Run
    rundir: RunDir
    prompts: list[list[int]]
    """Token ids to continue."""
    backend: EvaluationBackend
    ranks: int
    batch_tokens: int
    """Tokens of a pass."""
    nvme: str | None = None
    """Folder for offloaded weights."""

    def __str__(self) -> str:
        return f"{self.backend} on {plural(self.ranks, 'rank')}"


Weights = tuple[str, str | None]
"""The folder or hub name of a model, and its revision."""


@dataclass
class Assessment:
    """Losses of a model by example, its answers (token ids, by prompt), and its results by task and metric.

    ``pairs`` has the log-probabilities or rewards of the answers of pairs, by the number that
    `shardmake.evaluate.preferences.Answers` gives them. A reward model has nothing else.
    """

    losses: list[ExampleLoss]
    answers: list[list[int]]
    tasks: dict[tuple[str, str], float | None]
    pairs: dict[int, float]


def assess_with_retries(models: list[Weights], setup: EvaluationSetup) -> list[Assessment]:
    """Evaluate models; after a pass that did not fit the GPU, start again with half of its tokens.

    Passes are sorted by length, so the first one needs the most memory.
    """
    while True:
        try:
            return _assess(models, setup)
        except PassOutOfMemoryError as error:
            setup = replace(setup, batch_tokens=error.tokens // 2)
            logger.warning(
                f"A pass over {error.tokens:,} tokens ran out of GPU memory. Evaluation starts again with "
                f"{setup.batch_tokens:,} tokens a pass. Set evaluation.batch_tokens to this to save the time."
            )
        gc.collect()  # a model of this process, for the next one


def _assess(models: list[Weights], setup: EvaluationSetup) -> list[Assessment]:
    """Evaluate models one after the other, in this process or in one process per rank."""
    with rendezvous_of(setup.backend, setup.ranks) as rendezvous:
        ranks = [RankInfo(rank, setup.ranks, rendezvous) for rank in range(setup.ranks)]
        if rendezvous is None and setup.ranks == 1:
            return _assess_share(models, setup, ranks[0])
        shares = in_processes(partial(_assess_share, models, setup), ranks)
    return [_combine(of_one_model) for of_one_model in zip(*shares, strict=True)]


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


def _combine(shares: Sequence[Assessment]) -> Assessment:
    pairs = {number: value for share in shares for number, value in share.pairs.items()}
    losses = in_order(example for share in shares for example in share.losses)
    return Assessment(losses, shares[0].answers, shares[0].tasks, pairs)


def _assess_share(models: list[Weights], setup: EvaluationSetup, rank: RankInfo) -> list[Assessment]:
    """Evaluate on one rank: score every ``world_size``-th pass; the first rank also answers."""
    with process_group(rank):
        return [_assess_model(model, setup, rank) for model in models]


def _assess_model(model: Weights, setup: EvaluationSetup, rank: RankInfo) -> Assessment:
    """Evaluate one rank's share of one model. Ranks that gather layers together must run the same steps."""
    import torch

    from shardmake.data.dataset import Sequences
    from shardmake.evaluate.preferences import rate_answers, score_answers

    run, rundir, objective = setup.run, setup.rundir, OBJECTIVES[setup.run.objective]
    options: dict[str, Any] = {"trust_remote_code": run.trust_remote_code, "nvme": setup.nvme}
    kind = planned_class(run, rundir)
    network = load_model(model[0], setup.backend, rank, model_class=kind, revision=model[1], **options)
    found = Assessment([], [], {}, {})
    if not objective.new_head:
        examples = Sequences(rundir.data, "eval")
        sources = DataReceipt.read(rundir.data_receipt).eval.sources
        own = _own_passes(examples.lengths(), setup, rank)
        found.losses = score(network, examples, own, [source.sequences or 0 for source in sources])
    if objective.new_head or objective.has_reference:
        answers = held_out_answers(run, rundir)
        measure = rate_answers if objective.new_head else score_answers
        found.pairs = measure(network, answers, _own_passes(answers.lengths(), setup, rank))
    if not objective.new_head and (rank.rendezvous is not None or rank.number == 0):
        found.answers = [continue_prompt(network, prompt, run.evaluation.max_new_tokens) for prompt in setup.prompts]
        found.tasks = measure_tasks(network, rundir.model, run.evaluation, setup.batch_tokens)
    del network
    torch.cuda.empty_cache()  # another process may load the next model on this GPU
    return found


def _own_passes(lengths: list[int], setup: EvaluationSetup, rank: RankInfo) -> list[list[int]]:
    """Return the passes of a rank; with empty ones at the end if all ranks must run equally many."""
    passes = plan_passes(lengths, setup.batch_tokens, rank.world_size)
    own = passes[rank.number :: rank.world_size]
    if rank.rendezvous is not None:
        own += [[] for _ in range(-(-len(passes) // rank.world_size) - len(own))]
    return own


def held_out_answers(run: Run, rundir: RunDir) -> "Answers":
    """Return the answers of the held-out pairs or completions, cut as in training."""
    from shardmake.data.dataset import Preferences
    from shardmake.evaluate.preferences import Answers

    examples = Preferences(rundir.data, "eval")
    return Answers((examples[number] for number in range(len(examples))), run.sequence_length)

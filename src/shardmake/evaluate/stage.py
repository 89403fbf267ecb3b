"""Loss and samples of the base and the tuned model on the examples that training never saw.

The tuned model is loaded as its users will load it, with plain ``from_pretrained``; a weight that is missing or that
nothing asked for is an error.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Cluster, EvaluationBackend, Run
from shardmake.core.atomic import write_json
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
from shardmake.evaluate.scores import IGNORED, Example, Examples, Scores, add_up, score
from shardmake.run.paths import RunDir
from shardmake.run.sources import localize

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Tell = Callable[[str], None]
_PROMPTS = 3


def evaluate(run: Run, rundir: RunDir, cluster: Cluster | None = None, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Write and return ``evaluation.json``.

    ``{"sequences", "tokens", "backend", "ranks", "base": {"loss", "perplexity", "tokens", "by_length"}, "tuned":
    {...}, "samples": [{"prompt", "base", "tuned"}], "tasks": [{"task", "metric", "base", "tuned"}]}``; losses in nats
    per loss token. The ranks share the sequences among them.
    Raises `ShardmakeError` if a model cannot be loaded whole or the evaluation split holds no loss tokens.
    """
    from transformers import AutoTokenizer

    from shardmake.data.dataset import load

    run = localize(run, rundir)
    prepare_tasks(run.evaluation)
    examples = load(rundir.data, "eval")
    tokenizer = AutoTokenizer.from_pretrained(rundir.model)
    prompts = _prompts(run, tokenizer, examples)
    way = _choose_way(run, rundir, this_machine(cluster.nvme_path if cluster else None))
    tell(f"Measuring the base and the tuned model on {len(examples):,} sequences, {way}.")
    models = [
        EvaluationTask(run, rundir, run.model, run.revision, prompts),
        EvaluationTask(run, rundir, str(rundir.model), None, prompts),
    ]
    base, tuned = _assess(models, way)
    measured = {"base": base.scores.as_json(), "tuned": tuned.scores.as_json()}
    for name, found in measured.items():
        tell(f"{name}: loss {found['loss']:.4f}, perplexity {found['perplexity']:,.2f}, {found['tokens']:,} tokens")
    evaluation = {
        "sequences": len(examples),
        "tokens": base.scores.total.tokens,
        "backend": way.backend,
        "ranks": way.ranks,
        **measured,
        "samples": _samples(tokenizer, prompts, base, tuned),
        "tasks": _side_by_side(base.tasks, tuned.tasks),
    }
    write_json(rundir.evaluation, evaluation)
    return evaluation


@dataclass(frozen=True)
class EvaluationSetup:
    """How the models are run: backend, processes, a folder on NVMe for what is offloaded there."""

    backend: EvaluationBackend
    ranks: int
    nvme: str | None = None

    def __str__(self) -> str:
        return f"{self.backend} on {self.ranks} rank(s)"


def _choose_way(run: Run, rundir: RunDir, machine: Machine) -> EvaluationSetup:
    wanted = run.evaluation
    backend = choose_backend(weights_size(rundir.model), machine) if wanted.backend == "auto" else wanted.backend
    return EvaluationSetup(backend, count_ranks(backend, machine, wanted.processes), machine.nvme)


@dataclass(frozen=True)
class EvaluationTask:
    """One model to measure, and prompts (token ids) for it to answer."""

    run: Run
    rundir: RunDir
    model: str
    revision: str | None
    prompts: list[list[int]]


@dataclass(frozen=True)
class Assessment:
    """What a model scored and answered (token ids, by prompt), and its results by task and metric."""

    scores: Scores
    answers: list[list[int]]
    tasks: dict[tuple[str, str], float]


def _assess(tasks: list[EvaluationTask], way: EvaluationSetup) -> list[Assessment]:
    """Measure models one after the other, here or in a process a rank."""
    with rendezvous_of(way.backend, way.ranks) as meeting:
        seats = [RankInfo(rank, way.ranks, meeting) for rank in range(way.ranks)]
        if meeting is None and way.ranks == 1:
            return _assess_share(tasks, way, seats[0])
        spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        with ProcessPoolExecutor(way.ranks, mp_context=spawn) as pool:
            shares = list(pool.map(partial(_assess_share, tasks, way), seats))
    return [_joined(list(of_one_model)) for of_one_model in zip(*shares, strict=True)]


def _joined(shares: list[Assessment]) -> Assessment:
    buckets = zip(*(share.scores.buckets for share in shares), strict=True)
    return Assessment(Scores([add_up(scores) for scores in buckets]), shares[0].answers, shares[0].tasks)


def _assess_share(tasks: list[EvaluationTask], way: EvaluationSetup, seat: RankInfo) -> list[Assessment]:
    """What one rank finds; it scores every ``world_size``-th sequence, and the first rank also answers."""
    with process_group(seat):
        return [_assess_model(task, way, seat) for task in tasks]


def _assess_model(task: EvaluationTask, way: EvaluationSetup, seat: RankInfo) -> Assessment:
    """One rank's share of one model. Ranks that gather layers together all take the same steps."""
    import torch

    from shardmake.data.dataset import load

    evaluation = task.run.evaluation
    network = load_model(
        task.model,
        way.backend,
        seat,
        revision=task.revision,
        trust_remote_code=task.run.trust_remote_code,
        nvme=way.nvme,
    )
    examples = load(task.rundir.data, "eval")
    together = seat.meeting is not None
    rows = range(seat.rank, len(examples), seat.world_size)
    longest = -(-len(examples) // seat.world_size)
    batches = -(-(longest if together else len(rows)) // evaluation.batch_size)
    scores = score(network, examples, rows, evaluation.batch_size, batches)
    speaks = together or seat.rank == 0
    answers = [_answer(network, prompt, evaluation.max_new_tokens) for prompt in task.prompts if speaks]
    results = measure_tasks(network, task.rundir.model, evaluation) if speaks else {}
    del network
    torch.cuda.empty_cache()  # the next model may come to this GPU in another process
    return Assessment(scores, answers, results)


def _side_by_side(
    base: dict[tuple[str, str], float], tuned: dict[tuple[str, str], float]
) -> list[dict[str, str | float]]:
    return [
        {"task": task, "metric": metric, "base": value, "tuned": tuned[task, metric]}
        for (task, metric), value in sorted(base.items())
    ]


def _prompts(run: Run, tokenizer: "PreTrainedTokenizerBase", examples: Examples) -> list[list[int]]:
    """Token ids to answer: the configured questions through the chat template, or the first evaluation examples'."""
    if run.evaluation.prompts:
        return [_ask(tokenizer, prompt) for prompt in run.evaluation.prompts]
    return [_opening(examples[index]) for index in range(min(_PROMPTS, len(examples)))]


def _ask(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    conversation = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))


def _opening(example: Example) -> list[int]:
    """What stands before the first loss token; of a text that carries loss from the start, the first tokens."""
    first = int((example["labels"] != IGNORED).nonzero()[0])
    return example["input_ids"][: first if first > 1 else 16].tolist()


def _samples(
    tokenizer: "PreTrainedTokenizerBase", prompts: list[list[int]], base: Assessment, tuned: Assessment
) -> list[dict[str, str]]:
    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True).strip()

    return [
        {"prompt": _question(tokenizer, prompt), "base": text(before), "tuned": text(after)}
        for prompt, before, after in zip(prompts, base.answers, tuned.answers, strict=True)
    ]


def _question(tokenizer: "PreTrainedTokenizerBase", prompt: list[int]) -> str:
    """What a user said in ``prompt``, without what the chat template puts around it; else all of its text."""
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
    """The greedy continuation of ``prompt``, in token ids."""
    import torch

    ids = torch.tensor([prompt], device=network.device)
    with torch.inference_mode():
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,  # never used: one prompt at a time needs no filling
        )
    return output[0, len(prompt) :].tolist()

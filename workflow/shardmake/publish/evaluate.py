"""Loss and samples of the base and the tuned model on the examples that training never saw.

The tuned model is loaded as its users will load it, with plain ``from_pretrained``; a weight that is missing or that
nothing asked for is an error.
"""

import math
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardmake.config import Run
from shardmake.errors import UserError
from shardmake.receipt import write_json
from shardmake.rundir import RunDir
from shardmake.sources import localize

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Tell = Callable[[str], None]
Example = Mapping[str, "Tensor"]  # input_ids, labels, position_ids of one sequence, int64, each [tokens]
IGNORED = -100


# Upper ends of the length buckets, in tokens of one example; longer ones come last.
BUCKETS = (128, 512, 2048, 8192, 32768)
_PROMPTS = 3


class Examples(Protocol):
    """Sequences by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass
class Score:
    """Sum of the loss over tokens, overall or of one bucket."""

    loss: float = 0.0
    tokens: int = 0

    def as_json(self) -> dict[str, float | int]:
        """Mean loss over tokens, its exponential, and the tokens."""
        mean = self.loss / self.tokens
        return {"loss": mean, "perplexity": math.exp(mean), "tokens": self.tokens}


@dataclass
class Scores:
    """Scores by length bucket."""

    buckets: list[Score] = field(default_factory=lambda: [Score() for _ in (*BUCKETS, None)])

    @property
    def total(self) -> Score:
        """All buckets together."""
        return _sum(self.buckets)

    def as_json(self) -> dict[str, Any]:
        """The total, and each bucket that holds tokens by the most tokens of its examples (None: no limit).

        Raises `UserError` where no token carries loss.
        """
        if not self.total.tokens:
            raise UserError("The evaluation split holds no tokens that carry loss. Check data.eval and data.loss_on.")
        by_length = [
            {"up_to": up_to, **score.as_json()}
            for up_to, score in zip((*BUCKETS, None), self.buckets, strict=True)
            if score.tokens
        ]
        return {**self.total.as_json(), "by_length": by_length}


def _sum(scores: Iterable[Score]) -> Score:
    losses, tokens = zip(*((score.loss, score.tokens) for score in scores), strict=True)
    return Score(math.fsum(losses), sum(tokens))


def evaluate(run: Run, rundir: RunDir, processes: int | None = None, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Write and return ``evaluation.json``.

    ``{"sequences", "tokens", "base": {"loss", "perplexity", "tokens", "by_length"}, "tuned": {...}, "samples":
    [{"prompt", "base", "tuned"}]}``; losses in nats per loss token. ``processes`` share the sequences among them, each
    with the whole model; without it, as many as there are GPUs, or one where a GPU does not hold the model.
    Raises `UserError` if a model cannot be loaded whole or the evaluation split holds no loss tokens.
    """
    from transformers import AutoTokenizer

    from shardmake.data.dataset import load

    run = localize(run, rundir)
    examples = load(rundir.data, "eval")
    tokenizer = AutoTokenizer.from_pretrained(rundir.model)
    prompts = _prompts(run, tokenizer, examples)
    tell(f"Measuring the base and the tuned model on {len(examples):,} sequences.")
    models = [Task(run, rundir, run.model, run.revision, prompts), Task(run, rundir, str(rundir.model), None, prompts)]
    base, tuned = _assess(models, processes or _gpus_that_hold(rundir.model))
    measured = {"base": base.scores.as_json(), "tuned": tuned.scores.as_json()}
    for name, found in measured.items():
        tell(f"{name}: loss {found['loss']:.4f}, perplexity {found['perplexity']:,.2f}, {found['tokens']:,} tokens")
    evaluation = {
        "sequences": len(examples),
        "tokens": base.scores.total.tokens,
        **measured,
        "samples": _samples(tokenizer, prompts, base, tuned),
    }
    write_json(rundir.evaluation, evaluation)
    return evaluation


@dataclass(frozen=True)
class Task:
    """One model to measure, and prompts (token ids) for it to answer."""

    run: Run
    rundir: RunDir
    model: str
    revision: str | None
    prompts: list[list[int]]


@dataclass(frozen=True)
class Assessment:
    """What a model scored and answered (token ids, by prompt)."""

    scores: Scores
    answers: list[list[int]]


def _assess(tasks: list[Task], processes: int) -> list[Assessment]:
    """Measure models one after the other, alone or in processes of their own."""
    if processes == 1:
        return [_assess_share(task, None, 1) for task in tasks]
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        return [
            _joined(list(pool.map(partial(_assess_share, task, world_size=processes), range(processes))))
            for task in tasks
        ]


def _joined(shares: list[Assessment]) -> Assessment:
    buckets = zip(*(share.scores.buckets for share in shares), strict=True)
    return Assessment(Scores([_sum(scores) for scores in buckets]), shares[0].answers)


def _gpus_that_hold(model: Path) -> int:
    """GPUs to measure on side by side: all, if one holds the weights with room for activations; else 1."""
    import torch

    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    count = torch.cuda.device_count()
    return count if count and weights < 0.7 * torch.cuda.get_device_properties(0).total_memory else 1


def _assess_share(task: Task, rank: int | None, world_size: int) -> Assessment:
    """Score every ``world_size``-th sequence from ``rank`` on; the first rank, or the only one (None), also answers."""
    import torch

    from shardmake.data.dataset import load

    evaluation = task.run.evaluation
    network = load_model(task.model, task.revision, task.run.trust_remote_code, rank)
    examples = load(task.rundir.data, "eval")
    rows = range(rank or 0, len(examples), world_size)
    scores = score(network, examples, rows, evaluation.batch_size)
    prompts = [] if rank else task.prompts
    answers = [_answer(network, prompt, evaluation.max_new_tokens) for prompt in prompts]
    del network
    torch.cuda.empty_cache()  # the next model may come to this GPU in another process
    return Assessment(scores, answers)


def load_model(
    model: str, revision: str | None = None, trust_remote_code: bool = False, device: int | None = None
) -> "PreTrainedModel":
    """The model in evaluation mode: on GPU ``device``, else spread over GPUs and host, else on the CPU in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    has_gpu = torch.cuda.is_available()
    network, info = AutoModelForCausalLM.from_pretrained(
        model,
        revision=revision or "main",
        trust_remote_code=trust_remote_code,
        dtype="auto" if has_gpu else torch.float32,
        device_map=("auto" if device is None else {"": device}) if has_gpu else None,
        output_loading_info=True,
    )
    if wrong := {kind: sorted(keys) for kind, keys in info.items() if keys}:
        raise UserError(
            f"{model} does not load whole: {'; '.join(f'{kind}: {keys[:3]}' for kind, keys in wrong.items())}. "
            "Make it again (shardmake consolidate), or check that the base model's files belong together."
        )
    return network.eval()


def score(network: "PreTrainedModel", examples: Examples, rows: Sequence[int], batch_size: int) -> Scores:
    """Sum the loss of ``network`` over the loss tokens of ``rows``, by the length of the example they stand in."""
    import torch

    scores = Scores()
    with torch.inference_mode():
        for start in range(0, len(rows), batch_size):
            _add_batch(network, _batch([examples[row] for row in rows[start : start + batch_size]]), scores)
    return scores


def _add_batch(network: "PreTrainedModel", batch: "dict[str, Tensor]", scores: Scores) -> None:
    """Add one batch of ``[sequences, tokens]``: each position predicts the label after it."""
    import torch

    labels = batch.pop("labels").to(network.device)
    logits = network(**{name: tensor.to(network.device) for name, tensor in batch.items()}, use_cache=False).logits
    buckets = torch.bucketize(_example_lengths(batch["position_ids"]), torch.tensor(BUCKETS)).to(network.device)
    for row in range(len(labels)):
        wanted = labels[row, 1:]
        losses = torch.nn.functional.cross_entropy(
            logits[row, :-1].float(), wanted, reduction="none", ignore_index=IGNORED
        )
        carries = wanted != IGNORED
        for bucket in buckets[row].unique().tolist():
            mine = carries & (buckets[row, 1:] == bucket)
            scores.buckets[bucket].loss += losses[mine].double().sum().item()
            scores.buckets[bucket].tokens += int(mine.sum())


def _batch(examples: Sequence[Example]) -> "dict[str, Tensor]":
    """Sequences side by side, as ``[sequences, tokens]``, filled up on the right.

    Positions restart at 0 with each example of a packed sequence, and with each token of the filling: models take
    that as separate texts that do not see each other.
    """
    from torch.nn.utils.rnn import pad_sequence

    return {
        name: pad_sequence([example[name] for example in examples], batch_first=True, padding_value=filling)
        for name, filling in (("input_ids", 0), ("labels", IGNORED), ("position_ids", 0))
    }


def _example_lengths(position_ids: "Tensor") -> "Tensor":
    """Per token of ``[sequences, tokens]``, the length of the example it stands in: positions restart with each."""
    import torch

    lengths = torch.empty_like(position_ids)
    for row, positions in enumerate(position_ids):
        starts = (positions == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            lengths[row, start:end] = end - start
    return lengths


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

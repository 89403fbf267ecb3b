"""Loss and samples of the base and the tuned model on the examples that training never saw.

The tuned model is loaded as its users will load it, with plain ``from_pretrained``; a weight that is missing or that
nothing asked for is an error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shardmake.config import Run
from shardmake.errors import UserError
from shardmake.receipt import write_json
from shardmake.rundir import RunDir
from shardmake.sources import localize

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
        return Score(sum(b.loss for b in self.buckets), sum(b.tokens for b in self.buckets))

    def as_json(self) -> dict[str, Any]:
        """The total, and each bucket that holds tokens by the most tokens of its examples (None: no limit)."""
        by_length = [
            {"up_to": up_to, **score.as_json()}
            for up_to, score in zip((*BUCKETS, None), self.buckets, strict=True)
            if score.tokens
        ]
        return {**self.total.as_json(), "by_length": by_length}


def evaluate(run: Run, rundir: RunDir) -> dict[str, Any]:
    """Write and return ``evaluation.json``.

    ``{"sequences", "tokens", "base": {"loss", "perplexity", "tokens", "by_length"}, "tuned": {...}, "samples":
    [{"prompt", "base", "tuned"}]}``; losses in nats per loss token.
    Raises `UserError` if a model cannot be loaded whole or the evaluation split holds no loss tokens.
    """
    from transformers import AutoTokenizer

    from shardmake.data.dataset import load

    run = localize(run, rundir)
    examples = load(rundir.data, "eval")
    tokenizer = AutoTokenizer.from_pretrained(rundir.model)
    prompts = _prompts(run, tokenizer, examples)
    base = _assess(run, run.model, run.revision, examples, tokenizer, prompts)
    tuned = _assess(run, str(rundir.model), None, examples, tokenizer, prompts)
    evaluation = {
        "sequences": len(examples),
        "tokens": base.scores["tokens"],
        "base": base.scores,
        "tuned": tuned.scores,
        "samples": [
            {"prompt": tokenizer.decode(prompt, skip_special_tokens=True).strip(), "base": before, "tuned": after}
            for prompt, before, after in zip(prompts, base.answers, tuned.answers, strict=True)
        ],
    }
    write_json(rundir.evaluation, evaluation)
    return evaluation


@dataclass(frozen=True)
class _Assessment:
    scores: dict[str, Any]
    answers: list[str]


def _assess(
    run: Run,
    model: str,
    revision: str | None,
    examples: Examples,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[list[int]],
) -> _Assessment:
    """One model, loaded, measured and let go."""
    network = load_model(model, revision, run.trust_remote_code)
    scores = score(network, examples, run.evaluation.batch_size)
    return _Assessment(scores.as_json(), [_answer(network, tokenizer, prompt, run) for prompt in prompts])


def load_model(model: str, revision: str | None = None, trust_remote_code: bool = False) -> "PreTrainedModel":
    """The model in evaluation mode: on the GPUs, spread if one is too small, else on the CPU in full precision."""
    import torch
    from transformers import AutoModelForCausalLM

    has_gpu = torch.cuda.is_available()
    network, info = AutoModelForCausalLM.from_pretrained(
        model,
        revision=revision or "main",
        trust_remote_code=trust_remote_code,
        dtype="auto" if has_gpu else torch.float32,
        device_map="auto" if has_gpu else None,
        output_loading_info=True,
    )
    if wrong := {kind: sorted(keys) for kind, keys in info.items() if keys}:
        raise UserError(
            f"{model} does not load whole: {'; '.join(f'{kind}: {keys[:3]}' for kind, keys in wrong.items())}. "
            "Make it again (shardmake consolidate), or check that the base model's files belong together."
        )
    return network.eval()


def score(network: "PreTrainedModel", examples: Examples, batch_size: int) -> Scores:
    """Sum the loss of ``network`` over the loss tokens of ``examples``, by the length of the example they stand in."""
    import torch

    scores = Scores()
    with torch.inference_mode():
        for start in range(0, len(examples), batch_size):
            rows = range(start, min(start + batch_size, len(examples)))
            _add_batch(network, _batch([examples[row] for row in rows]), scores)
    if not scores.total.tokens:
        raise UserError("The evaluation split holds no tokens that carry loss. Check data.eval and data.loss_on.")
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


def _answer(network: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompt: list[int], run: Run) -> str:
    """The greedy continuation of ``prompt``, without special tokens."""
    import torch

    ids = torch.tensor([prompt], device=network.device)
    with torch.inference_mode():
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=run.evaluation.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    return tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True).strip()

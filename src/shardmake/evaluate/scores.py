"""Loss over tokens, in total and by the length of the example."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shardmake.core.errors import DataError
from shardmake.run.evaluation import LengthScore, ModelScore

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Example = Mapping[str, "Tensor"]  # input_ids, labels, position_ids of one sequence, int64, each [tokens]
IGNORED = -100
# Upper ends of the length buckets, in tokens of one example; longer ones come last.
BUCKETS = (128, 512, 2048, 8192, 32768)


class Examples(Protocol):
    """Sequences by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass
class Score:
    """Sum of the loss over tokens, overall or of one bucket."""

    loss: float = 0.0
    tokens: int = 0

    def means(self) -> dict[str, Any]:
        """Return mean loss over tokens, its exponential, and the number of tokens."""
        mean = self.loss / self.tokens
        return {"loss": mean, "perplexity": math.exp(mean), "tokens": self.tokens}


@dataclass
class Scores:
    """Scores by length bucket."""

    buckets: list[Score] = field(default_factory=lambda: [Score() for _ in (*BUCKETS, None)])

    @property
    def total(self) -> Score:
        """Sum over all buckets."""
        return add_up(self.buckets)

    def as_record(self) -> ModelScore:
        """Return the total and each non-empty bucket, by the maximum length of its examples (None: no limit).

        Raises `DataError` if no token has loss.
        """
        if not self.total.tokens:
            raise DataError(
                "Cannot evaluate: the evaluation split has no tokens with loss. Check data.eval and data.loss_on."
            )
        by_length = [
            LengthScore(up_to=up_to, **score.means())
            for up_to, score in zip((*BUCKETS, None), self.buckets, strict=True)
            if score.tokens
        ]
        return ModelScore(**self.total.means(), by_length=by_length)


def add_up(scores: Iterable[Score]) -> Score:
    """Return the sum of losses and tokens of ``scores``."""
    losses, tokens = zip(*((score.loss, score.tokens) for score in scores), strict=True)
    return Score(math.fsum(losses), sum(tokens))


def score(
    network: "PreTrainedModel", examples: Examples, rows: Sequence[int], batch_size: int, batches: int | None = None
) -> Scores:
    """Sum the loss of ``network`` over the loss tokens of ``rows``, by the length of their example.

    If ``batches`` exceeds the batches of ``rows``, the remaining calls use the first example and are not counted: ranks
    that gather weights from each other must call the network equally often.
    """
    import torch

    scores, discarded = Scores(), Scores()
    starts = [batch_size * batch for batch in range(-(-len(rows) // batch_size) if batches is None else batches)]
    with torch.inference_mode():
        for start in starts:
            mine = [examples[row] for row in rows[start : start + batch_size]]
            _add_batch(network, _batch(mine or [examples[0]]), scores if mine else discarded)
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
        has_loss = wanted != IGNORED
        for bucket in buckets[row].unique().tolist():
            mine = has_loss & (buckets[row, 1:] == bucket)
            scores.buckets[bucket].loss += losses[mine].double().sum().item()
            scores.buckets[bucket].tokens += int(mine.sum())


def _batch(examples: Sequence[Example]) -> "dict[str, Tensor]":
    """Pad sequences on the right and stack them as ``[sequences, tokens]``.

    Positions restart at 0 with each example of a packed sequence and with each padding token. Models treat these as
    separate texts without attention between them.
    """
    from torch.nn.utils.rnn import pad_sequence

    return {
        name: pad_sequence([example[name] for example in examples], batch_first=True, padding_value=padding)
        for name, padding in (("input_ids", 0), ("labels", IGNORED), ("position_ids", 0))
    }


def _example_lengths(position_ids: "Tensor") -> "Tensor":
    """Return for each token of ``[sequences, tokens]`` the length of its example; positions restart with each one."""
    import torch

    lengths = torch.empty_like(position_ids)
    for row, positions in enumerate(position_ids):
        starts = (positions == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            lengths[row, start:end] = end - start
    return lengths

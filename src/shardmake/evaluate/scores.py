"""Loss over tokens and exact answers, in total, by the length of the example, and by its source."""

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from shardmake.core.errors import DataError, ModelError
from shardmake.core.failures import is_full_gpu
from shardmake.run.evaluation import LengthScore, ModelScore, SourceScore

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from shardmake.evaluate.losses import LossPerToken

Example = Mapping[str, "Tensor"]  # input_ids, labels, position_ids of one sequence, int64, each [tokens]
IGNORED = -100
# Upper ends of the length buckets, in tokens of one example; longer ones come last.
BUCKETS = (128, 512, 2048, 8192, 32768)
_WIDTH = len(BUCKETS) + 1


class Examples(Protocol):
    """Sequences by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


_LARGEST_LOSS = math.log(sys.float_info.max)
"""The exponential of a larger loss, in nats, is not a floating-point number."""


@dataclass
class Score:
    """Sum of the loss over tokens, and the number of examples and of exact ones, overall or of one bucket."""

    loss: float = 0.0
    tokens: int = 0
    examples: int = 0
    exact: int = 0

    def means(self) -> dict[str, Any]:
        """Return mean loss over tokens, its exponential, the number of tokens, and the share of exact examples.

        The exponential is None if it is too large for a float. Raises `ModelError` if the loss is not finite.
        """
        mean = self.loss / self.tokens
        if not math.isfinite(mean):
            raise ModelError(
                f"Evaluation failed: the model's loss is {mean:.6g} per token. Its weights are damaged or the training "
                "diverged. Look at the losses with shardmake status NAME, and train again with a lower learning_rate."
            )
        perplexity = math.exp(mean) if mean < _LARGEST_LOSS else None
        return {"loss": mean, "perplexity": perplexity, "tokens": self.tokens, "exact": self.exact / self.examples}


@dataclass(frozen=True)
class ExampleLoss:
    """The loss of one example: the number of its sequence, and the position of its first token in it."""

    sequence: int
    start: int
    tokens: int
    """Tokens with loss."""
    loss: float
    """Mean over these, nats per token."""
    exact: bool
    """True if each of these is the most likely one."""


@dataclass
class Scores:
    """Scores by the source of the examples, and within it by length bucket; and those of each example."""

    bins: list[Score] = field(default_factory=lambda: [Score() for _ in range(_WIDTH)])
    examples: list[ExampleLoss] = field(default_factory=list)

    @property
    def total(self) -> Score:
        """Sum over all bins."""
        return add_up(self.bins)

    def as_record(self, sources: Sequence[str] = ()) -> ModelScore:
        """Return the total, each non-empty bucket by the maximum length of its examples, and each named source.

        Raises `DataError` if no token has loss.
        """
        if not self.total.tokens:
            raise DataError(
                "Cannot evaluate: the evaluation split has no tokens with loss. Check data.eval and data.loss_on."
            )
        by_length = [
            LengthScore(up_to=up_to, **score.means())
            for number, up_to in enumerate((*BUCKETS, None))
            if (score := add_up(self.bins[number::_WIDTH])).tokens
        ]
        by_source = [
            SourceScore(name=name, **add_up(self.bins[number * _WIDTH : (number + 1) * _WIDTH]).means())
            for number, name in enumerate(sources)
        ]
        return ModelScore(**self.total.means(), by_length=by_length, by_source=by_source)


def add_up(scores: Iterable[Score]) -> Score:
    """Return the sum of ``scores``."""
    losses, *counts = zip(*map(astuple, scores), strict=True)
    return Score(math.fsum(losses), *map(sum, counts))


class PassOutOfMemoryError(RuntimeError):
    """A pass over several sequences did not fit the GPU; the argument is the number of its tokens with padding."""

    @property
    def tokens(self) -> int:
        """Tokens of the pass, with padding."""
        return int(self.args[0])


def plan_passes(lengths: Sequence[int], tokens: int, ranks: int) -> list[list[int]]:
    """Group sequences (numbers) of similar length into passes, the longest first.

    A pass has at most ``tokens`` tokens with padding, or one sequence, and no more sequences than a rank's share.
    """
    share = -(-len(lengths) // ranks)
    passes: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        newest = passes[-1] if passes else []
        if newest and len(newest) < share and (len(newest) + 1) * lengths[newest[0]] <= tokens:
            newest.append(row)
        else:
            passes.append([row])
    return passes


def score(
    network: "PreTrainedModel",
    examples: Examples,
    passes: Sequence[Sequence[int]],
    sequences_of_sources: Sequence[int] = (),
) -> Scores:
    """Sum the loss of ``network`` over the loss tokens of ``passes``, by the length of their example.

    ``sequences_of_sources`` is the number of sequences of each source, if there are several; they are in this order.
    A pass without sequences runs the first example, which is not counted: ranks that gather weights from each other
    must call the network equally often. If a pass does not fit the GPU, `PassOutOfMemoryError` is raised, or
    `ModelError` for one sequence.
    """
    import torch

    from shardmake.evaluate.losses import LossPerToken

    ends = list(accumulate(sequences_of_sources)) or [len(examples)]
    scores = Scores([Score() for _ in range(len(ends) * _WIDTH)])
    with torch.inference_mode():
        measure = LossPerToken(network, examples[0]["input_ids"])
        for rows in passes:
            batch = pad_examples([examples[row] for row in rows or [0]])
            with smaller_after_out_of_memory(*batch["input_ids"].shape):
                first_bins = torch.tensor([bisect_right(ends, row) * _WIDTH for row in rows or [0]])
                found = _losses(measure, batch, first_bins, len(scores.bins), rows)
            if rows:
                scores = combine([scores, found])
    return scores


def combine(parts: Sequence[Scores]) -> Scores:
    """Return the scores of all examples of ``parts``, in the order of their sequences."""
    bins = [add_up(scores) for scores in zip(*(part.bins for part in parts), strict=True)]
    examples = [example for part in parts for example in part.examples]
    return Scores(bins, sorted(examples, key=lambda example: (example.sequence, example.start)))


@contextmanager
def smaller_after_out_of_memory(sequences: int, length: int) -> Iterator[None]:
    """Turn CUDA's out-of-memory error in a pass into the errors of `score`."""
    try:
        yield
    except RuntimeError as error:
        if not is_full_gpu(error):
            raise
        if sequences > 1:
            raise PassOutOfMemoryError(sequences * length) from error
        raise ModelError(
            f"Evaluation failed: a pass over one sequence of {length} tokens. The GPU ran out of memory. Set "
            "evaluation.backend to zero3-offload, which keeps the weights in host memory."
        ) from error


def _losses(
    measure: "LossPerToken", batch: "dict[str, Tensor]", first_bins: "Tensor", bins: int, rows: Sequence[int]
) -> Scores:
    """Return the scores of one batch of ``[sequences, tokens]``: each position predicts the label after it.

    Greedy decoding answers an example word for word if each of its tokens is the most likely one: after a right token
    it sees what the loss was measured on.

    ``first_bins`` has the first bin of each sequence's source, ``bins`` is the number of bins, ``rows`` has the number
    of each sequence.
    """
    import torch

    device, labels, position_ids = measure.network.device, batch["labels"], batch["position_ids"]
    inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
    losses, likeliest = measure(inputs, labels)
    learned = labels[:, 1:] != IGNORED
    numbers = (position_ids == 0).flatten().cumsum(0).reshape(position_ids.shape)  # of the example of each token
    found, index = numbers[:, 1:][learned].unique(return_inverse=True)
    count = len(found)
    rows_of_tokens, columns = learned.nonzero(as_tuple=True)
    row = torch.zeros_like(found).scatter(0, index, rows_of_tokens)
    start = torch.zeros_like(found).scatter(0, index, columns + 1 - position_ids[:, 1:][learned])
    lengths = numbers.flatten().bincount()[found]
    values = (
        row,
        start,
        torch.bucketize(lengths, torch.tensor(BUCKETS)) + first_bins[row],
        torch.bincount(index, minlength=count),
        torch.bincount(index, losses.double().cpu(), count),
        torch.bincount(index[~likeliest.cpu()], minlength=count) == 0,
    )
    scores = Scores([Score() for _ in range(bins)])
    for place, first, number, tokens, loss, exact in zip(*(value.tolist() for value in values), strict=True):
        scores.bins[number] = add_up([scores.bins[number], Score(loss, tokens, 1, int(exact))])
        if place < len(rows):
            scores.examples.append(ExampleLoss(rows[place], first, tokens, loss / tokens, exact))
    return scores


def pad_examples(examples: Sequence[Example]) -> "dict[str, Tensor]":
    """Pad sequences on the right and stack them as ``[sequences, tokens]``.

    Positions restart at 0 with each example of a packed sequence and with each padding token. Models treat these as
    separate texts without attention between them.
    """
    from torch.nn.utils.rnn import pad_sequence

    return {
        name: pad_sequence([example[name] for example in examples], batch_first=True, padding_value=padding)
        for name, padding in (("input_ids", 0), ("labels", IGNORED), ("position_ids", 0))
    }

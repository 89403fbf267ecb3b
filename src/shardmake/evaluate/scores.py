"""Loss over tokens and exact answers, in total, by the length of the example, and by its source."""

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


class Examples(Protocol):
    """Sequences by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


_LARGEST_LOSS = math.log(sys.float_info.max)
"""The exponential of a larger loss, in nats, is not a floating-point number."""


@dataclass(frozen=True)
class ExampleLoss:
    """The loss of one example: the number of its sequence, and the position of its first token in it."""

    sequence: int
    start: int
    source: int
    """Number of its source."""
    bucket: int
    """Number of its length in `BUCKETS`."""
    tokens: int
    """Tokens with loss."""
    total: float
    """Sum over these, nats."""
    exact: bool
    """True if each of these is the most likely one."""

    @property
    def loss(self) -> float:
        """Mean over its tokens."""
        return self.total / self.tokens


def means(examples: Sequence[ExampleLoss]) -> dict[str, Any]:
    """Return mean loss over tokens, its exponential, the number of tokens, and the share of exact examples.

    The exponential is None if it is too large for a float. Raises `ModelError` if the loss is not finite.
    """
    tokens = sum(example.tokens for example in examples)
    mean = math.fsum(example.total for example in examples) / tokens
    if not math.isfinite(mean):
        raise ModelError(
            f"Evaluation failed: the model's loss is {mean:.6g} per token. Its weights are damaged or the training "
            "diverged. Look at the losses with shardmake status NAME, and train again with a lower learning_rate."
        )
    perplexity = math.exp(mean) if mean < _LARGEST_LOSS else None
    exact = sum(example.exact for example in examples) / len(examples)
    return {"loss": mean, "perplexity": perplexity, "tokens": tokens, "exact": exact}


def as_record(examples: Sequence[ExampleLoss], sources: Sequence[str] = ()) -> ModelScore:
    """Return the means of all, by the maximum length of the examples, and of each named source.

    Raises `DataError` if no token has loss.
    """
    if not examples:
        raise DataError(
            "Cannot evaluate: the evaluation split has no tokens with loss. Check data.eval and data.loss_on."
        )
    by_length = [
        LengthScore(up_to=up_to, **means(found))
        for number, up_to in enumerate((*BUCKETS, None))
        if (found := [example for example in examples if example.bucket == number])
    ]
    by_source = [
        SourceScore(name=name, **means([example for example in examples if example.source == number]))
        for number, name in enumerate(sources)
    ]
    return ModelScore(**means(examples), by_length=by_length, by_source=by_source)


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
) -> list[ExampleLoss]:
    """Return the loss of each example in ``passes`` under ``network``, in the order of their sequences.

    ``sequences_of_sources`` is the number of sequences of each source, if there are several; they are in this order.
    A pass without sequences runs the first example, which is not counted: ranks that gather weights from each other
    must call the network equally often. If a pass does not fit the GPU, `PassOutOfMemoryError` is raised, or
    `ModelError` for one sequence.
    """
    import torch

    from shardmake.evaluate.losses import LossPerToken

    ends = list(accumulate(sequences_of_sources))
    found: list[ExampleLoss] = []
    with torch.inference_mode():
        measure = LossPerToken(network, examples[0]["input_ids"])
        for rows in passes:
            batch = pad_examples([examples[row] for row in rows or [0]])
            with smaller_after_out_of_memory(*batch["input_ids"].shape):
                losses = _losses(measure, batch)
            for place, *values in losses if rows else ():
                found.append(ExampleLoss(rows[place], values[0], bisect_right(ends, rows[place]), *values[1:]))
    return in_order(found)


def in_order(examples: Iterable[ExampleLoss]) -> list[ExampleLoss]:
    """Return ``examples`` in the order of their sequences."""
    return sorted(examples, key=lambda example: (example.sequence, example.start))


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


def _losses(measure: "LossPerToken", batch: "dict[str, Tensor]") -> Iterator[tuple[Any, ...]]:
    """Return row, first position, number of the length's bucket, tokens, summed loss and exactness of each example.

    Each position of ``batch``, ``[sequences, tokens]``, predicts the label after it. Greedy decoding answers an example
    word for word if each of its tokens is the most likely one: after a right token it sees what the loss was measured
    on.
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
    lengths = numbers.flatten().bincount()[found]
    values = (
        torch.zeros_like(found).scatter(0, index, rows_of_tokens),
        torch.zeros_like(found).scatter(0, index, columns + 1 - position_ids[:, 1:][learned]),
        torch.bucketize(lengths, torch.tensor(BUCKETS)),
        torch.bincount(index, minlength=count),
        torch.bincount(index, losses.double().cpu(), count),
        torch.bincount(index[~likeliest.cpu()], minlength=count) == 0,
    )
    return zip(*(value.tolist() for value in values), strict=True)


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

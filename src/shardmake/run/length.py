"""The length of a training: steps, warm-up, learning rates, passes over the data, and whether it can learn anything."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final, NamedTuple

from shardmake.config.methods import METHODS
from shardmake.config.models import Run
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.optimizers import STATELESS
from shardmake.core.errors import ConfigError
from shardmake.core.units import plural

FEW_STEPS: Final = 10
"""Optimizer steps below which a training is hardly one."""
_FAR_ABOVE: Final = 1000
"""Times the usual learning rate above which one is doubtful; small models learn from scratch at 300 times."""
_PACKED: Final = 1000
"""Examples that are packed for the estimate of the amount of data."""


def optimizer_steps(epochs: float, sequences: int, batch: int) -> int:
    """Return Trainer's number of steps; a part of an epoch is rounded up."""
    return max(1, math.ceil(epochs * steps_per_epoch(sequences, batch)))


def steps_per_epoch(sequences: int, batch: int) -> int:
    """Return the whole batches of an epoch; fewer sequences than one are repeated until they fill it."""
    return max(1, sequences // batch)


def warmup_steps(run: Run, steps: int) -> int:
    """Return the steps of the warm-up; transformers ignores it for the schedule constant."""
    return 0 if run.scheduler == "constant" else math.ceil(steps * run.warmup_ratio)


def planned_rates(
    schedule: str,
    rate: float,
    warmup: int,
    steps: int,
    arguments: dict[str, Any] | None = None,
    at: Iterable[int] | None = None,
) -> list[float]:
    """Return the learning rates of transformers' ``schedule`` at the steps of `rates`, or ``at`` others."""
    import torch
    from transformers.optimization import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    return rates(get_scheduler(schedule, optimizer, warmup, steps, arguments), steps, at)


def rates(scheduler: Any, steps: int, at: Iterable[int] | None = None) -> list[float]:
    """Return the rates of the first, second, third, middle and last step; none if a scheduler's future is unknown."""
    from torch.optim.lr_scheduler import LambdaLR

    if not isinstance(scheduler, LambdaLR):
        return []
    factor, rate = scheduler.lr_lambdas[0], float(scheduler.base_lrs[0])
    return [rate * factor(step) for step in at or (0, 1, 2, steps // 2, max(0, steps - 1))]


def batch_for(sequences: float, steps: int, ranks: int) -> int:
    """Return a batch that makes ``sequences`` at least ``steps``: ``ranks`` times a power of two, or 0 for none."""
    most = int(sequences / steps / ranks)
    return ranks * 2 ** (most.bit_length() - 1) if most else 0


@dataclass(frozen=True)
class Length:
    """The length of the training of ``run`` with so many examples, tokens (without padding) and sequences."""

    run: Run
    examples: int
    tokens: int
    sequences: int
    ranks: int
    """Ranks of a node, of which the batch is a multiple."""
    is_estimate: bool = False
    """The numbers of the data are estimated from some of the rows."""

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.run.max_steps or optimizer_steps(self.run.epochs or 0, self.sequences, self.run.global_batch_size)

    @property
    def passes(self) -> float:
        """How often each sequence is used."""
        return self.steps * self.run.global_batch_size / self.sequences

    def describe(self) -> str:
        """Return the data, the steps and the warm-up in a line, without the steps for a script, which decides them."""
        about = "about " if self.is_estimate else ""
        data = (
            f"{about}{plural(self.examples, 'training example')}, {plural(self.tokens, 'token')} in "
            f"{plural(self.sequences, 'sequence')}"
        )
        if self.run.script:
            return data
        warmup = warmup_steps(self.run, self.steps)
        length = f"{plural(self.steps, 'optimizer step')} of {plural(self.run.global_batch_size, 'sequence')}"
        asked = f"epochs: {self.run.epochs:g}" if self.run.epochs else f"max_steps: {self.run.max_steps}"
        rest = self.sequences % self.run.global_batch_size if self.sequences > self.run.global_batch_size else 0
        left_out = f"; an epoch leaves out {plural(rest, 'sequence')}, too few for a batch, others each time"
        return (
            f"{data}; {asked} is {about if self.run.epochs else ''}{length}, each sequence used {self.passes:.3g} times"
            f", {warmup or 'none'} of the steps for warm-up{left_out if rest and not self.is_estimate else ''}"
        )

    def check(self) -> list[str]:
        """Return warnings about a training that learns little, each with what helps.

        Raises:
            ConfigError: It certainly learns nothing, because its only step has the learning rate 0.
        """
        run, batch = self.run, self.run.global_batch_size
        if run.script:
            return []
        warnings = []
        is_whole = bool(run.max_steps) or batch <= self.sequences  # an epoch is whole batches
        if self.steps == 1 and warmup_steps(run, 1):
            message = (
                "This training learns nothing: its only optimizer step is the first of the warm-up, with learning rate "
                f"0 ({self.describe()}). {self._more_steps()}{', or warmup_ratio: 0' if is_whole else ''}."
            )
            if run.max_steps or not self.is_estimate or 2 * self.sequences * (run.epochs or 1) <= batch:
                raise ConfigError(message)
            warnings.append(message)
        elif self.steps < FEW_STEPS:
            warnings.append(f"The training has only {plural(self.steps, 'optimizer step')}. {self._more_steps()}.")
        if batch > self.sequences:
            message = (
                f"global_batch_size: {batch} is larger than the data of {plural(self.sequences, 'sequence')}: a step "
                f"uses each sequence {batch / self.sequences:.3g} times. {self._smaller_batch()}."
            )
            if run.epochs and (not self.is_estimate or 2 * self.sequences <= batch):
                raise ConfigError(f"{message} Or count steps instead of epochs (max_steps).")
            warnings.append(message)
        return [*warnings, *self._doubtful_values()]

    def _doubtful_values(self) -> Iterator[str]:
        """Yield a warning for each value that a typing error may have made."""
        run, usual = self.run, METHODS[self.run.method].learning_rate
        if run.learning_rate and run.learning_rate > _FAR_ABOVE * usual and run.optimizer != STATELESS:
            yield (
                f"learning_rate: {run.learning_rate:g} is more than {_FAR_ABOVE:,} times a usual rate of method: "
                f"{run.method}. Begin with {usual:g}."
            )
        if isinstance(run.eval_every_steps, int) and run.eval_every_steps > self.steps:
            yield (
                f"eval_every_steps: {run.eval_every_steps} is beyond the last of {plural(self.steps, 'step')}, so the "
                "training is never evaluated on the way. Set auto."
            )

    @property
    def _least_batch(self) -> int:
        return self.ranks * OBJECTIVES[self.run.objective].least_micro_batch

    def _more_steps(self) -> str:
        """Return settings with which there are `FEW_STEPS`, as the start of a sentence."""
        if self.run.max_steps:
            return f"Set max_steps: {FEW_STEPS} or more"
        epochs = self.run.epochs or 0
        longer = f"epochs: {math.ceil(FEW_STEPS / steps_per_epoch(self.sequences, self.run.global_batch_size))}"
        smaller = batch_for(self.sequences * epochs, FEW_STEPS, self._least_batch)
        while smaller and optimizer_steps(epochs, self.sequences, smaller) < FEW_STEPS:  # an epoch is whole batches
            smaller = smaller // 2 if smaller > self._least_batch else 0
        if self.run.global_batch_size > self.sequences:  # more epochs of no whole batch are none
            return f"Set global_batch_size: {smaller}" if smaller else self._smaller_batch()
        return f"Set global_batch_size: {smaller} or {longer}" if smaller else f"Set {longer}"

    def _smaller_batch(self) -> str:
        fitting = batch_for(self.sequences, 1, self._least_batch)
        return f"Set global_batch_size: {fitting} or less" if fitting else "Add data, or plan fewer ranks"


class Sampled(NamedTuple):
    """The encoded rows of one source: the number of ``rows``, and the ``lengths`` of their examples in tokens."""

    rows: int
    lengths: list[int]


def estimate_length(run: Run, counts: Sequence[int], sampled: Sequence[Sampled], ranks: int) -> Length | None:
    """Return the length of a training on sources of ``counts`` rows, of which ``sampled`` were encoded.

    Both begin with the sources of training examples. None if nothing would be left, and for raw data.
    """
    sources = run.data.sources
    if run.data.is_raw:
        return None
    held_out = [0 if run.data.eval is not None else max(1, round(count * run.data.eval_fraction)) for count in counts]
    examples = [
        min(count - evaluated, source.limit or count) * len(part.lengths) / part.rows
        for source, count, evaluated, part in zip(sources, counts, held_out, sampled, strict=False)
    ]
    used = [count * source.repeat for source, count in zip(sources, examples, strict=True)]
    weights = [source.weight for source in sources if source.weight is not None]
    if weights:  # drawn by weight until each source was read once
        total = max(count / weight for count, weight in zip(examples, weights, strict=True))
        used = [total * weight for weight in weights]
    if not sum(used) or not all(part.lengths for part in sampled[: len(sources)]):
        return None
    lengths = [
        length
        for part, count in zip(sampled, used, strict=False)
        for length in islice(cycle(part.lengths), max(1, round(count * min(1, _PACKED / sum(used)))))
    ]
    scale = sum(used) / len(lengths)
    sequences = count_packed(lengths, run.sequence_length) if run.packing else len(lengths)
    return Length(
        run, examples=round(sum(used)), tokens=round(scale * sum(lengths)), sequences=max(1, round(scale * sequences)),
        ranks=ranks, is_estimate=True,
    )  # fmt: skip


def count_packed(lengths: Sequence[int], room: int) -> int:
    """Return the number of sequences of ``room`` tokens that hold examples of ``lengths``, packed by best fit."""
    rooms: list[int] = []
    count = 0
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        left = rooms.pop(place) if place < len(rooms) else room
        count += left == room
        insort(rooms, left - length)
    return count

"""The retention rule: which checkpoints stay on disk."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmake.checkpoint.record import CheckpointRecord


@dataclass(frozen=True)
class Retention:
    """A retention rule: keep the newest checkpoints, the best one, and one at regular steps."""

    keep: int = 2
    """Number of newest checkpoints to keep; at least 1."""
    best: bool = False
    """Also keep the checkpoint with the lowest evaluation loss."""
    every_steps: int | None = None
    """Also keep the first checkpoint at or after every multiple of this number of steps."""

    def kept(self, records: Sequence[CheckpointRecord]) -> set[int]:
        """Return the steps of ``records`` to keep; always at least one."""
        steps = sorted((record.step for record in records), reverse=True)
        losses = {record.step: record.eval_loss for record in records if record.eval_loss is not None}
        finite = [(loss, step) for step, loss in losses.items() if math.isfinite(loss)]
        kept = set(steps[: max(1, self.keep)])
        if self.best and finite:
            kept.add(min(finite)[1])
        if self.every_steps:
            first = {step // self.every_steps: step for step in steps if step >= self.every_steps}
            kept |= set(first.values())
        return kept

    def minimal(self) -> "Retention":
        """Return the rule for a full disk: keep the newest checkpoint alone, and the best one if asked for."""
        return replace(self, keep=1, every_steps=None)

"""The learning rates of a schedule, as they are recorded at the first step."""

from collections.abc import Iterable
from typing import Any


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

"""Time what a rank computes itself, without its waits for other ranks."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardmake.run.usage import WINDOW_SECONDS, WINDOW_STEPS, WINDOWS

_MOST_LAYERS = 32


class ComputeTimer:
    """Times the forward passes of up to `_MOST_LAYERS` linear layers of a model, spread over it, in each step.

    Whole steps take equally long on all ranks, because the fast ones wait in collectives. A linear layer contains no
    collective: engines gather its weights before the hook of this class, which runs last before and first after the
    layer. On a GPU the times are those between two events in its stream, which are read a step later.
    """

    def __init__(self) -> None:
        self.windows: deque[float] = deque(maxlen=WINDOWS)
        """Mean seconds per step of the last windows of `WINDOW_STEPS` steps and `WINDOW_SECONDS`, or longer ones."""
        self._sums: list[float] = []
        self._since = time.monotonic()
        self._passes: list[tuple[Any, Any]] = []
        self._before: list[tuple[Any, Any]] = []
        self._start: Any = None
        self._mark: Callable[[], Any] | None = None

    def attach(self, model: nn.Module, device: torch.device) -> None:
        """Time the layers of ``model``, which computes on ``device``, once its engine has prepared it."""
        if self._mark:
            return
        layers = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
        self._mark = _event if device.type == "cuda" else time.perf_counter
        for layer in layers[:: -(-len(layers) // _MOST_LAYERS) or 1]:
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end, prepend=True)

    def _begin(self, layer: nn.Module, *_: Any) -> None:
        self._start = self._mark() if self._mark and layer.training else None

    def _end(self, *_: Any) -> None:
        if self._mark and self._start is not None:
            self._passes.append((self._start, self._mark()))

    def end_step(self) -> None:
        """Add up the passes of the step before this one."""
        before, self._before, self._passes = self._before, self._passes, []
        if before:
            self._sums.append(sum(_seconds(start, end) for start, end in before))
        if len(self._sums) >= WINDOW_STEPS and time.monotonic() - self._since >= WINDOW_SECONDS:
            self.windows.append(sum(self._sums) / len(self._sums))
            self._sums, self._since = [], time.monotonic()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000

"""Write the heartbeat of a rank, with the time of what it computes itself, without its waits for other ranks."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.pytorch_utils import Conv1D

from shardmake.run.attempt import AttemptDir, write_heartbeat
from shardmake.run.usage import WINDOW_SECONDS, WINDOW_STEPS, WINDOWS
from shardmake.train.callbacks.best_effort import BestEffortWriter

HEARTBEAT_SECONDS = 2.0
MEDIAN_OVER_STEPS = 20


class HeartbeatCallback(TrainerCallback):
    """Write this rank's step, phase and time, at most once per `HEARTBEAT_SECONDS` within a phase.

    The worker of the node reads the heartbeats to detect a rank that hangs (`shardmake.launch.watchdog`).
    """

    def __init__(self, folder: AttemptDir, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.last = ("", 0.0)
        self.writer = BestEffortWriter("Heartbeats")
        self.step_start = 0.0
        self.first_step_seconds = 0.0
        self.step_seconds: deque[float] = deque(maxlen=MEDIAN_OVER_STEPS)
        self.compute = ComputeTimer()

    def beat(self, phase: str, step: int) -> None:
        """Write a heartbeat if the phase has changed or the last heartbeat is old enough."""
        last_phase, last_time = self.last
        if phase != last_phase or time.time() - last_time >= HEARTBEAT_SECONDS:
            self.last = (phase, time.time())
            usual = median(self.step_seconds) if self.step_seconds else self.first_step_seconds
            with self.writer.write():
                write_heartbeat(self.folder, self.rank, phase, step, usual, self.compute.windows)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the phase of the first step, which may compile kernels and take long."""
        if "model" in kwargs and not args.torch_compile:  # the compiler would trace the hooks
            self.compute.attach(kwargs["model"], args.device)
        self.step_start = time.monotonic()
        self.beat("first step", state.global_step)

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report one of the accumulated passes."""
        if self.first_step_seconds:
            self.beat("train", state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report a step, and measure its time."""
        seconds = time.monotonic() - self.step_start
        if self.first_step_seconds:
            self.step_seconds.append(seconds)
        else:
            self.first_step_seconds = seconds
        self.step_start += seconds
        self.compute.end_step()
        self.beat("evaluate" if control.should_evaluate else _after_evaluation(control), state.global_step)

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report one batch of an evaluation."""
        self.beat("evaluate", state.global_step)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the end of an evaluation."""
        self._resume_steps(_after_evaluation(control), state.global_step)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the end of a save."""
        self._resume_steps("train", state.global_step)

    def _resume_steps(self, phase: str, step: int) -> None:
        """Exclude the time of an evaluation or a save from the next step's time."""
        self.step_start = time.monotonic()
        self.beat(phase, step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the end of the last step."""
        self.beat("end", state.global_step)


def _after_evaluation(control: TrainerControl) -> str:
    return "save" if control.should_save else "train"


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

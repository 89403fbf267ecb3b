"""Write the heartbeat of a rank."""

import time
from collections import deque
from statistics import median
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from shardmake.run.attempt import AttemptDir, write_heartbeat
from shardmake.train.callbacks.best_effort import BestEffortWriter
from shardmake.train.callbacks.compute_timer import ComputeTimer

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

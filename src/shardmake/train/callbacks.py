"""What watches a training: metrics, when to save, the agreed stop, the heartbeat."""

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shardmake.checkpoint.interval import interval_seconds
from shardmake.run.attempt import AttemptDir, write_heartbeat
from shardmake.train.checkpoint_saver import Saver

HEARTBEAT_SECONDS = 2.0
MEDIAN_OVER_STEPS = 20


class BestEffortWriter:
    """Writes that training can do without: a file system that others have filled does not end it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.has_told = False

    @contextlib.contextmanager
    def write(self) -> Iterator[None]:
        """Let an `OSError` pass, and tell of the first."""
        try:
            yield
        except OSError as error:
            if not self.has_told:
                print(f"{self.what} cannot be written for now, and training goes on: {error}", flush=True)
            self.has_told = True


class MetricsCallback(TrainerCallback):
    """One JSON object a line in ``metrics.jsonl``, written by rank 0, stitched across attempts by step.

    ``tokens`` counts the tokens of all ranks since step 0, padding included; ``tokens_per_second`` is the rate since
    the line before.
    """

    def __init__(self, path: Path, tokens_per_step: int, attempt: int) -> None:
        self.path = path
        self.tokens_per_step = tokens_per_step
        self.attempt = attempt
        self.last = (time.time(), 0)
        self.spare = BestEffortWriter("Metrics")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget the lines of steps that will be done again."""
        self.last = (time.time(), state.global_step)
        if state.is_world_process_zero and self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= state.global_step]
            self.path.write_text("".join(kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append what the Trainer logged."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        now, step = time.time(), state.global_step
        line: dict[str, Any] = {"step": step, "time": now, "attempt": self.attempt}
        line |= {key: logs[key] for key in ("loss", "learning_rate", "grad_norm", "eval_loss") if key in logs}
        line["tokens"] = step * self.tokens_per_step
        if "loss" in logs:
            before, step_before = self.last
            line["tokens_per_second"] = (step - step_before) * self.tokens_per_step / max(now - before, 1e-9)
            self.last = (now, step)
        if memory := _device_memory():
            line["memory"] = memory
        with self.spare.write():
            _append(self.path, json.dumps(line) + "\n")


def _append(path: Path, text: str) -> None:
    """Append all of ``text`` or nothing."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a") as file:
            file.write(text)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise


def _step_of(line: str) -> float:
    """Step of a metrics line; a line that a kill cut short counts as never."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return float("inf")


def _device_memory() -> dict[str, int]:
    """Peak bytes of the caching allocator on this rank's GPU; empty on CPU."""
    if not torch.cuda.is_available():
        return {}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


class SaveScheduler(TrainerCallback):
    """Sets how many steps lie between two saves, and lets each saved step be evaluated where the best one is kept.

    It comes after `StopOnRequest`, because a stop that was asked for saves at once and evaluates nothing.

    Trainer saves at the multiples of ``state.save_steps``, which it takes from the checkpoint it resumes from; here it
    is what the configuration says now. With ``mtbf_seconds`` it is Young's interval for the measured time that a save
    holds training up, and for that of a step, from the first save on, which comes after `FIRST_SAVE` steps: it
    measures, and shows early that saving works. It is never shorter than the newest checkpoint's upload took.
    """

    FIRST_SAVE = 10

    def __init__(self, saver: Saver, mtbf_seconds: float | None) -> None:
        self.saver = saver
        self.mtbf_seconds = mtbf_seconds
        self.stepping = 0.0
        self.steps = 0
        self.began = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget the interval of the attempt before."""
        state.compute_steps(args, state.max_steps)
        if self.mtbf_seconds:
            state.save_steps = self.FIRST_SAVE

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The forward passes start now."""
        self.began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step, but for this process's first one, which may compile kernels; then see what to evaluate."""
        if self.steps:
            self.stepping += time.monotonic() - self.began
        self.steps += 1
        if control.should_training_stop and state.global_step < state.max_steps:
            control.should_evaluate = False  # it comes before the save, which a time limit may not wait for
        elif control.should_save and self.saver.retention.best:
            control.should_evaluate = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set the interval from what was measured; rank 0's clock decides for all."""
        if not self.mtbf_seconds or self.saver.seconds is None or self.steps < 2:
            return
        wanted = interval_seconds(self.saver.seconds, self.mtbf_seconds, self.saver.upload_seconds)
        steps = torch.tensor([max(1, math.ceil(wanted / (self.stepping / (self.steps - 1))))], device=args.device)
        if dist.is_initialized():
            dist.broadcast(steps, src=0)
        if state.is_world_process_zero and state.save_steps != steps.item():
            young = f"by Young's formula for a failure every {self.mtbf_seconds / 3600:.0f} h"
            print(
                f"A save takes {self.saver.seconds:.1f} s; from now on every {steps.item()} steps ({wanted / 60:.0f} "
                f"min), {'as long as an upload takes' if wanted == self.saver.upload_seconds else young}.",
                flush=True,
            )
        state.save_steps = int(steps.item())


class StopOnRequest(TrainerCallback):
    """Save and stop when a stop file appears. Rank 0 looks, at a step's end; all ranks act on what it saw."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.requested = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree on stopping after this step."""
        flag = torch.tensor([int(any(file.exists() for file in self.files))], device=args.device)
        if dist.is_initialized():
            dist.broadcast(flag, src=0)
        if flag.item():
            self.requested = True
            control.should_save = True
            control.should_training_stop = True


class HeartbeatCallback(TrainerCallback):
    """Write this rank's step, phase and time, at most every `HEARTBEAT_SECONDS` within a phase.

    The node's worker reads it: a rank that is silent for too long hangs (`shardmake.launch.watchdog`).
    """

    def __init__(self, folder: AttemptDir, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.last = ("", 0.0)
        self.spare = BestEffortWriter("Heartbeats")
        self.step_began = 0.0
        self.first_step = 0.0
        self.step_seconds: deque[float] = deque(maxlen=MEDIAN_OVER_STEPS)

    def beat(self, phase: str, step: int) -> None:
        """Say where this rank is."""
        before, when = self.last
        if phase != before or time.time() - when >= HEARTBEAT_SECONDS:
            self.last = (phase, time.time())
            median_step_seconds = median(self.step_seconds) if self.step_seconds else self.first_step
            with self.spare.write():
                write_heartbeat(self.folder, self.rank, phase, step, median_step_seconds)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The first step may compile kernels and take long."""
        self.step_began = time.monotonic()
        self.beat("first step", state.global_step)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """One of the accumulated passes is done."""
        if self.first_step:
            self.beat("train", state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step is done."""
        seconds = time.monotonic() - self.step_began
        if self.first_step:
            self.step_seconds.append(seconds)
        else:
            self.first_step = seconds
        self.step_began += seconds
        self.beat("evaluate" if control.should_evaluate else _after_evaluation(control), state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An evaluation goes on."""
        self.beat("evaluate", state.global_step)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The evaluation is over."""
        self._go_on(_after_evaluation(control), state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The save is over."""
        self._go_on("train", state.global_step)

    def _go_on(self, phase: str, step: int) -> None:
        """What was done meanwhile is no part of the next step's time."""
        self.step_began = time.monotonic()
        self.beat(phase, step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """No more steps follow."""
        self.beat("end", state.global_step)


def _after_evaluation(control: TrainerControl) -> str:
    return "save" if control.should_save else "train"

"""Record some steps of rank 0: torch's profiler, and the allocations on its GPU."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from shardmake.config.models import Profile
from shardmake.core.private_names import private
from shardmake.core.run_folder import make_folder, remove, rename
from shardmake.train.callbacks.best_effort import BestEffortWriter
from shardmake.train.rank_context import RankContext

logger = logging.getLogger(__name__)

_MOST_EVENTS = 100_000
"""Allocations and releases in a snapshot, newest last."""


def recorders(context: RankContext) -> list[TrainerCallback]:
    """Return the recorders that the run asks for, on rank 0."""
    settings, folder = context.settings, context.attempt.rundir.profile
    if context.rank:
        return []
    profile = [step_profiler(folder, settings.profile)] if settings.profile else []
    return [*profile, *([memory_snapshot(folder)] if settings.memory_snapshot else [])]


def step_profiler(folder: Path, profile: Profile) -> "Recorder":
    """Return the recorder of operators and GPU kernels, in a trace for chrome://tracing and Perfetto."""
    profiler = torch.profiler.profile(profile_memory=True, record_shapes=True)

    def finish(path: str) -> None:
        profiler.stop()
        profiler.export_chrome_trace(path)

    last = profile.first_step + profile.steps - 1
    return Recorder(folder, "trace", ".json.gz", (profile.first_step, last), profiler.start, finish)


def memory_snapshot(folder: Path) -> "Recorder":
    """Return the recorder of allocations in the first two steps, with their stacks, for pytorch.org/memory_viz."""
    memory = private(torch.cuda.memory)

    def finish(path: str) -> None:
        memory.dump_snapshot(path)
        memory.record_memory_history(enabled=None)

    start = partial(memory.record_memory_history, max_entries=_MOST_EVENTS)
    return Recorder(folder, "memory", ".pickle", (1, 2), start, finish)


class Recorder(TrainerCallback):
    """Record those of the ``steps``, from the first to the last, that this attempt runs, into ``folder``.

    ``finish`` stops and writes the file at a path that ends with ``suffix``.
    """

    def __init__(
        self, folder: Path, what: str, suffix: str, steps: tuple[int, int], start: Callable[[], object],
        finish: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.folder, self.what, self.suffix = folder, what, suffix
        self.first, self.last = steps
        self.start, self.finish = start, finish
        self.started = 0
        self.writer = BestEffortWriter(what)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start with the first step."""
        step = state.global_step + 1
        if not self.started and self.first <= step <= self.last:
            self.started = step
            self.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write the file after the last step."""
        if self.started and (state.global_step >= self.last or control.should_training_stop):
            name = f"{self.what}-steps-{self.started}-{state.global_step}{self.suffix}"
            self.last = self.started = 0
            with self.writer.write():
                unfinished = self.folder / f".{name}"
                remove(unfinished)
                make_folder(unfinished, private=True)
                self.finish(str(unfinished / name))
                rename(unfinished / name, self.folder / name)
                remove(unfinished)
                logger.info("Recorded %s.", self.folder / name)

"""Record some steps of rank 0: torch's profiler, and the allocations on its GPU."""

import logging
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
    profile = [StepProfiler(folder, settings.profile)] if settings.profile else []
    return [*profile, *([MemorySnapshot(folder)] if settings.memory_snapshot else [])]


class _Recorder(TrainerCallback):
    """Record the steps from ``first`` to ``last`` that this attempt runs, into ``folder``."""

    def __init__(self, folder: Path, what: str, first: int, last: int) -> None:
        self.folder, self.what, self.first, self.last = folder, what, first, last
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
            self.last = 0
            path = self.folder / f"{self.what}-steps-{self.started}-{state.global_step}"
            self.started = 0
            with self.writer.write():
                unfinished = path.with_name(f".{path.name}")
                remove(unfinished)
                make_folder(unfinished, private=True)
                written = self.finish(unfinished / path.name)
                rename(written, self.folder / written.name)
                remove(unfinished)
                logger.info("Recorded %s.", self.folder / written.name)

    def start(self) -> None:
        """Begin to record."""
        raise NotImplementedError

    def finish(self, path: Path) -> Path:
        """Stop, write the file of ``path`` without its suffix, and return the file."""
        raise NotImplementedError


class StepProfiler(_Recorder):
    """Write a trace for chrome://tracing and Perfetto."""

    def __init__(self, folder: Path, profile: Profile) -> None:
        super().__init__(folder, "trace", profile.first_step, profile.first_step + profile.steps - 1)
        self.profiler = torch.profiler.profile(profile_memory=True, record_shapes=True)

    def start(self) -> None:
        """Begin to record the operators and, with a GPU, its kernels."""
        self.profiler.start()

    def finish(self, path: Path) -> Path:
        """Write the compressed trace."""
        self.profiler.stop()
        whole = path.with_name(f"{path.name}.json.gz")
        self.profiler.export_chrome_trace(str(whole))
        return whole


class MemorySnapshot(_Recorder):
    """Write a snapshot of the allocations of the first two steps for pytorch.org/memory_viz."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "memory", 1, 2)

    def start(self) -> None:
        """Begin to record allocations with their stacks."""
        private(torch.cuda.memory).record_memory_history(max_entries=_MOST_EVENTS)

    def finish(self, path: Path) -> Path:
        """Write the pickle that the viewer reads."""
        whole = path.with_name(f"{path.name}.pickle")
        private(torch.cuda.memory).dump_snapshot(str(whole))
        private(torch.cuda.memory).record_memory_history(enabled=None)
        return whole

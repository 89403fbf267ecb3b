"""Programs of ranks that run out of memory or count their live tensors: run them with `tests.fork_server`."""

import gc
import sys
from pathlib import Path
from typing import Any

import torch

from shardmake.run.attempt import AttemptDir
from shardmake.run.plan import Plan


def train(attempt: Path, rank: int) -> None:
    """Train the attempt; without gradient checkpointing torch's own error ends the step after the first save."""
    from tests.fork_server import run_rank

    folder = AttemptDir(attempt)
    if not Plan.read(folder.plan).choice.gradient_checkpointing:
        saved = Path(folder.read().run_folder) / "train/checkpoints/checkpoint-2/shardmake.json"
        sys.addaudithook(lambda event, arguments: _refuse(event, arguments, saved))
    run_rank(attempt, rank, None)


def _refuse(event: str, arguments: tuple[Any, ...], saved: Path) -> None:
    """Raise the error when rank 0 writes the metrics of a step after ``saved`` exists."""
    if event == "open" and str(arguments[0]).endswith("metrics.jsonl") and "a" in str(arguments[1]) and saved.exists():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (simulated).")


def count_tensors(attempt: Path, rank: int) -> None:
    """Train the attempt and write the bytes of the rank's tensors, with the trainer still alive, to a file in it."""
    from benchmarks.memory_cpu import tensor_bytes
    from shardmake.train import trainer

    leave = trainer.leave_together

    def count() -> None:
        gc.collect()
        (attempt / f"live-{rank}.txt").write_text(str(tensor_bytes()))
        leave()

    trainer.leave_together = count
    trainer.train(attempt)

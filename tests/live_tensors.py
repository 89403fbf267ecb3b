"""The program of a rank that counts its live tensors at the end of a training: run it with `tests.fork_server`."""

import gc
from pathlib import Path

from benchmarks.memory_cpu import tensor_bytes


def train(attempt: Path, rank: int) -> None:
    """Train the attempt and write the bytes of the rank's tensors, with the trainer still alive, to a file in it."""
    from shardmake.train import trainer

    leave = trainer.leave_together

    def count() -> None:
        gc.collect()
        (attempt / f"live-{rank}.txt").write_text(str(tensor_bytes()))
        leave()

    trainer.leave_together = count
    trainer.train(attempt)

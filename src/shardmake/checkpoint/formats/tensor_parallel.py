"""Checkpoints of tensor-parallel groups: DeepSpeed's own tool puts the parts of each matrix together first."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from shardmake.core.errors import ShardmakeError

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
_PROCESSES = "2"


@contextmanager
def readable(checkpoint: Path, scratch: Path, tell: Callable[[str], None]) -> Iterator[Path]:
    """``checkpoint`` itself, or a universal checkpoint made of its groups, below ``scratch`` and only for a while.

    That takes the room of the checkpoint once more, and the RAM that DeepSpeed takes: a rank's files at a time, in
    each of two processes.
    """
    parts = next(checkpoint.glob("*/mp_rank_01_model_states.pt"), None)
    if parts is None:
        yield checkpoint
        return
    tell("Putting the parts of the tensor-parallel ranks together, with DeepSpeed's ds_to_universal.")
    with TemporaryDirectory(dir=scratch, prefix="universal-") as folder:
        _convert(parts.parent, Path(folder, "checkpoint"))
        yield Path(folder, "checkpoint")


def _convert(source: Path, target: Path) -> None:
    """Run DeepSpeed's converter; a `ShardmakeError` with its last words if it fails."""
    folders = ["--input_folder", str(source), "--output_folder", str(target)]
    counts = ["--num_extract_workers", _PROCESSES, "--num_merge_workers", _PROCESSES]
    done = subprocess.run([sys.executable, "-m", CONVERTER, *folders, *counts], capture_output=True, text=True)
    if done.returncode:
        raise ShardmakeError(f"DeepSpeed could not convert {source}:\n{done.stderr[-2000:]}")

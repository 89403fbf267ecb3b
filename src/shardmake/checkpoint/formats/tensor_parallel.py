"""Checkpoints of tensor-parallel groups, whose parts DeepSpeed's own tool joins before the merge."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from shardmake.core.errors import CheckpointError

logger = logging.getLogger(__name__)

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
_PROCESSES = "2"


@contextmanager
def joined_parts(checkpoint: Path, scratch: Path) -> Iterator[Path]:
    """Yield ``checkpoint`` itself, or for tensor-parallel ranks a temporary universal checkpoint below ``scratch``.

    The conversion needs disk space for a second copy. Each of its two processes holds one rank's files in memory.
    """
    part = next(checkpoint.glob("*/mp_rank_01_model_states.pt"), None)
    if part is None:
        yield checkpoint
        return
    logger.info("Joining the parts of the tensor-parallel ranks with DeepSpeed's ds_to_universal.")
    with TemporaryDirectory(dir=scratch, prefix="universal-") as folder:
        _convert(part.parent, Path(folder, "checkpoint"))
        yield Path(folder, "checkpoint")


def _convert(source: Path, target: Path) -> None:
    """Run DeepSpeed's converter; if it fails, raise `CheckpointError` with the end of its output."""
    folders = ["--input_folder", str(source), "--output_folder", str(target)]
    counts = ["--num_extract_workers", _PROCESSES, "--num_merge_workers", _PROCESSES]
    done = subprocess.run([sys.executable, "-m", CONVERTER, *folders, *counts], capture_output=True, text=True)
    if done.returncode:
        raise CheckpointError(f"DeepSpeed could not convert {source}:\n{done.stderr[-2000:]}")

"""The consolidate stage: merge the checkpoint that the training's receipt names."""

from collections.abc import Callable
from pathlib import Path

from shardmake.config import Run
from shardmake.consolidate.merge import Receipt, consolidate
from shardmake.receipt import read_json
from shardmake.rundir import RunDir


def consolidate_run(run: Run, rundir: RunDir, *, workers: int, tell: Callable[[str], None]) -> Receipt:
    """Write `rundir.model` from the last checkpoint of a finished training; a `UserError` if it is not finished."""
    trained = read_json(rundir.train_receipt, "shardmake train NAME")
    base = Path(run.model)
    return consolidate(
        rundir.root / trained["checkpoint"],
        rundir.model,
        base=base if base.is_dir() else None,
        dtype=run.dtype,
        max_shard_size=run.max_shard_size,
        workers=workers,
        trust_remote_code=run.trust_remote_code,
        report=tell,
    )

"""Choose the checkpoint that an attempt resumes from, and convert it if its strategy or ranks differ."""

import logging
import shutil
from pathlib import Path

from shardmake.checkpoint import store
from shardmake.checkpoint.record import CheckpointRecord
from shardmake.checkpoint.reshard.convert import Route, find_route, reshard
from shardmake.launch.training import Training
from shardmake.run import set_aside
from shardmake.run.plan import Choice

logger = logging.getLogger(__name__)


def choose_checkpoint(training: Training, choice: Choice) -> Path | None:
    """Return the newest valid checkpoint of the current settings; set checkpoints of other settings aside."""
    rundir, folder = training.rundir, training.rundir.checkpoints.resolve()
    found = store.recover(folder)
    if found and found[0].settings_digest != training.settings_digest:
        set_aside.stash_and_restore(folder, found[0].settings_digest, training.settings_digest)
        rundir.metrics.unlink(missing_ok=True)
        found = store.recover(folder)
    return reshard_if_needed(*found, choice, rundir.resharded.resolve()) if found else None


def reshard_if_needed(record: CheckpointRecord, checkpoint: Path, choice: Choice, folder: Path) -> Path:
    """Return ``checkpoint``, converted to ``folder`` if the library of ``choice`` cannot read it as it is.

    Raises:
        ShardmakeError: the checkpoint cannot be converted.
    """
    if find_route(record, checkpoint, choice.strategy, choice.world_size) is Route.NATIVE:
        shutil.rmtree(folder, ignore_errors=True)
        return checkpoint
    out = folder / checkpoint.name
    reshard(checkpoint, out, choice.strategy, choice.world_size)
    return out

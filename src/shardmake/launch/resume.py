"""Choose the checkpoint of a job: before its submission, and again on its first node when Slurm starts it once more."""

import logging
import os
import time
from pathlib import Path

from shardmake.checkpoint import store
from shardmake.checkpoint.record import refuse_unlisted
from shardmake.checkpoint.reshard.convert import Route, find_route, reshard, set_load_universal
from shardmake.checkpoint.training_receipt import is_final
from shardmake.core.run_folder import make_folder, real_path, remove, rename
from shardmake.core.units import GIB
from shardmake.launch.rendezvous import RendezvousError
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.paths import RunDir
from shardmake.run.plan import Choice, Plan
from shardmake.run.training_settings import TrainingSettings

_POLL_SECONDS = 0.5
CHEAP_BYTES = GIB
"""Size up to which the driver itself reads a checkpoint before it submits a job: a second or two."""
logger = logging.getLogger(__name__)


def resume_checkpoint(rundir: RunDir, choice: Choice) -> Path | None:
    """Return the newest checkpoint whose files have their sizes, converted if ``choice`` cannot read it as it is.

    The nodes of the job validate the content (`shardmake.launch.resume_validation`). Only a small checkpoint, and one
    to be converted, is read and validated here. Newer checkpoints that are damaged are set aside. No training of the
    run may be writing.

    Raises:
        ShardmakeError: the checkpoint cannot be converted, or has files that its save did not write.
    """
    resharded, folder = real_path(rundir.resharded), real_path(rundir.checkpoints)
    newest = next(store.committed(folder), None)
    for checksums in (newest is not None and newest[0].size <= CHEAP_BYTES, True):
        found = store.recover(folder, checksums=checksums)
        if found is None:
            if newest is not None or store.damaged(folder):
                logger.warning("No checkpoint of %s is intact. The training starts again from the base model.", folder)
            return None
        record, checkpoint = found
        if find_route(record, checkpoint, choice.strategy, choice.world_size) is Route.NATIVE:
            refuse_unlisted(checkpoint, record)
            remove(resharded)
            return checkpoint
    out = resharded / checkpoint.name
    reshard(checkpoint, out, choice.strategy, choice.world_size)
    return out


def prepare_restart(folder: AttemptDir, start: int) -> None:
    """Archive the records of the last start of the ranks, and let this ``start`` resume from the newest checkpoint.

    The first node calls it before it publishes its address, for which the other nodes wait. A user's script finds its
    checkpoint itself.

    Raises:
        ShardmakeError: the checkpoint cannot be converted.
    """
    _archive(folder, start - 1)
    attempt = folder.read()
    changes: dict[str, object] = {"start": start, "again": start - int(os.environ.get("SLURM_RESTART_COUNT", "0"))}
    if TrainingSettings.read(folder.training).program.kind != "script":
        plan = Plan.read(folder.plan)
        checkpoint = resume_checkpoint(attempt.rundir, plan.choice)
        set_load_universal(folder.deepspeed, checkpoint)
        newest = next(store.committed(attempt.rundir.checkpoints), None)
        finished = newest is not None and is_final(*newest)
        changes |= {"resume_from": str(checkpoint) if checkpoint else None, "finished": finished}
    attempt.model_copy(update=changes).write(folder.settings)


def read_settings(folder: AttemptDir, start: int, seconds: float) -> Attempt:
    """Return the attempt's settings for this ``start`` of the job, as soon as this node sees them.

    Raises:
        RendezvousError: they are still those of an earlier start after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while (attempt := folder.read()).start != start:
        if time.monotonic() > deadline:
            raise RendezvousError(f"{folder.settings} is still that of an earlier start of the job.")
        time.sleep(_POLL_SECONDS)
        list(folder.root.iterdir())  # makes NFS refresh the folder
    return attempt


def again_file(folder: AttemptDir, start: int) -> Path:
    """Return the file by which node 0 lets the job itself start its ranks again after ``start``."""
    return folder.root / f"start-{start}" / "AGAIN"


def _archive(folder: AttemptDir, start: int) -> None:
    """Move the records of an earlier ``start`` of the job to ``start-START``.

    Where the job itself starts its ranks again, a stop file is of a request that came meanwhile, and stays.
    """
    archive = folder.root / f"start-{start}"
    make_folder(archive, parents=False)
    records = [folder.errors, folder.hang, folder.hung, folder.stacks, folder.stopped, folder.next]
    records += [] if again_file(folder, start).exists() else [folder.stop_file]
    for path in [*records, folder.heartbeats, *folder.root.glob("node-*.json")]:
        if path.exists():
            rename(path, archive / path.name)

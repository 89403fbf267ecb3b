"""What can go, and what it frees: never the only copy of anything, and nothing that a rerun would make again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardmake.checkpoint import store
from shardmake.checkpoint.record import CheckpointRecord, is_unfinished
from shardmake.checkpoint.retention import Retention
from shardmake.core.disk import tree_size
from shardmake.core.units import GIB
from shardmake.run.paths import RunDir
from shardmake.run.receipts import MergeReceipt, PushReceipt
from shardmake.run.training_settings import TrainingSettings

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Removable:
    """A folder that may be removed, its bytes, and why it may."""

    path: Path
    size: int
    why: str


def clean(runs: Path, *, remove: bool, tell: Tell) -> list[Removable]:
    """List what can go below ``runs``, with sizes, and with ``remove`` take it away; return what was listed.

    What cannot be removed, because it is not the user's or for another reason, is named and left.
    """
    found = sorted(find_removable(runs), key=lambda item: -item.size)
    for item in found:
        tell(f"{item.size / GIB:8.2f} GiB  {item.path}  ({item.why})")
        if remove:
            store.remove(item.path)
    total = sum(item.size for item in found) / GIB
    tell(f"{total:8.2f} GiB in all. " + ("Removed." if remove else "Nothing was removed; add --remove to do it."))
    return found


def find_removable(runs: Path) -> Iterator[Removable]:
    """In runs whose model was pushed: old checkpoints, the fetch's cache, and what killed saves and merges left."""
    for folder in sorted(path for path in runs.iterdir() if path.is_dir()):
        rundir = RunDir(folder)
        if is_pushed(rundir):
            yield from _removable(rundir)


def is_pushed(rundir: RunDir) -> bool:
    """Whether training finished and the model that is here now is the one that was pushed and read back."""
    if not (rundir.train_receipt.exists() and rundir.model_receipt.exists() and rundir.push_receipt.exists()):
        return False
    model = MergeReceipt.read(rundir.model_receipt).verification.files
    pushed = PushReceipt.read(rundir.push_receipt).files
    return all(pushed.get(name) == entry for name, entry in model.items())


def _removable(rundir: RunDir) -> Iterator[Removable]:
    found = list(store.committed(rundir.checkpoints))
    kept = _kept(rundir, [record for record, _ in found])
    for record, path in found:
        if record.step not in kept:
            yield Removable(path, tree_size(path), "a newer checkpoint is kept, and the model was pushed")
    for _, path in store.checkpoints(rundir.checkpoints):
        if found and is_unfinished(path):
            yield Removable(path, tree_size(path), "its save was never finished")
    for path in store.damaged(rundir.checkpoints):
        yield Removable(path, tree_size(path), "it is damaged, and a newer checkpoint is whole")
    if rundir.resharded.exists():
        yield Removable(rundir.resharded, tree_size(rundir.resharded), "training went on from it and finished")
    if (cache := rundir.fetched / "cache").exists():
        yield Removable(cache, tree_size(cache), "the examples were fetched through it and lie in files of the run")
    for path in rundir.root.glob(".*.partial"):
        yield Removable(path, tree_size(path), "a merge was interrupted; the model is there")


def _kept(rundir: RunDir, records: list[CheckpointRecord]) -> set[int]:
    """Steps of the newest checkpoint, of the best, and of those that the configuration keeps for good."""
    retention = TrainingSettings.read(rundir.training).checkpoints.retention
    return replace(Retention(**dict(retention)), keep=1).kept(records)

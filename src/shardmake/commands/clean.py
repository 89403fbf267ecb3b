"""List and remove folders that runs no longer need: by itself never the only copy, nor what a rerun would recreate.

What a person names, a whole run or what other settings left behind, may be the only copy; its removal asks first.
"""

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from shardmake.checkpoint import store
from shardmake.checkpoint.record import find_problems, is_unfinished
from shardmake.core.disk import tree_size
from shardmake.core.errors import ConfigError, ShardmakeError
from shardmake.core.fingerprint import fingerprint
from shardmake.core.manifest import differences
from shardmake.core.run_folder import open_file, real_path, rename
from shardmake.core.temporary import take_lock
from shardmake.core.units import format_bytes, plural
from shardmake.launch.driver import hold_driver_lock
from shardmake.push.check import problems_at
from shardmake.run.paths import RunDir
from shardmake.run.receipts import MergeReceipt, PushReceipt
from shardmake.run.training_settings import TrainingSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Removable:
    """A folder that can be removed, and the reason."""

    path: Path
    reason: str

    @cached_property
    def size(self) -> int:
        """Its bytes."""
        return tree_size(self.path)


def clean(runs: Path, *, remove: bool, names: Container[str] | None = None) -> list[Removable]:
    """Log the removable folders below ``runs`` with their sizes, remove them with ``remove``, and return them.

    With ``names``, only these runs are looked at.

    Before the first removal of a run, every byte of its model and of the checkpoints that stay is compared with the
    records, and the pushed copies are looked at (`problems_at`). The run's locks are held meanwhile, so no training of
    the run starts. A folder that cannot be removed is reported and skipped, for example one of another user.
    """
    found: list[Removable] = []
    left = 0
    for rundir in _runs(runs, names):
        with _unused(rundir) if remove else nullcontext(True) as free:
            items = _find_removable(rundir, verify=remove) if free and is_pushed(rundir) else []
            for item in sorted(items, key=lambda item: -item.size):
                logger.info("%10s  %s  (%s)", format_bytes(item.size), item.path, item.reason)
                left += remove and not store.remove(item.path)
        found += items
    if not found:
        logger.info("Nothing to remove: no pushed run in %s has old checkpoints or caches that may go.", runs)
        return found
    total = format_bytes(sum(item.size for item in found))
    removed = f"{plural(left, 'folder')} of them could not be removed." if left else "Removed."
    outcome = removed if remove else "Nothing was removed. Use --remove to remove these folders."
    logger.info("%10s in total. %s", total, outcome)
    return found


def clean_named(
    runs: Path, names: Sequence[str], *, set_aside: bool, confirm: Callable[[str], bool] | None
) -> list[Removable]:
    """Log the whole folders of the runs ``names``, whatever their state, and those that other settings left behind.

    If ``confirm`` returns True for a question about all of them, remove them. None only lists them. A run that has a
    job or a driver stays. Returns what was found.
    """
    found = [_whole(runs, name) for name in dict.fromkeys(names)]
    for pattern in _SET_ASIDE if set_aside else ():
        reason = "set aside: it belongs to other settings, or to a training that was replaced"
        found += [Removable(path, reason) for path in sorted(runs.glob(pattern))]
    for item in found:
        logger.info("%10s  %s  (%s)", format_bytes(item.size), item.path, item.reason)
    if not found:
        logger.info("Nothing to remove: no run in %s has anything set aside.", runs)
        return found
    total = f"{plural(len(found), 'folder')}, {format_bytes(sum(item.size for item in found))}"
    if confirm is None:
        logger.info("%s. Nothing was removed. --remove asks, and then removes these folders.", total)
    elif confirm(f"Remove {total}? Nothing else may have their content."):
        for item in found:
            logger.info("%s: %s", item.path, "removed" if _take_away(runs, item.path) else "not removed")
    return found


_SET_ASIDE: Final = ("*/train/checkpoints-of-*", "*/train/output-of-*", "*/train-before-*")
"""Folders of `stash_and_restore` and of ``shardmake retrain``, below that of the runs."""


def _take_away(runs: Path, folder: Path) -> bool:
    """Remove ``folder``, unless its run is in use; return whether it is gone.

    It has another name first, so that a kill leaves no half of a run. The lock that shows that nobody uses the run is
    released then, because NFS keeps the file of an open lock, and with it the folder.
    """
    with _unused(RunDir(runs / folder.relative_to(runs).parts[0])) as free:
        if not free:
            return False
        aside = folder.with_name(f".{folder.name}.removed-{time.time_ns()}")
        rename(folder, aside)
    return store.remove(aside)


def _whole(runs: Path, name: str) -> Removable:
    """Return the folder of a run, with what is lost with it."""
    if name in ("", "..") or name != Path(name).name or not (runs / name).is_dir() or (runs / name).is_symlink():
        raise ConfigError(f"No folder of a run: {(runs / name).absolute()}. `shardmake list` names the runs.")
    rundir = RunDir(runs / name)
    weights = (path for path in runs.glob("*/fetched/model/*") if path.is_symlink())
    users = {path.parts[-4] for path in weights if path.resolve().is_relative_to(rundir.root.resolve())}
    worth = "not finished" if not rundir.model_receipt.exists() else "not pushed: the only copy of its model"
    try:
        worth = "pushed" if is_pushed(rundir) else worth
    except ShardmakeError:
        worth = "its receipts cannot be read"
    return Removable(rundir.root, "; ".join([worth, *(f"{name} starts from its model" for name in sorted(users))]))


@contextmanager
def _unused(rundir: RunDir) -> Iterator[bool]:
    """Hold the locks of a run; yield False, after a warning, if it has a job or a driver, or one of its stages runs."""
    with ExitStack() as held:
        try:
            if rundir.train.exists():
                held.enter_context(hold_driver_lock(rundir))
            if rundir.settings.exists():
                lock = held.enter_context(open_file(rundir.stage_lock, "a"))
                if not take_lock(lock.fileno(), without_locks=False):
                    raise ShardmakeError("A stage of it runs, or its file system has no file locks.")
            if rundir.job.exists():
                raise ShardmakeError(f"It has a training job. Cancel it first: shardmake cancel {rundir.name}")
        except (ShardmakeError, OSError) as error:
            logger.warning("Nothing of %s is removed: %s", rundir.root, error)
            yield False
        else:
            yield True


def _runs(runs: Path, names: Container[str] | None) -> Iterator[RunDir]:
    """Yield the runs whose model was pushed."""
    if not runs.is_dir():
        raise ConfigError(
            f"No folder of runs: {runs.absolute()}. No run has started here, or the working directory is another one. "
            "Name the folder with --runs."
        )
    for folder in sorted(path for path in runs.iterdir() if path.is_dir()):
        if (names is None or folder.name in names) and is_pushed(RunDir(folder)):
            yield RunDir(folder)


def _find_removable(rundir: RunDir, *, verify: bool) -> list[Removable]:
    """Return old checkpoints, caches and incomplete files of a run, without links.

    With ``verify``, return none if the model, a kept checkpoint or a pushed copy is not whole.
    """
    found = [item for item in _removable(rundir) if not _is_link(item.path)]
    if not (verify and found):
        return found
    pushed = PushReceipt.read(rundir.push_receipt)
    problems = _problems_of_kept(rundir, {item.path for item in found})
    problems += [problem for place in pushed.destinations for problem in problems_at(place, pushed.files)]
    for problem in problems:
        logger.warning("Nothing of %s is removed: %s.", rundir.root, problem)
    return [] if problems else found


def _is_link(path: Path) -> bool:
    """Return whether ``path`` or a folder above it in the run is a link: what it leads to belongs to somebody."""
    if real_path(path) == path.resolve():
        return False
    logger.warning("%s is a link, or below one, and stays. Remove what it leads to by hand.", path)
    return True


def _problems_of_kept(rundir: RunDir, removed: set[Path]) -> list[str]:
    """Compare every byte of the model, and of the checkpoints that stay, with the records."""
    expected = MergeReceipt.read(rundir.model_receipt).verification.files
    present = {name: rundir.model / name for name in expected if (rundir.model / name).is_file()}
    problems = differences(expected, {name: fingerprint(path) for name, path in present.items()})
    kept = [path for _, path in store.committed(rundir.checkpoints) if path not in removed]
    return [f"the model's {problem}" for problem in problems] + [one for path in kept for one in find_problems(path)]


def is_pushed(rundir: RunDir) -> bool:
    """Return whether training finished and the present model is the one that was pushed and verified."""
    if not (rundir.train_receipt.exists() and rundir.model_receipt.exists() and rundir.push_receipt.exists()):
        return False
    model = MergeReceipt.read(rundir.model_receipt).verification.files
    return PushReceipt.read(rundir.push_receipt).model == model


def _removable(rundir: RunDir) -> Iterator[Removable]:
    found = list(store.committed(rundir.checkpoints))
    retention = TrainingSettings.read(rundir.training).checkpoints.retention
    # The newest checkpoint, the best one, and those that the configuration keeps permanently.
    kept = retention.model_copy(update={"keep": 1}).kept({record.step: record.eval_loss for record, _ in found})
    saves = store.checkpoints(rundir.checkpoints) if found else ()
    reasons: dict[str, Iterable[Path]] = {
        "a newer checkpoint is kept, and the model was pushed": (it for one, it in found if one.step not in kept),
        "incomplete: the save was interrupted": (path for _, path in saves if is_unfinished(path)),
        "damaged, and a newer checkpoint is valid": store.damaged(rundir.checkpoints),
        "training resumed from it and finished": rundir.train.glob(rundir.resharded.name),
        "the cache of fetched examples, which the run has in files of its own": rundir.fetched.glob("cache"),
        "a merge was interrupted, and the model is complete": rundir.root.glob(".*.partial"),
    }
    return (Removable(path, reason) for reason, paths in reasons.items() for path in paths)

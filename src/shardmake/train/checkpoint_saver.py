"""How a checkpoint is written: room first, every rank's files on disk, the record last, older ones removed after that.

With a scratch folder the ranks write there and train on, and `shardmake.train.upload` does the rest; the next save
waits for it first. What must not be lost (the last step, the save before a stop) goes straight to the shared folder.

A save that does not fit is left out, with a word, and training goes on; what must not be lost (the last step, the save
before a stop) ends the training instead, with what to do. A disk that fills up in the middle ends the training too:
the ranks no longer agree on what is written. The checkpoints that were sealed before stay as they are in all cases.
"""

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from transformers import Trainer

from shardmake.checkpoint import store
from shardmake.checkpoint.files import RECORD_NAME, FileEntry, fingerprint, list_files, sync_file, wait_visible
from shardmake.checkpoint.record import find_problems
from shardmake.checkpoint.retention import Retention
from shardmake.core import disk
from shardmake.core.environment import library_versions
from shardmake.core.errors import ShardmakeError
from shardmake.core.units import format_bytes
from shardmake.train import nvme_restore
from shardmake.train.adam_state import fit_states
from shardmake.train.async_saver import MARGIN, ScratchFolder, failure

_POLL_SECONDS = 0.1
T = TypeVar("T")
Describe = Callable[[int], dict[str, Any]]


class Saver:
    """Writes the checkpoints of one training; every rank has one, and all take part in each save.

    Args:
        folder: Where the checkpoints lie.
        describe: What the record says besides the files, by step.
        retention: Which older checkpoints stay.
        expected_bytes: Size of the first checkpoint, as estimated; later ones are as large as the one before.
        scratch: This node's scratch folder, for asynchronous saves.
    """

    def __init__(
        self,
        folder: Path,
        describe: Describe,
        retention: Retention,
        expected_bytes: int = 0,
        scratch: ScratchFolder | None = None,
    ) -> None:
        self.folder = folder
        self.describe = describe
        self.retention = retention
        self.expected_bytes = expected_bytes
        self.scratch = scratch
        self.seconds: float | None = None
        """How long the newest save kept training waiting, the same on every rank."""
        self.upload_seconds = 0.0
        """How long the newest checkpoint took from its start until it counted, if it may do so in the background."""
        self.under_way: Path | None = None
        """What is being uploaded, the same on every rank."""
        self.upload: subprocess.Popen[str] | None = None
        """This node's part of it, on its first rank."""
        self.place = folder / store.STAGING
        """Where the ranks write: the folder around the checkpoint, before it counts."""
        self._told = False

    @contextlib.contextmanager
    def saving(self, step: int, *, must: bool, eval_loss: float | None = None) -> Iterator[Path | None]:
        """Yield the folder that the ranks write to; leaving the block makes the checkpoint count, at once or soon.

        Yields None where there is no room and ``must`` is false.

        Raises:
            ShardmakeError: there is no room and ``must`` is true, or the disk filled up meanwhile.
            RuntimeError: the upload before failed and ``must`` is false.
        """
        self._settle_before(step, must)
        started = time.time()
        complaint, size, self.upload_seconds = _from_first(self._make_room)
        if complaint:
            if must:
                raise ShardmakeError(complaint)
            if _rank() == 0:
                print(f"WARNING: checkpoint-{step} is left out. {complaint}", flush=True)
            yield None
            return
        staged, local = store.staged_path(self.folder, step), None if must else self._on_scratch(step, size)
        described = {
            "step": step,
            "eval_loss": eval_loss,
            "versions": library_versions(),
            **self.describe(step),
        }
        target = local or staged
        self.place = target.parent
        with self._noticing_full_disk(target):
            yield target
            if local:
                self._send(local, staged, described, started)
            else:
                self._commit(staged, described, started)

    def _settle_before(self, step: int, must: bool) -> None:
        """`settle`; where this save is the last chance, a failed upload is no reason to leave it out."""
        try:
            self.settle()
        except (RuntimeError, ShardmakeError) as error:
            if not must:
                raise
            if _rank() == 0:
                print(f"WARNING: {error} Now checkpoint-{step} is written there directly.", flush=True)

    def settle(self) -> None:
        """Wait for the upload under way, if there is one.

        Every rank calls it. They ask each other until all is done: one long wait in a collective might hit a deadline.
        """
        if self.under_way is None:
            return
        staged, self.under_way = self.under_way, None
        while None in (codes := _gathered(self.upload.poll() if self.upload else 0)) and not any(codes):
            time.sleep(_POLL_SECONDS)
        if any(codes):
            self._give_up(staged)
        self.upload = None

    def _give_up(self, staged: Path) -> None:
        """Raise what ended the upload on the first node where it failed, after those of the others were ended too."""
        found = failure(self.upload) if self.upload and self.upload.poll() else None
        if self.upload:
            self.upload.kill()
            self.upload.wait()
            self.upload = None
        error = next(filter(None, _gathered(found)))
        with self._noticing_full_disk(staged):
            raise RuntimeError(
                f"{staged.name} did not get from the node's scratch to {self.folder}: {error.strerror}. Run the same "
                "command again; without checkpoints.asynchronous it is written there directly."
            ) from error

    def _make_room(self) -> tuple[str, int, float]:
        """Clear the staging folder and remove what may go if the next checkpoint does not fit.

        Returns what is wrong, if it is; the bytes of the next checkpoint, for which the newest is the best guess; and
        the time that this one took.
        """
        shutil.rmtree(self.folder / store.STAGING, ignore_errors=True)
        newest = next(store.committed(self.folder), None)
        needed = newest[0].size if newest else self.expected_bytes
        seconds = newest[0].save_seconds if newest and self.scratch else 0.0
        self.folder.mkdir(parents=True, exist_ok=True)
        for free in (lambda: None, self._remove_damaged, self._remove_older):
            free()
            if needed <= disk.free_space(self.folder).free:
                return "", needed, seconds
        try:
            disk.check_save(self.folder, needed)
        except ShardmakeError as error:
            return str(error), needed, seconds
        return "", needed, seconds

    def _remove_damaged(self) -> None:
        for path in store.damaged(self.folder):
            print(f"Removing {path.name} to make room for the next checkpoint.", flush=True)
            store.remove(path)

    def _remove_older(self) -> None:
        """Keep the newest checkpoint alone (and the best), but only after a look at every byte of it."""
        newest = next(store.committed(self.folder), None)
        if newest and not find_problems(newest[1]):
            for path in store.prune(self.folder, self.retention.minimal()):
                print(f"Removed {path.name} to make room for the next checkpoint.", flush=True)

    def _on_scratch(self, step: int, size: int) -> Path | None:
        """Where this node's ranks write a checkpoint of ``size`` bytes first; None: straight to the shared folder."""
        if self.scratch is None:
            return None
        complaints = _gathered(self.scratch.make_room(size) if _is_first_of_node() else "")
        if complaint := next(filter(None, complaints), ""):
            if _rank() == 0 and not self._told:
                print(f"WARNING: checkpoint-{step} is not saved asynchronously. {complaint}", flush=True)
            self._told = True
            return None
        return self.scratch.folder / f"checkpoint-{step}"

    def _send(self, local: Path, staged: Path, described: dict[str, Any], started: float) -> None:
        _gathered(None)  # all have written what they write
        self.seconds = _from_first(lambda: time.time() - started)
        self.under_way = staged
        if _is_first_of_node():
            assert self.scratch is not None
            described |= {"blocked_seconds": self.seconds}
            self.upload = self.scratch.send(local, staged, described, started, self.retention)

    def _commit(self, staged: Path, described: dict[str, Any], started: float) -> None:
        files = _sync_together(staged)
        if _rank() == 0:
            store.commit_and_prune(staged, files, described, started, self.retention)
        self.seconds = _from_first(lambda: time.time() - started)
        if _is_first_of_node():
            wait_visible(self.folder / staged.name / RECORD_NAME)

    @contextlib.contextmanager
    def _noticing_full_disk(self, written: Path) -> Iterator[None]:
        """Turn an error that comes from a full disk below ``written`` into what to do, and make room for its text."""
        try:
            yield
        except BaseException as error:  # a failed write of torch's distributed checkpoint is no Exception
            if complaint := self._full_disk(error, written):
                shutil.rmtree(written, ignore_errors=True)
                raise ShardmakeError(complaint) from error
            raise

    def _full_disk(self, error: BaseException, written: Path) -> str:
        """What to do where ``error`` comes from a full disk; torch says "unexpected pos" then. Else nothing."""
        folder = self.folder if written.is_relative_to(self.folder) else written.parent
        room = disk.free_space(folder)
        full = any(getattr(it, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for it in (error, error.__cause__))
        if isinstance(error, ShardmakeError | KeyboardInterrupt | SystemExit) or not (full or room.free < MARGIN):
            return ""
        newest = next(store.committed(self.folder), None)
        resume = f"resumes from {newest[1].name}" if newest else "starts again from the base model"
        return (
            f"The disk filled up while {written.name} was written: {folder} has "
            f"{format_bytes(room.free)} left ({room.limit}). Free some space (`shardmake clean` lists what can "
            f"go) and run the same command again; it {resume}."
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _from_first(make: Callable[[], T]) -> T:
    """What ``make`` gives on rank 0, on every rank."""
    found: list[Any] = [make() if _rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _gathered(value: T) -> list[T]:
    """Every rank's ``value``, by rank; waits until all are here."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _sync_together(staged: Path) -> dict[str, FileEntry]:
    """Size and checksum of every file below ``staged``, all of them durable and visible from every node.

    One rank per node syncs every file, because only the node that wrote a file can push it out of its cache; the
    checksums are shared out among all ranks. A node's listing may lack what another has just written, so the lists of
    all are put together.
    """
    _gathered(None)  # all have written what they write
    listed = _gathered(list_files(staged) if _is_first_of_node() else [])
    names = sorted({name for names in listed for name in names})
    sizes = _gathered({name: sync_file(staged / name) for name in names} if _is_first_of_node() else {})
    world = dist.get_world_size() if dist.is_initialized() else 1
    mine = {name: fingerprint(wait_visible(staged / name)) for name in names[_rank() :: world]}
    found = {name: entry for share in _gathered(mine) for name, entry in share.items()}
    strange = [name for seen in sizes for name, size in seen.items() if size != found[name].size]
    if strange:
        raise RuntimeError(f"{staged / strange[0]} has another size on another node; the file system does not agree.")
    return {name: found[name] for name in names}


class CommittingTrainer(Trainer):
    """A Trainer whose saves go through its ``saver``, which is set before training starts."""

    saver: Saver

    def _get_output_dir(self, trial: Any) -> str:
        """Where checkpoints are written before they count."""
        return str(self.saver.place)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        state = self.state
        losses = [line["eval_loss"] for line in state.log_history if _is_evaluation(line, state.global_step)]
        must = self.control.should_training_stop
        with self.saver.saving(state.global_step, must=must, eval_loss=losses[-1] if losses else None) as folder:
            if folder is not None:
                super()._save_checkpoint(model, trial)
                nvme_restore.note_sub_groups(self.model_wrapped, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and self.is_deepspeed_enabled:
            nvme_restore.restore(self.model_wrapped, Path(checkpoint))
            fit_states(self.model_wrapped.optimizer.optimizer)


def _is_evaluation(line: dict[str, Any], step: int) -> bool:
    return "eval_loss" in line and line.get("step") == step

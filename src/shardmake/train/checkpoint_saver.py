"""Save the checkpoints of a training; all ranks take part in each save.

A save first makes room. Then every rank writes its files, the first rank of each node checks those of the node, the
record is written last, and older checkpoints are removed after that.

With a scratch folder the ranks write there and continue training while `shardmake.train.upload` copies the files to
the shared folder. The next save waits for that upload. Required saves (the last step, a requested stop) go straight to
the shared folder.

A save that does not fit is skipped with a warning, and training continues. A required save that does not fit waits for
room, and ends training with an error if none appears. A disk that fills up during a save also ends training, because
the ranks no longer agree on what is written; the driver resumes it once there is room. Checkpoints that were committed
before stay unchanged in all cases.
"""

import contextlib
import errno
import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmake.checkpoint import store
from shardmake.checkpoint.node_files import check_files, complete, move_files, node_path, read_listings
from shardmake.checkpoint.record import RECORD_NAME, CheckpointRecord, find_problems, wait_visible
from shardmake.core import disk
from shardmake.core.environment import library_versions
from shardmake.core.errors import DiskFullError, ShardmakeError
from shardmake.core.fingerprint import FileEntry
from shardmake.core.run_folder import make_folder, remove
from shardmake.core.units import format_bytes, format_duration
from shardmake.run.attempt import AttemptDir, restarts
from shardmake.run.training_settings import Retention
from shardmake.train.async_saver import MARGIN, ScratchFolder, upload_error
from shardmake.train.collectives import (
    barrier,
    first_found,
    get_node,
    get_node_size,
    get_rank,
    get_world_size,
    is_first_of_node,
    largest,
    run_on_first_rank,
)

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_ROOM_POLL_SECONDS = 1.0
_WORKERS = 8
_DONE, _RUNNING, _FAILED = range(3)
"""States of a node's upload; the largest of all nodes counts."""
Describe = Callable[[int], dict[str, Any]]


class SupersededError(RuntimeError):
    """A later attempt, or a restart of the job, has begun."""


@dataclass
class Saver:
    """Write the checkpoints of one training; every rank has one."""

    folder: Path
    """The folder of the checkpoints."""
    describe: Describe
    """Returns what the record of a step contains besides the files."""
    retention: Retention
    expected_bytes: int = 0
    """Estimated size of the first checkpoint; later ones are as large as the one before."""
    scratch: ScratchFolder | None = None
    """This node's scratch folder, for asynchronous saves."""
    room_seconds: float = 0.0
    """How long a required save that does not fit waits for room."""
    attempt: AttemptDir | None = None
    """The attempt that saves. Once a later one has begun, nothing is written any more."""
    seconds: float | None = field(default=None, init=False)
    """Seconds that the newest save kept training waiting, the same on every rank."""
    upload_seconds: float = field(default=0.0, init=False)
    """Seconds from the start of the newest asynchronous save until its commit; 0 without a scratch folder."""
    pending_upload: Path | None = field(default=None, init=False)
    """The staged checkpoint that is being uploaded, the same on every rank."""
    upload: "subprocess.Popen[str] | None" = field(default=None, init=False)
    """The process that uploads this node's part; None on all ranks but the node's first."""
    _scratch_warning_logged: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        start = (int(self.attempt.root.name), restarts()) if self.attempt else (1,)
        self.staging = store.staging_folder(self.folder, *start)
        """The folder of this attempt's unfinished saves."""
        self.write_dir = self.staging
        """The folder that contains the checkpoint while the ranks write it."""

    @contextlib.contextmanager
    def saving(self, step: int, *, required: bool, eval_loss: float | None = None) -> Iterator[Path | None]:
        """Yield the folder for the ranks to write to; commit or upload the checkpoint when the block ends.

        Yield None if the checkpoint does not fit, or raise `ShardmakeError` if it is ``required``, as for a disk that
        fills up. Raise `RuntimeError` if the pending upload failed and this save is not required.
        """
        self._wait_before_save(step, required)
        started = time.time()
        problem, size, self.upload_seconds = run_on_first_rank(lambda: self._prepare_space(step, required))
        if problem:
            if required:
                raise DiskFullError(problem)
            if get_rank() == 0:
                logger.warning("checkpoint-%d is skipped. %s", step, problem)
            yield None
            return
        staged, local = self.staging / f"checkpoint-{step}", None if required else self._scratch_path(step, size)
        described = {"step": step, "eval_loss": eval_loss, "versions": library_versions(), **self.describe(step)}
        target = local or node_path(staged, get_node())
        self.write_dir = target.parent
        with self._translate_full_disk(target):
            yield target
            if local:
                self._start_upload(local, staged, described, started)
            else:
                self._commit(staged, described, started)

    def _wait_before_save(self, step: int, required: bool) -> None:
        """Wait for the pending upload; if this save is required, only warn about an upload that failed."""
        try:
            self.wait_for_upload()
        except (RuntimeError, ShardmakeError) as error:
            if not required:
                raise
            if get_rank() == 0:
                logger.warning("%s checkpoint-%d is now written there directly.", error, step)

    def wait_for_upload(self) -> None:
        """Wait for the pending upload, if there is one; every rank must call it.

        The ranks poll together, because one long wait in a collective could reach its timeout.
        """
        if self.pending_upload is None:
            return
        staged, self.pending_upload = self.pending_upload, None
        while (state := largest(self._upload_state())) == _RUNNING:
            time.sleep(_POLL_SECONDS)
        if state == _FAILED:
            self._raise_upload_error(staged)
        self.upload = None

    def _upload_state(self) -> int:
        code = self.upload.poll() if self.upload else 0
        return _RUNNING if code is None else _FAILED if code else _DONE

    def _raise_upload_error(self, staged: Path) -> None:
        """Kill the uploads that still run, and raise the error of the first node whose upload failed."""
        found = upload_error(self.upload) if self.upload and self.upload.poll() else None
        if self.upload:
            self.upload.kill()
            self.upload.wait()
            self.upload = None
        error = first_found(found)
        assert error is not None
        with self._translate_full_disk(staged):
            raise RuntimeError(
                f"Uploading {staged.name} from the node's scratch folder to {self.folder} failed: {error.strerror}. "
                "Run the same command again, or set checkpoints.asynchronous to false to write there directly."
            ) from error

    def _prepare_space(self, step: int, required: bool) -> tuple[str, int, float]:
        """Clear the staging folder, and make room for the checkpoint of ``step``; wait for room if it is ``required``.

        Returns an error message (empty if the checkpoint fits), the expected size, and the duration of the newest save.
        """
        self._stop_if_superseded()
        for left in (self.staging, *(path for _, path in store.checkpoints(self.folder / store.STAGING))):
            remove(left)
        newest = self._newest()
        needed = newest[0].size if newest else self.expected_bytes
        seconds = newest[0].save_seconds if newest and self.scratch else 0.0
        problem = self._make_space(needed)
        if problem and required and self.room_seconds:
            problem = self._wait_for_room(step, needed, problem)
        if not problem:
            make_folder(self.staging, private=True)
        return problem, needed, seconds

    def _stop_if_superseded(self) -> None:
        """Raise `SupersededError` once a later attempt has begun: its checkpoints must not be touched."""
        if self.attempt and self.attempt.is_superseded():
            raise SupersededError(f"Attempt {self.attempt.root.name} saves nothing, because a later one has begun.")

    def _wait_for_room(self, step: int, needed: int, problem: str) -> str:
        """Wait until ``needed`` bytes are free; return ``problem`` if they are not in time."""
        waiting = format_duration(self.room_seconds)
        logger.warning("checkpoint-%d must be saved. Training waits up to %s for room. %s", step, waiting, problem)
        deadline = time.monotonic() + self.room_seconds
        while time.monotonic() < deadline:
            time.sleep(_ROOM_POLL_SECONDS)
            if needed <= disk.free_space(self.folder).free:
                logger.info("There is room for checkpoint-%d now.", step)
                return ""
        return problem

    def _scratch_path(self, step: int, size: int) -> Path | None:
        """Return this node's scratch path for a checkpoint of ``size`` bytes; None for a direct save."""
        if self.scratch is None:
            return None
        if problem := first_found((self.scratch.make_room(size) if is_first_of_node() else "") or None):
            if get_rank() == 0 and not self._scratch_warning_logged:
                logger.warning("checkpoint-%d is not saved asynchronously. %s", step, problem)
            self._scratch_warning_logged = True
            return None
        return self.scratch.folder / f"checkpoint-{step}"

    def _start_upload(self, local: Path, staged: Path, described: dict[str, Any], started: float) -> None:
        barrier()  # all ranks have written their files
        self.seconds = run_on_first_rank(lambda: time.time() - started)
        self.pending_upload = staged
        if is_first_of_node():
            assert self.scratch is not None
            described |= {"blocked_seconds": self.seconds}
            self.upload = self.scratch.start_upload(local, staged, described, started, self.retention)

    def _commit(self, staged: Path, described: dict[str, Any], started: float) -> None:
        files = _assemble(staged)
        if get_rank() == 0:
            self._stop_if_superseded()
            store.commit_and_prune(staged, files, described, started, self.retention)
        self.seconds = run_on_first_rank(lambda: time.time() - started)
        if is_first_of_node():
            wait_visible(self.folder / staged.name / RECORD_NAME)

    @contextlib.contextmanager
    def _translate_full_disk(self, written: Path) -> Iterator[None]:
        """Turn an error from a full disk below ``written`` into a `DiskFullError`, and remove what was written."""
        try:
            yield
        except BaseException as error:  # torch's distributed checkpoint raises a BaseException for a failed write
            if full := self._full_disk_error(error, written):
                remove(self.staging if written.is_relative_to(self.staging) else written)
                raise full from error
            raise

    def _newest(self) -> tuple[CheckpointRecord, Path] | None:
        return next(store.committed(self.folder), None)

    def _make_space(self, needed: int) -> str:
        """Remove what may be removed until ``needed`` bytes fit; return an error message if they do not."""
        make_folder(self.folder)
        for free_space in (lambda: None, self._remove_damaged, self._remove_older):
            free_space()
            if needed <= disk.free_space(self.folder).free:
                return ""
        try:
            disk.check_save(self.folder, needed)
        except ShardmakeError as error:
            return str(error)
        return ""

    def _remove_damaged(self) -> None:
        for path in store.damaged(self.folder):
            logger.info("Removing %s to make room for the next checkpoint.", path.name)
            store.remove(path)

    def _remove_older(self) -> None:
        """Keep only the newest checkpoint (and the best), after verifying every byte of the newest."""
        newest = self._newest()
        if newest and not find_problems(newest[1]):
            for path in store.prune(self.folder, Retention(keep=1, best=self.retention.best)):
                logger.info("Removed %s to make room for the next checkpoint.", path.name)

    def _full_disk_error(self, error: BaseException, written: Path) -> DiskFullError | None:
        """Return the error to raise if ``error`` comes from a full disk below ``written``, else None.

        The error number is not always available: torch reports an "unexpected pos" on a full disk.
        """
        folder = self.folder if written.is_relative_to(self.folder) else written.parent
        space = disk.free_space(folder)
        full = any(getattr(it, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for it in (error, error.__cause__))
        if isinstance(error, ShardmakeError | KeyboardInterrupt | SystemExit) or not (full or space.free < MARGIN):
            return None
        newest = self._newest()
        resume = f"resumes from {newest[1].name}" if newest else "starts again from the base model"
        if space.free < MARGIN:
            where = f"{folder} has {format_bytes(space.free)} left ({space.limit})"
        else:
            where = (
                f"the file system refused the write, although {folder} now has {format_bytes(space.free)} left "
                f"({space.limit}). Room may have appeared since, or a quota of files or of a group may be used up"
            )
        return DiskFullError(
            f"The disk filled up while {written.name} was written: {where}. Free some space (`shardmake clean` lists "
            f"what can be removed). Training {resume}."
        )


def _assemble(staged: Path) -> dict[str, FileEntry]:
    """Collect in ``staged`` what the ranks of all nodes have written; return its files on rank 0, nothing elsewhere.

    The first rank of each node makes the node's files durable and computes their checksums. Sizes and checksums reach
    rank 0 in a file per node: in a collective, every rank would receive the longest listing once per rank.
    """
    node, nodes = get_node(), get_world_size() // get_node_size()
    barrier()  # all ranks have written their files
    own = check_files(node_path(staged, node), min(get_node_size(), _WORKERS)) if is_first_of_node() else {}
    barrier()  # node 0 has listed its folder, into which the others move their files
    if is_first_of_node():
        move_files(staged, node, own)
    barrier()  # all files and listings are in place
    if get_rank():
        return {}
    return complete(staged, read_listings(staged, nodes, own))

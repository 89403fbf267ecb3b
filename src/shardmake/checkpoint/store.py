"""The checkpoint store: commit, list, recover and prune the checkpoints of a run.

A checkpoint is committed once its record is in place; the record is written last. The record lists every file with size
and CRC-32, so that a truncated or bit-flipped shard is detected before loading. Resuming then falls back to an older
checkpoint.

A save is written to a staging folder beside the checkpoints and is renamed once its record is written. Tools that look
at folder names alone (``get_last_checkpoint`` of transformers) therefore see complete checkpoints only.
"""

import contextlib
import logging
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardmake.checkpoint.record import (
    FOLDER,
    RECORD_NAME,
    CheckpointRecord,
    find_problems,
    is_intact,
    is_unfinished,
    read_record,
)
from shardmake.core import run_folder
from shardmake.core.atomic import sealed, write_bytes, write_json
from shardmake.core.errors import CheckpointError, LinkError
from shardmake.core.fingerprint import FileEntry
from shardmake.run.training_settings import Retention

logger = logging.getLogger(__name__)

STAGING = ".saving"
_TAG = "latest"
REMOVE_SECONDS = 5.0


def staging_folder(folder: Path, attempt: int, start: int = 0) -> Path:
    """Return the folder of the unfinished saves of one ``start`` of an attempt's ranks.

    A node that returns late renames nothing of the next one.
    """
    return folder / STAGING / (f"{attempt:03d}-{start}" if start else f"{attempt:03d}")


def commit(staged: Path, record: CheckpointRecord) -> Path:
    """Write the record of ``staged``, rename it to its name among the checkpoints and return that path.

    The rename commits the checkpoint. One rank calls this after all nodes have checked their files.
    """
    final = staged.parent.parent.parent / staged.name
    if final.exists():
        set_aside(final, "foreign" if is_unfinished(final) else "damaged")
    commit_in_place(staged, record)
    run_folder.rename(staged, final)
    with contextlib.suppress(OSError):  # the checkpoint is committed; the next save removes leftovers
        run_folder.remove_empty(staged.parent)
        run_folder.remove_empty(staged.parent.parent)
    run_folder.fsync_directory(final.parent)
    return final


def commit_and_prune(
    staged: Path, files: dict[str, FileEntry], details: dict[str, Any], started: float, retention: Retention
) -> None:
    """Commit the checkpoint in ``staged`` and remove the checkpoints that ``retention`` does not keep.

    Its ``files`` are durable, ``details`` the other fields of its record, and ``started`` is the Unix time at which the
    save began. Raise `CheckpointError` if it holds no weights, because a library selected none.
    """
    shards = {name: entry.size for name, entry in files.items() if name.endswith(".distcp")}
    for folder in {Path(name).parent for name in shards}:
        if not sum(size for name, size in shards.items() if Path(name).parent == folder):
            raise CheckpointError(
                f"Cannot save {staged.name}: {folder} holds no tensors. A library selected none. Report this message."
            )
    now = time.time()
    record = CheckpointRecord(
        saved_at=now,
        save_seconds=now - started,
        rng_states=sum(name.startswith("rng_state") for name in files),
        files=files,
        **details,
    )
    commit(staged, record)
    prune(staged.parent.parent.parent, retention, newest_write=record.step)


def set_aside(checkpoint: Path, kind: str = "damaged") -> Path:
    """Rename a checkpoint so that it is no longer listed, without deleting it; return its new path.

    A ``foreign`` one is a person's, and keeps a name that no later step removes.
    """
    aside = checkpoint.with_name(f"{kind}-{checkpoint.name}-{time.time_ns()}")
    run_folder.rename(checkpoint, aside)
    return aside


def commit_in_place(checkpoint: Path, record: CheckpointRecord) -> None:
    """Sync the folders of ``checkpoint``, whose files are durable, and write its record."""
    for folder in {(checkpoint / name).parent for name in record.files}:
        run_folder.fsync_directory(folder)
    write_json(checkpoint / RECORD_NAME, sealed(record.model_dump(mode="json")))
    run_folder.fsync_directory(checkpoint.parent)


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps and paths of all checkpoint folders in ``folder``, newest first, finished or not."""
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := FOLDER.fullmatch(path.name))]
    return sorted(found, reverse=True)


def committed(folder: Path) -> Iterator[tuple[CheckpointRecord, Path]]:
    """Yield the checkpoints with a readable record, newest first, without validating their files."""
    for _, path in checkpoints(folder):
        if record := read_record(path):
            yield record, path


def newest_valid(folder: Path, *, checksums: bool = True) -> tuple[CheckpointRecord, Path] | None:
    """Return the newest checkpoint that `find_problems` finds to be as recorded; log why newer ones are skipped."""
    for _, path in checkpoints(folder):
        if is_unfinished(path):
            continue
        record, problems = read_record(path), find_problems(path, checksums=checksums)
        if record and not problems:
            return record, path
        logger.warning("Skipped %s: %s.", path.name, "; ".join(problems))
    return None


def recover(folder: Path, *, checksums: bool = True) -> tuple[CheckpointRecord, Path] | None:
    """Return the newest valid checkpoint and clear everything newer, so that training can resume from it.

    Without ``checksums``, sizes alone decide; the nodes of the job then validate the content in parallel.

    Unfinished saves are removed. A checkpoint that is newer than the valid one, or whose record cannot be read, is set
    aside for manual recovery and removed when its disk space is needed. A folder without a record is a person's, and
    stays. Call this only while no training is writing.
    """
    discard_unfinished(folder)
    for _, path in checkpoints(folder):
        _restore_tag(path)
    found = newest_valid(folder, checksums=checksums)
    for step, path in checkpoints(folder):
        if is_unfinished(path):
            continue
        if found is None or step > found[0].step or read_record(path) is None:
            logger.info("Renamed %s to %s.", path.name, set_aside(path).name)
    return found


def _restore_tag(checkpoint: Path) -> None:
    """Write DeepSpeed's ``latest`` again if it is missing or damaged, because its content follows from the record."""
    record = read_record(checkpoint)
    if record is None or _TAG not in record.files or is_intact(record, checkpoint, _TAG):
        return
    content = f"global_step{record.step}".encode()
    if record.files[_TAG] == FileEntry(size=len(content), crc32=f"{zlib.crc32(content):08x}"):
        logger.info("Writing %s/%s again: it was missing or damaged.", checkpoint.name, _TAG)
        write_bytes(checkpoint / _TAG, content)


def discard_unfinished(folder: Path) -> None:
    """Remove the files of interrupted saves, and name the folders that a person put beside the checkpoints."""
    for staging in (folder / STAGING, *(folder / STAGING).glob("[0-9]*")):
        for _, path in checkpoints(staging):
            logger.info("Removing %s: its save was not finished.", path.name)
            remove(path)
    for _, path in checkpoints(folder):
        if is_unfinished(path):
            logger.warning(
                "%s is not used and stays: it has no %s, so no save of this run made it. Move it away; a run starts "
                "with its weights if its resume_from names it.",
                path,
                RECORD_NAME,
            )
    run_folder.remove(folder / STAGING)


def damaged(folder: Path) -> list[Path]:
    """Return the checkpoints that `recover` has set aside."""
    return sorted(folder.glob("damaged-checkpoint-*"))


def remove(checkpoint: Path) -> bool:
    """Remove a checkpoint, from the staging folder, so that a kill in between leaves an unfinished save.

    A process that is still exiting may write into the folder, and NFS keeps open files. Removal is therefore retried
    for `REMOVE_SECONDS`. Return False and log the reason if files remain. A link is not followed, also one that has
    just taken the checkpoint's place.
    """
    deadline = time.monotonic() + REMOVE_SECONDS
    listed, checkpoint = checkpoint, _unlist(checkpoint)
    while True:
        try:
            if checkpoint == listed:  # a kill in between must not leave a record without its files
                run_folder.unlink(checkpoint / RECORD_NAME)
            run_folder.remove(checkpoint, strict=True)
            break
        except LinkError as error:
            logger.warning("Could not remove %s: %s", listed, error)
            return False
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not checkpoint.exists():
                break
            if isinstance(error, (PermissionError, NotADirectoryError)) or time.monotonic() > deadline:
                logger.warning("Could not remove %s: %s.", error.filename or listed, error.strerror)
                return False
        time.sleep(0.2)
    if checkpoint != listed:
        with contextlib.suppress(OSError):  # a save may be in progress there
            run_folder.remove_empty(checkpoint.parent)
    return True


def _unlist(checkpoint: Path) -> Path:
    """Move a checkpoint out of the list, and return its new path; what cannot be moved is removed where it is."""
    staging = checkpoint.parent / STAGING
    if STAGING not in checkpoint.parts and FOLDER.fullmatch(checkpoint.name) and not checkpoint.is_symlink():
        with contextlib.suppress(OSError, LinkError):
            run_folder.make_folder(staging, parents=False)
            run_folder.rename(checkpoint, staging / checkpoint.name)
            return staging / checkpoint.name
    return checkpoint


def prune(folder: Path, retention: Retention, newest_write: int | None = None) -> list[Path]:
    """Remove the committed checkpoints that ``retention`` does not keep and return their paths.

    The checkpoint of step ``newest_write`` stays in any case, also where checkpoints of later steps lie beside it.
    """
    found = list(committed(folder))
    kept = retention.kept({record.step: record.eval_loss for record, _ in found}) | {newest_write}
    return [path for record, path in found if record.step not in kept and remove(path)]

"""The destination of a merge: which folder may be replaced, and the staging folder beside it.

The staging folder, in which the model is written, is locked, removed on errors, and renamed when it is complete.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from shardmake.checkpoint.formats.contents import Contents
from shardmake.checkpoint.formats.registry import LAYOUTS
from shardmake.consolidate.aux_files import AUX_FILES
from shardmake.consolidate.layout import PlannedShard
from shardmake.core import run_folder
from shardmake.core.disk import require_space
from shardmake.core.errors import CheckpointError, ConfigError, ShardmakeError
from shardmake.core.fingerprint import fingerprint
from shardmake.core.hub import cached_snapshot, is_hub_id, translate_hub_errors, with_retries
from shardmake.core.units import format_bytes
from shardmake.run.paths import MODEL_CARD, MODEL_RECEIPT
from shardmake.run.receipts import MergeReceipt

logger = logging.getLogger(__name__)
_NAMED = 5
_SMALL = 64 << 20
"""Bytes; of larger files only the size is compared with the receipt, because hashing them takes as long as a merge."""


def check_destination(out: Path, sources: Mapping[Path, str], *, overwrite: bool) -> None:
    """Raise `ConfigError` if writing the model to ``out`` would remove something else.

    Links are followed, and folders are compared by device and inode.

    Args:
        out: The model's folder. If it exists, it must be empty or hold an unchanged earlier result of a merge.
        sources: What each folder is that must neither hold ``out`` nor be in it.
        overwrite: Accept an ``out`` with any other content.
    """
    cannot = f"Cannot write the model to {out}."
    try:
        out.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:  # Path.resolve refuses a loop only before Python 3.13
            raise ConfigError(f"{cannot} Its symbolic links form a loop. Name another folder.") from None
    place = run_folder.real_path(out)
    staging = staging_folder(out)
    for folder, what in sources.items():
        if relation := _relation(place, folder.resolve()):
            raise ConfigError(f"{cannot} It {relation} {what} {folder}. Name another folder.")
        if _relation(staging, folder.resolve()):
            raise ConfigError(f"{cannot} The merge writes to {staging} first, where {what} is. Name another folder.")
    for folder, what in ((Path.cwd(), "the current folder"), (Path("~").expanduser(), "your home folder")):
        if _relation(place, folder.resolve()) in ("is", "contains"):
            raise ConfigError(f"{cannot} It is or contains {what} {folder}. Name a new folder.")
    if staging.is_symlink() or (staging.exists() and not staging.is_dir()):
        raise ConfigError(f"{cannot} The merge writes to {staging} first, which is not a folder. Remove it.")
    if place.exists() and not place.is_dir():
        raise ConfigError(f"{cannot} It is not a folder. Name another folder.")
    foreign = [] if overwrite or not place.is_dir() else list(_foreign_files(place))
    if foreign:
        named = ", ".join(foreign[:_NAMED]) + f" and {len(foreign) - _NAMED} more" * (len(foreign) > _NAMED)
        raise ConfigError(
            f"{cannot} It holds files that are not the result of an earlier merge: {named}. Name a new folder, or add "
            "--overwrite to delete everything in this one."
        )


def staging_folder(out: Path) -> Path:
    """Return the folder in which the files of ``out`` are written before they replace it."""
    place = run_folder.real_path(out)
    return place.parent / f".{place.name}.partial"


def checkpoint_folders(contents: Contents) -> list[Path]:
    """Return the folders of a checkpoint: the one with the shards, and its parent if that is the checkpoint.

    The last two layouts are those of any folder with an adapter or a file in it.
    """
    folder = contents.folder
    try:
        is_inner = any(folder in layout.find(folder.parent).values() for layout in LAYOUTS[:-2])
    except CheckpointError:  # the parent is a checkpoint, but not a complete one
        is_inner = True
    return [folder, folder.parent] if is_inner else [folder]


def _relation(out: Path, source: Path) -> str | None:
    """Return how ``out`` relates to ``source``: ``is``, ``contains``, ``is in``, or None."""
    ours, theirs = _identities(out), _identities(source)
    if ours[0] == theirs[0]:
        return "is"
    return "contains" if ours[0] in theirs else "is in" if theirs[0] in ours else None


def _identities(path: Path) -> list[object]:
    """Return device and inode of ``path`` and of each of its parents; of what does not exist the path."""
    states = {folder: folder.stat() for folder in (path, *path.parents) if folder.exists()}
    return [(state.st_dev, state.st_ino) if (state := states.get(it)) else it for it in (path, *path.parents)]


def _foreign_files(folder: Path) -> Iterator[str]:
    """Yield the names in ``folder`` that the merge whose receipt is there did not write, or that were changed since."""
    try:
        written = MergeReceipt.read(folder / MODEL_RECEIPT).verification.files
    except ShardmakeError:
        yield from sorted(path.name for path in folder.iterdir())
        return
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if path.is_symlink() or name not in {MODEL_RECEIPT, MODEL_CARD, *written}:
            yield name
        elif name in written:
            size = written[name].size
            if path.stat().st_size != size or (size <= _SMALL and fingerprint(path) != written[name]):
                yield f"{name} (changed)"


def check_space(shards: list[PlannedShard], staging: Path) -> None:
    """Raise `DiskFullError` if the files still to be written do not fit into the file system or a quota."""
    files = [staging / name for shard in shards for name in (shard.name, f".{shard.name}.tmp")]
    present = sum(path.stat().st_blocks * 512 for path in files if path.is_file())
    needed = sum(shard.size for shard in shards) - present
    advice = "Free some space, choose another folder, or use --dtype bf16."
    require_space(staging.parent, needed, f"The merged model needs {format_bytes(needed)}", advice, len(files))


def remove_others(shards: list[PlannedShard], staging: Path, *keep: str) -> None:
    """Remove files of an interrupted merge that do not belong to this one."""
    names = {name for shard in shards for name in (shard.name, f".{shard.name}.done")} | {".lock", *keep}
    for path in staging.iterdir():
        if path.name not in names:
            run_folder.remove(path)


class StagingLock:
    """Excludes a second merge into the same folder; the tasks of one merge share the lock until the last one ends."""

    def __init__(self, staging: Path, task: tuple[int, int]) -> None:
        self._staging, self._task = staging, task

    def __enter__(self) -> "StagingLock":
        run_folder.make_folder(self._staging)
        index, count = self._task
        with ExitStack() as opened:
            self._file = self._locked(opened, ".lock", fcntl.LOCK_EX if count == 1 else fcntl.LOCK_SH)
            if count > 1:
                self._locked(opened, f".task-{index}", fcntl.LOCK_EX)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._exists() and all(path.name.startswith((".lock", ".task-")) for path in self._staging.iterdir()):
            run_folder.remove(self._staging)
        self._opened.close()

    def _locked(self, opened: ExitStack, name: str, kind: int) -> IO[str]:
        file = opened.enter_context(run_folder.open_file(self._staging / name, "w"))
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            raise CheckpointError(
                f"Another merge is writing to {self._staging}. Wait until it has finished, or stop it."
            ) from None

    def is_last(self) -> bool:
        """Wait for the other tasks; return True if none of them has finished the merge in the meantime."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return self._exists()

    def _exists(self) -> bool:
        """Return True if the folder is still the one that was locked."""
        path = self._staging / ".lock"
        return path.is_file() and os.path.samestat(path.stat(), os.fstat(self._file.fileno()))


@contextmanager
def discard_on_error(staging: Path) -> Iterator[None]:
    """Remove the staging folder after an error; a killed merge leaves it, and the next merge resumes there."""
    try:
        yield
    except OSError as error:
        run_folder.remove(staging)
        raise CheckpointError(
            f"Writing to {staging} failed: {error}. No output was left behind. Fix the problem and run the command "
            "again."
        ) from error
    except KeyboardInterrupt:
        logger.warning("Interrupted. %s holds the finished files; the same command resumes there.", staging)
        raise
    except Exception:
        run_folder.remove(staging)
        raise


def replace_folder(staging: Path, out: Path) -> None:
    """Replace ``out`` by the complete staging folder; readers see the old folder or the new one, never a mix."""
    out = run_folder.real_path(out)
    run_folder.unlink(staging / ".lock")
    for path in staging.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    run_folder.fsync_directory(staging)
    run_folder.replace(staging, out, _replaced_folder(out))
    run_folder.remove(staging)
    run_folder.remove(_replaced_folder(out))


def recover_replaced(out: Path) -> None:
    """Finish what a merge that was killed between the two renames of `replace_folder` left beside ``out``."""
    out = run_folder.real_path(out)
    old = _replaced_folder(out)
    if old.is_dir() and not out.exists():
        run_folder.rename(old, out)
    run_folder.remove(old)


def _replaced_folder(out: Path) -> Path:
    """Return the name that the previous ``out`` has for a moment on a file system that cannot swap two folders."""
    return out.parent / f".{out.name}.replaced"


def find_base(named: str) -> Path:
    """Return the folder that ``named`` is; a hub id (``org/name`` or ``org/name@revision``) is fetched if needed.

    Of a model that is not in the hub's local cache, only the small files are fetched. Its weights are needed for a LoRA
    adapter only, and may be hundreds of gigabytes.

    Raises:
        ConfigError: ``named`` is neither a folder nor a hub id.
        HubError: The hub did not answer or rejected the request.
    """
    path = Path(named).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"Cannot use --base {named}. It is a file. Name its folder: {path.absolute().parent}")
    repository, _, version = named.partition("@")
    revision = version or None
    if not is_hub_id(repository):
        raise ConfigError(f"Cannot use --base {named}. There is no such folder. Name a folder or a hub id (org/name).")
    from huggingface_hub import constants, snapshot_download

    cached = cached_snapshot(repository, revision)
    if cached is not None and (cached / "config.json").is_file():
        return cached
    if constants.is_offline_mode():
        raise ConfigError(
            f"Cannot use --base {repository}. It is not in the hub's local cache, and HF_HUB_OFFLINE is set. Name "
            "a folder."
        )
    advice = f"Check the name and the revision, download it with `hf download {repository}`, or name a folder."
    with translate_hub_errors(f"Fetching the base model {repository}", {}, advice):
        return Path(with_retries(lambda: snapshot_download(repository, revision=revision, allow_patterns=AUX_FILES)))

"""The one place that opens, replaces and removes what lies inside a run's folder.

Others of a lab may write to a shared run, and put a link to somebody's data in the place of any name at any moment.
Each path is therefore reached from the run's folder by open descriptors, without following a link. Of a path in no
run's folder, only the last name is treated so. Data, models and checkpoints may be read through a link: their checksums
are compared. Members own files in each other's runs, so only a private folder must have this user as its owner.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from shardmake.core.errors import LinkError

logger = logging.getLogger(__name__)

_RENAME_EXCHANGE: Final = 2
_OPEN: Final = os.O_PATH | os.O_DIRECTORY  # a folder that may be entered, but not listed, such as /home, is enough
_roots: set[str] = set()


def protect(root: Path) -> None:
    """Follow no link below ``root``, the folder of a run, in this process from now on."""
    absolute = Path(os.path.abspath(root))  # noqa: PTH100 (resolve would follow links)
    if str(absolute) not in _roots:
        _roots.update({str(absolute), str(absolute.parent.resolve() / absolute.name)})


def refuse_link(path: Path) -> None:
    """Raise `LinkError` if ``path`` is a link."""
    if path.is_symlink():
        raise LinkError(
            f"{path} is a link to {path.readlink()}. Stages replace and remove what they find there, so they follow no "
            "link. Put a file or folder of the run in its place. For a larger file system, make the folder of all runs "
            "a link."
        )


def real_path(path: Path) -> Path:
    """Return ``path`` without the links in it, but for those below a run's folder, which are not followed."""
    root = _root_of(path)
    if root is None:
        return path.resolve()
    return root.parent.resolve() / Path(os.path.abspath(path)).relative_to(root.parent)  # noqa: PTH100


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open ``path`` as `open` does; raise `LinkError` for a link, and to write to a file with several names."""
    return open(path, mode, opener=lambda _, flags: descriptor(path, flags), **options)


def read_bytes(path: Path) -> bytes:
    """Return the content of ``path``; raises as `open_file` does."""
    with open_file(path, "rb") as file:
        return bytes(file.read())


def descriptor(path: Path, flags: int) -> int:
    """Return the descriptor of ``path``, opened with ``flags``; raises as `open_file` does."""
    with _parent(path) as (folder, name):
        file = os.open(name, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    if writes and (found := os.fstat(file)).st_nlink > 1 and stat.S_ISREG(found.st_mode):
        os.close(file)
        raise LinkError(f"{path} is not written: it has {found.st_nlink} names (hard links). Remove this one.")
    if flags & os.O_TRUNC:
        os.ftruncate(file, 0)
    return file


def make_folder(path: Path, *, parents: bool = True, private: bool = False) -> None:
    """Create the folder ``path``, which may exist.

    Nobody else may write to a ``private`` one: libraries write to paths in it, which are renamed once complete. One
    that another member's command left behind is moved aside, because only that member can remove it.
    """
    if not private and not _root_of(path / "any") and path.is_dir():  # also a link, such as a cache on scratch
        return
    with _parent(path, make=parents) as (folder, name):
        try:
            os.mkdir(name, 0o700 if private else 0o777, dir_fd=folder)
        except OSError as error:  # NFS may refuse to create before it finds that the folder is there
            try:
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                raise error from None
            if not stat.S_ISDIR(found.st_mode):
                raise
            if private and found.st_uid != os.geteuid():
                aside = f".{name.lstrip('.')}.of-{found.st_uid}-{time.time_ns()}"
                logger.warning("%s was left by user %d, who alone can remove it: %s", path, found.st_uid, aside)
                os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
                os.mkdir(name, 0o700, dir_fd=folder)
            elif private and found.st_mode & 0o077:
                raise LinkError(
                    f"{path} is not a folder of this user alone. Remove it, and run the same command again."
                ) from None


def rename(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, which it replaces if it is a file, a link or an empty folder."""
    with _parent(target) as (other, new_name), _parent(source) as (folder, name):
        try:
            os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=other)
        except OSError as error:
            error.filename, error.filename2 = str(source.absolute()), str(target.absolute())
            raise


def remove_empty(folder: Path) -> None:
    """Remove ``folder``; raise `OSError` if it is not empty."""
    with _parent(folder) as (above, name):
        os.rmdir(name, dir_fd=above)


def make_link(path: Path, target: str | Path) -> None:
    """Create ``path`` as a link to ``target``."""
    with _parent(path) as (folder, name):
        os.symlink(target, name, dir_fd=folder)


def exchange(one: Path, other: Path) -> bool:
    """Let two existing paths of one file system change places at once; return False where that is not supported.

    Linux' ``renameat2`` with ``RENAME_EXCHANGE``, for which Python has no function. NFS, for example, lacks it.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    with _parent(one) as (first, name), _parent(other) as (second, other_name):
        return bool(rename(first, os.fsencode(name), second, os.fsencode(other_name), _RENAME_EXCHANGE) == 0)


def replace(new: Path, target: Path, aside: Path) -> None:
    """Put the folder ``new`` in the place of ``target``: at once where the file system can, otherwise by two renames.

    What was there is then at ``new`` or at ``aside``; it gets its name back if the second rename fails.
    """
    if not target.exists() or not any(target.iterdir()):
        rename(new, target)  # this also replaces an empty folder
    elif not exchange(new, target):
        rename(target, aside)
        try:
            rename(new, target)
        except OSError:
            rename(aside, target)
            raise
    fsync_directory(target.parent)


def unlink(path: Path) -> None:
    """Remove the file or link ``path`` if it exists; raise `OSError` for a folder."""
    with contextlib.suppress(FileNotFoundError), _parent(path) as (folder, name):
        os.unlink(name, dir_fd=folder)


def remove(path: Path, *, strict: bool = False) -> None:
    """Remove the file or folder ``path`` if it exists; of a link only the link, never what it leads to.

    What cannot be removed of a folder stays, unless ``strict``: it raises the `OSError`, also without a folder.
    """
    try:
        with _parent(path) as (folder, name):
            if strict or stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(name, ignore_errors=not strict, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        if strict:
            raise


def fsync_directory(folder: Path) -> None:
    """Make new and renamed files in ``folder`` durable."""
    with _parent(folder / "any") as (opened, _):
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=opened)
        try:
            os.fsync(readable)
        finally:
            os.close(readable)


@contextlib.contextmanager
def _parent(path: Path, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the descriptor of the folder of ``path``, created if ``make``, and its name; errors name the whole path."""
    path = Path(os.path.abspath(path))  # noqa: PTH100
    root = _root_of(path)
    start = root or path.parent
    if make:
        start.mkdir(parents=True, exist_ok=True)
    try:
        folder = os.open(start, _OPEN | (os.O_NOFOLLOW if root else 0))
        try:
            for part in path.parent.relative_to(start).parts:
                if make:
                    with contextlib.suppress(OSError):  # NFS may refuse to create before it finds that it is there
                        os.mkdir(part, dir_fd=folder)
                above, folder = folder, os.open(part, _OPEN | os.O_NOFOLLOW, dir_fd=folder)
                os.close(above)
            yield folder, path.name
        finally:
            os.close(folder)
    except OSError as error:
        for inside in reversed([path, *path.parents]):
            if _root_of(inside / "any"):
                refuse_link(inside)
        if isinstance(error.filename, str):
            error.filename = str(path.parent / error.filename)  # which stays as it is if it is a whole path
        raise


def _root_of(path: Path) -> Path | None:
    """Return the run's folder that holds ``path``."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100
    return next((above for above in reversed(absolute.parents) if str(above) in _roots), None)


@contextlib.contextmanager
def locked(runs: Path, name: str) -> Iterator[None]:
    """Hold the lock ``name`` of a folder of runs; on a file system without locks, warn and hold none."""
    path = runs / ".locks" / name
    with contextlib.ExitStack() as opened:
        try:
            make_folder(path.parent)
            file = opened.enter_context(open_file(path, "a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("Another run prepares the same data. Waiting for it.")
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("Cannot lock %s: %s. Each run prepares its own data.", path, error.strerror)
        yield


def link_or_copy(source: str, target: str) -> None:
    """Make ``target`` a hard link to ``source``, or a copy where that is impossible."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or a file of another user
        shutil.copy2(source, target)

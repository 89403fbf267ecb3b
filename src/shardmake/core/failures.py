"""Messages for errors that are not a `ShardmakeError`: of the operating system, of an encoding, and unexpected ones."""

import errno
import os
import re
import tempfile
import time
import traceback
from pathlib import Path
from typing import Final

from shardmake.core.errors import DiskFullError, ShardmakeError
from shardmake.core.secrets import redact

LOGS: Final = Path("logs")
FULL_GPU: Final = (
    r"OutOfMemoryError|(CUDA|HIP|driver)\]?( error)?:? out of memory|failure \d* ?'out of memory'"
    r"|Failed to CUDA (c|m)alloc|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|NVML_SUCCESS == r"
    r"|_STATUS_\w+,? when calling .?cu[a-zA-Z]+Create\b|CUDNN_STATUS_NOT_INITIALIZED"
    r"|(CUDA|HIP)_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
)
"""Regular expression that is searched in ``CLASS: message``."""
_FREE_SPACE: Final = "Free some space (`shardmake clean` lists removable files), and run the command again."
_CHECK_OWNER: Final = "Check its owner and mode (`ls -ld`), or use a folder of your own."
_CHECK_PATH: Final = "Check the path and the working directory."
_REASONS: Final[dict[int, tuple[str, str]]] = {
    errno.ENOSPC: ("No space is left on its file system.", _FREE_SPACE),
    errno.EDQUOT: ("Your disk quota is used up.", _FREE_SPACE),
    errno.EROFS: ("Its file system is read-only.", "Use a folder that you can write to."),
    errno.EACCES: ("Permission was denied.", _CHECK_OWNER),
    errno.EPERM: ("The operation is not permitted.", _CHECK_OWNER),
    errno.ENOENT: ("It does not exist.", _CHECK_PATH),
    errno.ENOTDIR: ("A part of the path is a file and not a folder.", _CHECK_PATH),
    errno.EISDIR: ("It is a folder and not a file.", _CHECK_PATH),
    errno.EEXIST: ("It exists already and is not a folder.", "Move it away, or use another path."),
    errno.ENOTEMPTY: ("The folder is not empty.", "Another process may write to it; run the command again."),
    errno.ENAMETOOLONG: ("The name is too long.", "Use a shorter name."),
    errno.ELOOP: ("Its symbolic links form a loop.", "Check them with `ls -l`."),
    errno.EMFILE: ("This process has too many open files.", "Raise the limit with `ulimit -n`."),
    errno.EIO: ("The file system reported an I/O error.", "Check the file system, and run the command again."),
    errno.ESTALE: ("The network file system lost the file.", "Run the command again."),
}
"""Why a path cannot be used, and what to do, by error number."""

_NO_SPACE: Final = re.compile(r"not enough disk space|no space left", re.IGNORECASE)
"""Texts of libraries that raise an OSError without a number."""
_OF_FOLDER: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
"""Errors of a write that often name no path; then the command's folder is named."""


def explain_os_error(error: OSError, folder: Path) -> ShardmakeError:
    """Return ``error`` as a message with path, reason and what to do.

    ``folder`` is the folder that the process writes to. It is named if the error has no path of its own.
    """
    number = error.errno or (errno.ENOSPC if _NO_SPACE.search(str(error)) else None)
    path = error.filename2 or error.filename or (folder.absolute() if number in _OF_FOLDER else None)
    kind = DiskFullError if number in (errno.ENOSPC, errno.EDQUOT) else ShardmakeError
    if number not in _REASONS or path is None:
        place = f" {_text(path)}" if path is not None else ""
        text = str(error.strerror or error).strip() or type(error).__name__
        return kind(
            f"A file or network operation failed{':' if place else ''}{place}. {text.removesuffix('.')}. "
            "Check the place that it names, and run the command again."
        )
    why, what_to_do = _REASONS[number]
    return kind(f"Cannot use {_text(path)}. {why} {what_to_do}")


def _text(path: object) -> str:
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)


def is_full_gpu(error: BaseException) -> bool:
    """Return whether ``error`` reports that the memory of the GPU is full."""
    return re.search(FULL_GPU, f"{type(error).__name__}: {error}") is not None


def explain_decode_error(error: UnicodeDecodeError) -> ShardmakeError:
    """Return ``error`` as a message that names the file, if a `pathlib.Path` was being read."""
    readers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    path = next((str(reader) for reader in reversed(readers) if isinstance(reader, Path)), "a file")
    return ShardmakeError(
        f"Cannot read {path}. It is not {error.encoding.upper()} text: {error.reason} at byte {error.start}. "
        "Convert it to UTF-8, for example with `iconv`."
    )


def explain(error: Exception, folder: Path) -> ShardmakeError | None:
    """Return ``error`` as one that the user can fix, or None if it is unexpected."""
    if isinstance(error, ShardmakeError):
        return error
    if isinstance(error, OSError):
        return explain_os_error(error, folder)
    return explain_decode_error(error) if isinstance(error, UnicodeDecodeError) else None


def describe_unexpected(error: Exception) -> str:
    """Write the traceback of ``error`` to a file and return a short message that names the file."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    summary = ": ".join(filter(None, (type(error).__name__, first)))
    return (
        f"Unexpected error: {summary}\nThis is a bug in Shardmake or in a library. {_keep_traceback(error)} "
        "Please report it with the traceback."
    )


def _keep_traceback(error: Exception) -> str:
    """Write the traceback below ``logs`` if that folder exists, else to the temporary folder."""
    text = redact("".join(traceback.format_exception(error)))
    name = f"shardmake-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (LOGS, Path(tempfile.gettempdir())):
        try:
            with (folder / name).open("x") as file:  # never through a link that another user made
                file.write(text)
        except OSError:
            continue
        return f"The traceback is in {folder / name}."
    return "No folder for the traceback was writable; `shardmake --verbose` prints it."

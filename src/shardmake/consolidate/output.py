"""A file of known size that is filled in any order, past the page cache where that is asked for and possible.

Direct writes (O_DIRECT, open(2)) cost a third of the CPU time of writes through the page cache, leave nothing for the
sync at the end, and do not push the sources out of memory. But a disk that is being read at the same time is faster if
it is written to seldom and much at a time, which the page cache sees to. They need offset, length and address on page
boundaries; what lies beside those, and everything on a file system without direct writes, goes through the cache.
"""

import ctypes
import errno
import os
from pathlib import Path

from shardmake.consolidate.blocks import PAGE, Block

_SMALLEST_DIRECT = 1 << 18  # bytes; below, the wait for the disk outweighs the copy into the cache
_libc = ctypes.CDLL(None, use_errno=True)


class OutputFile:
    """One file, ``size`` bytes long from the start; threads may write to different places of it at once."""

    def __init__(self, path: Path, size: int) -> None:
        """Create it and reserve its space; an `OSError` if there is too little."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._direct = -1
        try:
            _reserve(self._file, size)
            self._direct = _open_direct(path)
        except OSError:
            self.close()
            raise

    def write(self, content: Block, offset: int, *, direct: bool = False) -> None:
        """Put ``content`` (uint8) at byte ``offset``.

        With ``direct`` it goes past the cache if its address is as far from a page boundary as ``offset`` is.
        """
        begin, size = -offset % PAGE, len(content)
        end = begin + (size - begin) // PAGE * PAGE
        aligned = content.ctypes.data % PAGE == offset % PAGE
        if not direct or self._direct < 0 or not aligned or end - begin < _SMALLEST_DIRECT:
            _write_all(self._file, content, offset)
            return
        _write_all(self._file, content[:begin], offset)
        self._write_direct(content[begin:end], offset + begin)
        _write_all(self._file, content[end:], offset + end)

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close it; it may be closed already."""
        for file in {self._file, self._direct} - {-1}:
            os.close(file)
        self._file = self._direct = -1

    def _write_direct(self, content: Block, offset: int) -> None:
        """File systems may want more than page boundaries, and say so only now."""
        try:
            _write_all(self._direct, content, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _write_all(self._file, content, offset)


def _open_direct(path: Path) -> int:
    """A descriptor for direct writes, -1 where there are none."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return -1


def _reserve(file: int, size: int) -> None:
    """Reserve the space, which also finds out now that there is too little; where that is unknown, set the size."""
    if _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
    os.ftruncate(file, size)


def _write_all(file: int, content: Block, offset: int) -> None:
    view = content.data
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written

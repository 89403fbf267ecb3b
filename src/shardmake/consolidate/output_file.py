"""An output file of known size, written by several threads, past the page cache where that is faster."""

import ctypes
import errno
import os
from pathlib import Path

from shardmake.consolidate.blocks import PAGE, Block

_SMALLEST_DIRECT = 1 << 18  # bytes; below this, waiting for the disk costs more than copying into the cache
_libc = ctypes.CDLL(None, use_errno=True)


class OutputFile:
    """An output file of known size; threads may write to different parts of it at once.

    Direct writes (O_DIRECT, open(2)) cost a third of the CPU time of writes through the page cache, leave nothing for
    the final sync, and do not evict the sources from memory. If the disk is read at the same time, writes through the
    page cache are faster, because they are rare and large. Direct writes need offset, length and address at page
    boundaries. Other bytes, and all bytes on a file system without direct writes, are written through the cache.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Create the file and reserve its space; raise `OSError` if there is too little."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._direct = -1
        try:
            _reserve(self._file, size)
            self._direct = _open_direct(path)
        except OSError:
            self.close()
            raise

    def write(self, content: Block, offset: int, *, direct: bool = False) -> None:
        """Write ``content`` (uint8) at byte ``offset``.

        With ``direct``, write past the cache if the address has the same distance from a page boundary as ``offset``.
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
        """Close the file if it is open."""
        for file in {self._file, self._direct} - {-1}:
            os.close(file)
        self._file = self._direct = -1

    def _write_direct(self, content: Block, offset: int) -> None:
        """Write past the cache; fall back if the file system needs more than page alignment."""
        try:
            _write_all(self._direct, content, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _write_all(self._file, content, offset)


def _open_direct(path: Path) -> int:
    """Return a descriptor for direct writes, -1 if the file system has none."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return -1


def _reserve(file: int, size: int) -> None:
    """Reserve the space, so that a full disk is detected now; if that is not supported, set the size."""
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

"""Write the planned files of a merged model: bounded memory, several workers, restartable, with checksums.

Each output file is written under a temporary name, synced and renamed. A small journal beside it then records that the
file is complete, its source bytes with their CRC-32, and the CRC-32 of each tensor as it was copied. A merge that was
killed resumes after the last complete file.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord, damaged_bytes
from shardmake.consolidate.blocks import PAGE, Block, is_cached
from shardmake.consolidate.layout import CopyJob, PlannedShard, PlannedTensor, plan_jobs
from shardmake.consolidate.scan import OutputSums
from shardmake.consolidate.stream import StreamTask, combine_crc32, stream
from shardmake.core.atomic import digest, write_json
from shardmake.core.errors import CheckpointError
from shardmake.core.run_folder import descriptor, fsync_directory, make_folder, rename, unlink

_SMALLEST_DIRECT = 1 << 18  # bytes; below this, waiting for the disk costs more than copying into the cache
_libc = ctypes.CDLL(None, use_errno=True)


class OutputFile:
    """An output file of known size; threads may write to different parts of it at once.

    Direct writes (O_DIRECT, open(2)) cost a third of the CPU time of writes through the page cache, leave nothing for
    the final sync, and do not evict the sources from memory: 2 GB of fp32 merge in 3.5 s instead of 6.8 s (5.8 s with
    sync_file_range(2)), on two cores and a local disk; to bf16 they make no difference. If the disk is read at the same
    time, writes through the page cache are faster, because they are rare and large. Direct writes need offset, length
    and address at page boundaries. Other bytes, and all bytes on a file system without direct writes, are written
    through the cache.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Create the file and reserve its space; raise `OSError` if there is too little."""
        self._file = descriptor(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
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
        try:
            _write_all(self._direct, content[begin:end], offset + begin)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of a file system that needs more than page alignment
                raise
            end = begin
        _write_all(self._file, content[end:], offset + end)

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file if it is open."""
        for file in {self._file, self._direct} - {-1}:
            os.close(file)
        self._file = self._direct = -1


def _open_direct(path: Path) -> int:
    """Return a descriptor for direct writes, -1 if the file system has none."""
    try:
        return descriptor(path, os.O_WRONLY | os.O_DIRECT)
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


@dataclass(frozen=True)
class SourceSum:
    """The CRC-32 of ``length`` bytes of a record from its byte ``begin`` on.

    ``record`` is the record's file, offset and size, and the CRC-32 of all of it.
    """

    record: tuple[str, int, int, int]
    begin: int
    length: int
    crc: int


class Journal(BaseModel):
    """The record of a finished file: the digest of its plan, its source bytes, and the CRC-32 of its tensors."""

    plan: str
    sources: list[SourceSum]
    tensors: dict[str, int]


@dataclass
class _Output:
    """An output file in progress: its remaining jobs, the CRC-32 of its source bytes and of its tensors."""

    shard: PlannedShard
    jobs: list[CopyJob]
    left: int
    file: OutputFile | None = None
    sums: list[SourceSum] = field(default_factory=list)
    copied: OutputSums = field(default_factory=OutputSums)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finish_job(self, job: CopyJob, record: ZipRecord, crc: int) -> bool:
        """Record that ``job`` is done, with the CRC-32 of its bytes; return True if it was the last one."""
        with self.lock:
            if record.crc is not None:
                place = (str(record.path), record.offset, record.size, record.crc)
                self.sums.append(SourceSum(place, job.begin, job.end - job.begin, crc))
            self.left -= 1
            return self.left == 0


class ShardWriter:
    """Writes the planned files to a folder."""

    def __init__(self, shards: Sequence[PlannedShard], folder: Path) -> None:
        self.folder = folder
        self._outputs = [_Output(shard, jobs, len(jobs)) for shard, jobs in zip(shards, plan_jobs(shards), strict=True)]

    def size(self, part: tuple[int, int] = (0, 1)) -> int:
        """Return the bytes of the tensors in every n-th file, from the i-th on."""
        return sum(output.shard.nbytes for output in self._outputs[part[0] :: part[1]])

    def write(
        self, workers: int = 4, part: tuple[int, int] = (0, 1), advance: Callable[[int], None] = lambda _: None
    ) -> None:
        """Write the files that are not complete yet.

        Args:
            workers: Threads that write; each holds at most three blocks in memory.
            part: ``(i, n)``: write only every n-th file, from the i-th on, as one of n tasks.
            advance: Takes the number of bytes of each write; those of complete files at once.

        Raises:
            CheckpointError: A source file is truncated.
            OSError: The folder cannot be written to, or a source file cannot be read.
        """
        make_folder(self.folder)
        todo = [output for output in self._outputs[part[0] :: part[1]] if not self._is_complete(output)]
        advance(self.size(part) - sum(output.shard.nbytes for output in todo))
        try:
            stream((self._task(output, job, advance) for output in todo for job in output.jobs), workers)
            for output in todo:
                if not output.jobs:
                    self._finish(output, self._open(output))
        finally:
            for output in todo:
                if output.file is not None:
                    output.file.close()

    def is_complete(self) -> bool:
        """Return True if every planned file is complete."""
        return all(self._is_complete(output) for output in self._outputs)

    def check_read_back(self, found: Mapping[str, int]) -> int:
        """Compare what is in the finished files with what was copied into them, also by an earlier process.

        ``found`` has, by tensor, the CRC-32 of its bytes as they were read back. Return the number of bytes that are
        equal: every byte of every file. Raise `CheckpointError` for a file with another header or tensor.
        """
        for output in self._outputs:
            path = self.folder / output.shard.name
            with path.open("rb") as file:
                if file.read(len(output.shard.header)) != output.shard.header:
                    raise _changed(path, "its header")
            copied = self._journal(output).tensors
            for planned in output.shard.tensors:
                name = planned.tensor.name
                if found.get(name, 0) != copied.get(name, 0):
                    raise _changed(path, name)
        return sum(output.shard.size for output in self._outputs)

    def check_sums(self) -> int:
        """Compare the CRC-32 of every source record, combined from the journals, with the one in its archive.

        Return the number of source bytes checked; raise `CheckpointError` with the file and the offset if they differ.
        """
        by_record: dict[tuple[str, int, int, int], list[tuple[int, int, int]]] = {}
        for output in self._outputs:
            for source in self._journal(output).sources:
                by_record.setdefault(source.record, []).append((source.begin, source.length, source.crc))
        for (file, offset, size, expected), parts in by_record.items():
            parts.sort()
            held = sum(length for _, length, _ in parts)
            if held != size or combine_crc32((crc, length) for _, length, crc in parts) != expected:
                raise damaged_bytes(file, offset, size)
        return sum(size for _, _, size, _ in by_record)

    def remove_journals(self) -> None:
        """Remove the journals, which only a restart needs."""
        for output in self._outputs:
            unlink(self._journal_path(output))

    def _journal_path(self, output: _Output) -> Path:
        return self.folder / f".{output.shard.name}.done"

    def _journal(self, output: _Output) -> Journal:
        """Return the journal of a finished file; raise `CheckpointError` if it is missing or damaged."""
        try:
            return Journal.model_validate_json(self._journal_path(output).read_bytes())
        except (FileNotFoundError, ValidationError):
            raise _changed(self._journal_path(output), "its content") from None

    def _temporary(self, output: _Output) -> Path:
        return self.folder / f".{output.shard.name}.tmp"

    def _is_complete(self, output: _Output) -> bool:
        path = self.folder / output.shard.name
        if not (path.is_file() and self._journal_path(output).is_file() and path.stat().st_size == output.shard.size):
            return False
        return self._journal(output).plan == _plan_digest(output)

    def _task(self, output: _Output, job: CopyJob, advance: Callable[[int], None]) -> StreamTask:
        file = self._open(output)
        record = job.record
        comes_from_memory = is_cached(record.path, record.offset + job.begin, job.end - job.begin)

        def put(rows: Block, offset: int, stride: int, target: PlannedTensor) -> None:
            output.copied.add(rows, offset, stride, target)
            for index, row in enumerate(rows):
                file.write(row, offset + index * stride, direct=comes_from_memory)
            advance(rows.size)

        def done(record: ZipRecord, crc: int) -> None:
            if output.finish_job(job, record, crc):
                self._finish(output, file)

        return StreamTask(job, put, done)

    def _open(self, output: _Output) -> OutputFile:
        if output.file is None:
            output.file = OutputFile(self._temporary(output), output.shard.size)
            output.file.write(np.frombuffer(output.shard.header, np.uint8), 0)
        return output.file

    def _finish(self, output: _Output, file: OutputFile) -> None:
        """Sync and rename the file, then write its journal."""
        file.sync()
        file.close()
        rename(self._temporary(output), self.folder / output.shard.name)
        fsync_directory(self.folder)
        journal = Journal(plan=_plan_digest(output), sources=output.sums, tensors=output.copied.by_tensor)
        write_json(self._journal_path(output), journal.model_dump())


def _changed(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} changed after it was written: {what} is not what the checkpoint gave. The disk or the memory of this "
        "node damages data, or another program wrote to the file. Run the command again, on another node or disk."
    )


def _plan_digest(output: _Output) -> str:
    """Return a digest of the file's header, of its tensors' updates, and of size and time of each source file."""
    updates = [planned.tensor.update for planned in output.shard.tensors if planned.tensor.update is not None]
    files = {job.record.path for job in output.jobs}
    files |= {piece.record.path for update in updates for part in update.parts.values() for piece in part.pieces}
    states = sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    jobs = [(str(job.record.path), job.record.offset, job.begin, job.end) for job in output.jobs]
    return digest([output.shard.header.hex(), states, jobs, [repr(update) for update in updates]])

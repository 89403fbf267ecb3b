"""Stream the bytes of a plan into its files: bounded memory, several workers, restartable, checksums on the way.

Each output file is filled under a temporary name, synced, and renamed; then a small journal beside it says that it is
whole and which source bytes went into it, with their CRC-32. A merge that was killed takes up there.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.consolidate.blocks import Block, is_cached
from shardmake.consolidate.crc import combine
from shardmake.consolidate.jobs import CopyJob, plan_jobs
from shardmake.consolidate.layout import PlannedShard, PlannedTensor
from shardmake.consolidate.output import OutputFile
from shardmake.consolidate.stream import StreamTask, damaged, stream
from shardmake.core.atomic import digest, fsync_directory, read_json, write_json


@dataclass
class _Output:
    """An output file that is being filled.

    ``sums``: of the source bytes; ``written``: where the file needs them, offset, CRC-32 and length of what each tensor
    is made of.
    """

    shard: PlannedShard
    jobs: list[CopyJob]
    left: int
    file: OutputFile | None = None
    sums: list[dict[str, Any]] = field(default_factory=list)
    written: dict[str, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, job: CopyJob, record: ZipRecord, crc: int) -> bool:
        """Note that ``job`` is done, with the CRC-32 of its bytes; whether it was the last one."""
        place = {"file": str(record.path), "offset": record.offset, "size": record.size, "expected": record.crc}
        with self.lock:
            if record.crc is not None:
                self.sums.append({**place, "begin": job.begin, "length": job.end - job.begin, "crc": crc})
            self.left -= 1
            return self.left == 0


class ShardWriter:
    """Fills the files of a plan in a folder."""

    def __init__(self, shards: Sequence[PlannedShard], folder: Path) -> None:
        self.folder = folder
        self._outputs = [_Output(shard, jobs, len(jobs)) for shard, jobs in zip(shards, plan_jobs(shards), strict=True)]

    def write(self, workers: int = 4, part: tuple[int, int] = (0, 1)) -> None:
        """Fill the files; those that are there and whole stay.

        Args:
            workers: Threads that write; each holds at most three blocks in memory.
            part: ``(i, n)``: write only every n-th file, from the i-th on, as one of n tasks.

        Raises:
            ShardmakeError: a source file is shorter than planned, or cannot be read.
            OSError: the folder cannot be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        todo = [output for output in self._outputs[part[0] :: part[1]] if not self._is_whole(output)]
        try:
            stream((self._task(output, job) for output in todo for job in output.jobs), workers)
            for output in todo:
                if not output.jobs:
                    self._finish(output, self._open(output))
        finally:
            for output in todo:
                if output.file is not None:
                    output.file.close()

    def is_complete(self) -> bool:
        """Whether every file of the plan is whole."""
        return all(self._is_whole(output) for output in self._outputs)

    def check_sums(self) -> int:
        """Compare the CRC-32 of every source record, put together from the journals, with the one its archive holds.

        Returns:
            The number of source bytes so checked.

        Raises:
            ShardmakeError: they differ; the file and the place in it are named.
        """
        by_record: dict[tuple[str, int, int, int], list[tuple[int, int, int]]] = {}
        for output in self._outputs:
            for entry in read_json(self._journal(output), "shardmake consolidate")["sources"]:
                key = (entry["file"], entry["offset"], entry["size"], entry["expected"])
                by_record.setdefault(key, []).append((entry["begin"], entry["length"], entry["crc"]))
        for (file, offset, size, expected), parts in by_record.items():
            parts.sort()
            assert sum(length for _, length, _ in parts) == size
            if combine((crc, length) for _, length, crc in parts) != expected:
                raise damaged(file, offset, size)
        return sum(size for _, _, size, _ in by_record)

    def remove_journals(self) -> None:
        """Remove what only a restart needs."""
        for output in self._outputs:
            self._journal(output).unlink(missing_ok=True)

    def _journal(self, output: _Output) -> Path:
        return self.folder / f".{output.shard.name}.done"

    def _temporary(self, output: _Output) -> Path:
        return self.folder / f".{output.shard.name}.tmp"

    def _is_whole(self, output: _Output) -> bool:
        path, journal = self.folder / output.shard.name, self._journal(output)
        if not (path.is_file() and journal.is_file() and path.stat().st_size == output.shard.size):
            return False
        return bool(read_json(journal, "shardmake consolidate")["plan"] == _plan_digest(output))

    def _task(self, output: _Output, job: CopyJob) -> StreamTask:
        file = self._open(output)
        record = job.record
        comes_from_memory = is_cached(record.path, record.offset + job.begin, job.end - job.begin)

        def put(content: Block, offset: int, entry: PlannedTensor) -> None:
            file.write(content, offset, direct=comes_from_memory)
            if output.shard.archive is not None:
                part = (offset, crc32(content.data), len(content))
                with output.lock:
                    output.written[entry.tensor.name].append(part)

        def done(record: ZipRecord, crc: int) -> None:
            if output.take(job, record, crc):
                self._finish(output, file)

        return StreamTask(job, put, done)

    def _open(self, output: _Output) -> OutputFile:
        if output.file is None:
            output.file = OutputFile(self._temporary(output), output.shard.size)
            output.file.write(np.frombuffer(output.shard.header, np.uint8), 0)
        return output.file

    def _finish(self, output: _Output, file: OutputFile) -> None:
        """Sync, rename, and only then say so in the journal."""
        sums = {name: combine((crc, n) for _, crc, n in sorted(parts)) for name, parts in output.written.items()}
        for offset, content in output.shard.closing(sums):
            file.write(np.frombuffer(content, np.uint8), offset)
        file.sync()
        file.close()
        self._temporary(output).rename(self.folder / output.shard.name)
        fsync_directory(self.folder)
        write_json(self._journal(output), {"plan": _plan_digest(output), "sources": output.sums})


def _plan_digest(output: _Output) -> str:
    """What the file is made of: its header, what is added to its tensors, and of each source file size and time."""
    updates = [entry.tensor.update for entry in output.shard.entries if entry.tensor.update is not None]
    files = {job.record.path for job in output.jobs}
    files |= {piece.record.path for update in updates for part in (update.a, update.b) for piece in part.pieces}
    states = sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    jobs = [(str(job.record.path), job.record.offset, job.begin, job.end) for job in output.jobs]
    return digest([output.shard.header.hex(), states, jobs, [update.scale for update in updates]])

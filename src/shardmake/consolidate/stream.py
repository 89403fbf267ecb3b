"""Read jobs block by block, convert them to the output type and compute the CRC-32 of everything read.

One thread reads, in the order of the source files: a disk is faster with one reader and several writers than with
several readers. Worker threads compute the checksum, convert and write.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import reduce
from queue import SimpleQueue

import numpy as np
from isal.isal_zlib import crc32, crc32_combine

from shardmake.checkpoint.formats.contents import Change, StoredTensor
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import locate
from shardmake.consolidate import layout
from shardmake.consolidate.blocks import Block, Converter, page_aligned, read_into
from shardmake.consolidate.layout import CopyJob, Move, PlannedShard, PlannedTensor, ReadBlock
from shardmake.core.errors import CheckpointError

Put = Callable[[Block, int, int, PlannedTensor], None]
"""Takes rows of output bytes (uint8 [rows, bytes]), the file offset of the first one, the distance from each row to the
next one in the file, in bytes, and the tensor that they belong to."""


@dataclass(frozen=True)
class StreamTask:
    """A job with its callbacks.

    ``put`` takes the bytes. ``done`` takes the record as it is in the file, and the CRC-32 of the job's bytes (0 if the
    record has none). Any worker may call either of them.
    """

    job: CopyJob
    put: Put
    done: Callable[[ZipRecord, int], None] = lambda _record, _crc: None


def stream(tasks: Iterable[StreamTask], workers: int) -> None:
    """Read the jobs in sequence and pass their bytes, block by block, to ``workers`` threads.

    Memory: one block more than there are workers, and as many converted blocks of up to twice the size.

    Raises:
        CheckpointError: A source file is truncated. Errors of ``put`` and ``done`` are raised here as well.
    """
    with ThreadPoolExecutor(workers) as pool:
        reader = _Reader(pool, workers + 1)
        for task in tasks:
            reader.read(task)
        reader.wait()


def combine_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of consecutive parts, each given as (its CRC-32, its length in bytes)."""
    return reduce(lambda combined, part: crc32_combine(combined, *part), parts, 0)


_CHANGES = 3
"""Updates that are held at once: files may alternate between parts of the parameters of a mixture's experts."""


class _Slot:
    """Memory for one block."""

    def __init__(self) -> None:
        self.buffer = page_aligned(layout.BLOCK)
        self.converter: Converter | None = None
        self.work: Future[tuple[int, int]] | None = None


class _Reader:
    """Fills slots and passes each to a worker."""

    def __init__(self, pool: Executor, slots: int) -> None:
        self._pool = pool
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(slots):
            self._free.put(_Slot())
        self._ends: deque[Future[None]] = deque()
        self._changes: dict[int, Change] = {}

    def read(self, task: StreamTask) -> None:
        record = locate(task.job.record, task.job.moves[0].target.tensor.dtype)
        sums: list[Future[tuple[int, int]]] = []
        source = os.open(record.path, os.O_RDONLY)
        try:
            for block in layout.read_blocks(task.job):
                slot = self._free.get()
                if slot.work is not None:
                    slot.work.result()  # raises the worker's error
                content = _read(slot, source, record, block)
                changes = [self._change_of(part) for part in block.parts]
                has_crc = record.crc is not None
                slot.work = self._pool.submit(self._process, slot, content, block, changes, has_crc, task.put)
                sums.append(slot.work)
        finally:
            os.close(source)
        self._ends.append(self._pool.submit(_end, task, record, sums))
        while self._ends[0].done() and len(self._ends) > 1:
            self._ends.popleft().result()

    def wait(self) -> None:
        """Wait until everything is processed; raise a worker's error."""
        for end in self._ends:
            end.result()

    def _process(
        self, slot: _Slot, content: Block, block: ReadBlock, changes: list[Change | None], has_crc: bool, put: Put
    ) -> tuple[int, int]:
        """Put a block; return its CRC-32, if one is needed, and its length."""
        try:
            for part, change in zip(block.parts, changes, strict=True):
                read, tensor = content[part.begin - block.begin : part.end - block.begin], part.target.tensor
                made = _converted(slot, read, part, block.shift, change)
                row = part.run // ITEM_SIZE[tensor.dtype] * ITEM_SIZE[part.target.dtype] or len(made)
                put(made.reshape(-1, row), part.offset, part.stride, part.target)  # each run of the source as a row
            return crc32(content.data) if has_crc else 0, len(content)
        finally:
            self._free.put(slot)

    def _change_of(self, part: Move) -> Change | None:
        """Return the change of the tensor that ``part`` belongs to; the most recent ones are cached."""
        tensor, update = part.target.tensor, part.target.tensor.update
        if update is None:
            return None
        key, start = id(update.parts), update.start
        if key not in self._changes:
            for oldest in list(self._changes)[: 1 - _CHANGES]:
                del self._changes[oldest]
            self._changes[key] = update.load(read_array, tensor)
        change = self._changes[key]
        return lambda values, first: change(values, start + first)


def _end(task: StreamTask, record: ZipRecord, sums: Iterable[Future[tuple[int, int]]]) -> None:
    """End a task. The pool has started its blocks before, so that waiting for them never blocks the pool."""
    task.done(record, combine_crc32(block.result() for block in sums))


def _read(slot: _Slot, source: int, record: ZipRecord, block: ReadBlock) -> Block:
    """Read ``block`` to memory with the same distance from a page boundary as in the output file."""
    keeps_size = all(ITEM_SIZE[part.target.tensor.dtype] == ITEM_SIZE[part.target.dtype] for part in block.parts)
    shift = block.shift if keeps_size else 0
    view = slot.buffer[shift : shift + block.end - block.begin]
    got = 0
    while got < len(view):
        count = read_into(view[got:], source, record.offset + block.begin + got)
        if not count:
            raise CheckpointError(
                f"{record.path} is truncated at byte {record.offset + block.begin + got}. Copy it again, or use an "
                "older checkpoint."
            )
        got += count
    return view


def _converted(slot: _Slot, content: Block, part: Move, shift: int, change: Change | None) -> Block:
    """Return ``content`` in the output's type, ``shift`` bytes behind a page boundary."""
    planned = part.target
    source, target = planned.tensor.dtype, planned.dtype
    if source == target and change is None:
        return content
    if slot.converter is None:
        slot.converter = Converter(layout.BLOCK // 2)
    if change is None:
        return slot.converter.convert(content, source, target, shift)
    first = (part.offset - planned.offset) // ITEM_SIZE[target]
    return slot.converter.change(content, source, target, lambda values: change(values, first), shift)


def read_array(tensor: StoredTensor) -> Block:
    """Return a small tensor as a float32 array of its shape."""
    planned = PlannedTensor(tensor, "F32", 0)
    out = np.empty(tensor.numel * 4, np.uint8)

    def put(rows: Block, offset: int, stride: int, _target: PlannedTensor) -> None:
        for index, row in enumerate(rows):
            out[offset + index * stride :][: len(row)] = row

    jobs = layout.plan_jobs([PlannedShard("", b"", (planned,), len(out))])[0]
    stream([StreamTask(job, put) for job in jobs], 1)
    return out.view(np.float32).reshape(tensor.shape)


logger = logging.getLogger(__name__)
Advance = Callable[[int], None]
"""Takes the number of bytes that were processed since the last call; any thread may call it."""
ShowProgress = Callable[[str, int], AbstractContextManager[Advance]]
"""Takes the name of the work and its bytes; the returned function counts those that are done."""


@contextmanager
def no_progress(name: str, total: int) -> Iterator[Advance]:
    """Show nothing."""
    yield lambda _: None


@contextmanager
def show_progress(name: str, total: int) -> Iterator[Advance]:
    """Show a bar with speed and remaining time on standard error, if that is a terminal and not ``--quiet``."""
    if not (sys.stderr.isatty() and logger.isEnabledFor(logging.INFO)):
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        work = bar.add_task(name, total=total)
        yield lambda count: bar.advance(work, count)

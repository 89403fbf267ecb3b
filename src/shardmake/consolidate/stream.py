"""Read jobs block by block, in the type of the output, with the CRC-32 of all that was read.

One thread reads, in the order of the source files: a disk that serves one reader and several writers is faster than one
that also serves several readers. Workers do the rest: checksum, conversion, writing.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from isal.isal_zlib import crc32

from shardmake.checkpoint.formats.contents import Tensor, Update
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import unbox
from shardmake.consolidate.blocks import Block, page_aligned, read_into
from shardmake.consolidate.convert import Converter
from shardmake.consolidate.crc import combine
from shardmake.consolidate.jobs import BLOCK, CopyJob, Part, Span, plan_jobs, spans
from shardmake.consolidate.layout import PlannedShard, PlannedTensor
from shardmake.core.errors import ShardmakeError

Put = Callable[[Block, int, PlannedTensor], None]
"""Takes bytes of the output, where they belong in its file, and the entry that they are part of."""

Factors = tuple[Block, Block]
"""What a LoRA adapter multiplies, float32: A (rank, columns), and B (rows, rank) times the scale."""


@dataclass(frozen=True)
class StreamTask:
    """A job, what takes its bytes, and what is told after them.

    ``done`` gets the record as it lies in the file, and the CRC-32 of the job's bytes (0 if the record has none). Both
    are called by any of the workers.
    """

    job: CopyJob
    put: Put
    done: Callable[[ZipRecord, int], None]


def stream(tasks: Iterable[StreamTask], workers: int) -> None:
    """Read the jobs one after the other and hand all their bytes on, block by block, to ``workers`` threads.

    Memory: one block more than there are workers, and as many converted ones, of up to twice the size.

    Raises:
        ShardmakeError: a source file ends too early. What ``put`` and ``done`` raise is raised here.
    """
    with ThreadPoolExecutor(workers) as pool:
        reader = _Reader(pool, workers + 1)
        for task in tasks:
            reader.read(task)
        reader.wait()


class _Slot:
    """Memory for a block on its way."""

    def __init__(self) -> None:
        self.buffer = page_aligned(BLOCK)
        self.converter: Converter | None = None
        self.work: Future[None] | None = None

    def wait(self) -> None:
        """Until what is in the slot is done with; raises what went wrong."""
        if self.work is not None:
            self.work.result()


class _Progress:
    """Of one task: the checksums of its blocks, and how many of them are still on their way."""

    def __init__(self, task: StreamTask, record: ZipRecord) -> None:
        self.task, self.record = task, record
        self._on_the_way = 1  # the reader itself, until it has read everything
        self._sums: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def depart(self) -> None:
        with self._lock:
            self._on_the_way += 1

    def arrive(self, *sums: tuple[int, int, int]) -> None:
        """One less on its way; ``sums``: where the block began, its CRC-32, its length."""
        with self._lock:
            self._sums.extend(sums)
            self._on_the_way -= 1
            is_last = not self._on_the_way
        if is_last:
            self.task.done(self.record, combine((crc, length) for _, crc, length in sorted(self._sums)))


class _Reader:
    """Fills slots, and gives each to a worker."""

    def __init__(self, pool: Executor, slots: int) -> None:
        self._pool = pool
        self._slots = [_Slot() for _ in range(slots)]
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._factors: tuple[Update, Factors] | None = None

    def read(self, task: StreamTask) -> None:
        record = unbox(task.job.record, task.job.moves[0].entry.tensor.dtype)
        progress = _Progress(task, record)
        source = os.open(record.path, os.O_RDONLY)
        try:
            for span in spans(task.job):
                slot = self._free.get()
                slot.wait()
                block = _read(slot, source, record, span)
                factors = [self._factors_of(part) for part in span.parts]
                progress.depart()
                slot.work = self._pool.submit(self._deliver, slot, block, span, factors, progress)
        finally:
            os.close(source)
        progress.arrive()

    def wait(self) -> None:
        """Until all blocks are done with; raises what went wrong."""
        for slot in self._slots:
            slot.wait()

    def _deliver(
        self, slot: _Slot, block: Block, span: Span, factors: list[Factors | None], progress: _Progress
    ) -> None:
        try:
            crc = crc32(block.data) if progress.record.crc is not None else 0
            for part, update in zip(span.parts, factors, strict=True):
                content = block[part.begin - span.begin : part.end - span.begin]
                _put(_converted(slot, content, part, span.shift, update), part, progress.task.put)
            progress.arrive((span.begin, crc, len(block)))
        finally:
            self._free.put(slot)

    def _factors_of(self, part: Part) -> Factors | None:
        """Those of the tensor that ``part`` belongs to; the last ones are kept."""
        update = part.move.entry.tensor.update
        if update is None:
            return None
        if self._factors is None or self._factors[0] is not update:
            self._factors = (update, (read_array(update.a), read_array(update.b) * np.float32(update.scale)))
        return self._factors[1]


def _read(slot: _Slot, source: int, record: ZipRecord, span: Span) -> Block:
    """The bytes of ``span``, as far behind a page boundary in memory as they will be in the output file."""
    kept = all(ITEM_SIZE[part.move.entry.tensor.dtype] == ITEM_SIZE[part.move.entry.dtype] for part in span.parts)
    shift = span.shift if kept else 0
    view = slot.buffer[shift : shift + span.end - span.begin]
    got = 0
    while got < len(view):
        count = read_into(view[got:], source, record.offset + span.begin + got)
        if not count:
            raise ShardmakeError(f"{record.path} ended at byte {record.offset + span.begin + got}: it is cut off.")
        got += count
    return view


def _converted(slot: _Slot, block: Block, part: Part, shift: int, factors: Factors | None) -> Block:
    """``block`` in the output's type, ``shift`` bytes behind a page boundary."""
    entry = part.move.entry
    source, target = entry.tensor.dtype, entry.dtype
    if source == target and factors is None:
        return block
    if slot.converter is None:
        slot.converter = Converter(BLOCK // 2)
    if factors is None:
        return slot.converter.convert(block, source, target, shift)
    first = (part.offset - entry.offset) // ITEM_SIZE[target]
    return slot.converter.add(block, source, target, _delta(factors, first, len(block) // ITEM_SIZE[source]), shift)


def _delta(factors: Factors, first: int, count: int) -> Block:
    """Elements ``[first, first + count)`` of what a LoRA adapter adds, row-major, as float32."""
    a, b = factors
    columns = a.shape[1]
    begin, end = first // columns, -(-(first + count) // columns)
    flat: Block = (b[begin:end] @ a).reshape(-1)
    return flat[first - begin * columns :][:count]


def _put(content: Block, part: Part, put: Put) -> None:
    """``content`` as one piece, or each run of the source as a row of the output."""
    move = part.move
    if not move.run:
        put(content, part.offset, move.entry)
        return
    row = move.run // ITEM_SIZE[move.entry.tensor.dtype] * ITEM_SIZE[move.entry.dtype]
    for index in range(len(content) // row):
        put(content[index * row : (index + 1) * row], part.offset + index * move.stride, move.entry)


def check_record(record: ZipRecord) -> None:
    """Read a small record whole and compare its CRC-32; a `ShardmakeError` if it is damaged."""
    with record.path.open("rb") as file:
        content = os.pread(file.fileno(), record.size, record.offset)
    if record.crc is not None and crc32(content) != record.crc:
        raise damaged(str(record.path), record.offset, record.size)


def damaged(file: str, offset: int, size: int) -> ShardmakeError:
    """The error for bytes that do not have the CRC-32 that their file records."""
    return ShardmakeError(
        f"{file} is damaged: the {size} bytes from byte {offset} on do not have the CRC-32 that the file itself "
        "records for them (a flipped bit on the disk or on the way). Copy it again, or take an older checkpoint."
    )


def read_array(tensor: Tensor) -> Block:
    """A small tensor, whole, as a float32 array of its shape."""
    entry = PlannedTensor(tensor, "F32", 0)
    out = np.empty(tensor.numel * 4, np.uint8)

    def put(content: Block, offset: int, _entry: PlannedTensor) -> None:
        out[offset : offset + len(content)] = content

    jobs = plan_jobs([PlannedShard("", b"", (entry,), len(out))])[0]
    stream([StreamTask(job, put, lambda _record, _crc: None) for job in jobs], 1)
    return out.view(np.float32).reshape(tensor.shape)

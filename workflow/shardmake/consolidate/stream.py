"""Read a job's bytes block by block, in the type of the output, with the CRC-32 of all that was read."""

import os
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from shardmake.consolidate.archive import Record
from shardmake.consolidate.blocks import PAGE, Block, page_aligned, read_into
from shardmake.consolidate.contents import Tensor, Update
from shardmake.consolidate.convert import Converter
from shardmake.consolidate.dtypes import ITEM_SIZE
from shardmake.consolidate.jobs import BLOCK, Job, Move, plan_jobs
from shardmake.consolidate.layout import Entry, Shard
from shardmake.consolidate.unpickle import unbox
from shardmake.errors import UserError

Put = Callable[[Block, int, Entry], None]
"""Takes bytes of the output, where they belong in its file, and the entry that they are part of."""

T = TypeVar("T")


class Streamer:
    """One thread's buffers: a block, and where types change up to two more."""

    def __init__(self) -> None:
        self._buffer = page_aligned(BLOCK)
        self._converter: Converter | None = None
        self._factors: tuple[Update, Block, Block] | None = None

    def run(self, job: Job, put: Put) -> tuple[Record, int]:
        """Hand all bytes of ``job`` to ``put``.

        Returns:
            The record as it lies in the file, and the CRC-32 of the job's bytes (0 if the record has none).

        Raises:
            UserError: the file ends too early.
        """
        record = unbox(job.record, job.moves[0].entry.tensor.dtype)
        source = os.open(record.path, os.O_RDONLY)
        try:
            crc, at = 0, job.begin
            for move in job.moves:
                crc = self._skip(source, record, at, move.begin, crc)
                crc = self._move(source, record, move, put, crc)
                at = move.end
            return record, self._skip(source, record, at, job.end, crc)
        finally:
            os.close(source)

    def _skip(self, source: int, record: Record, begin: int, end: int, crc: int) -> int:
        """Read bytes that go nowhere (padding), for the checksum."""
        if record.crc is not None:
            for at in range(begin, end, BLOCK):
                crc = zlib.crc32(self._read(source, record, at, min(BLOCK, end - at)).data, crc)
        return crc

    def _move(self, source: int, record: Record, move: Move, put: Put, crc: int) -> int:
        wide, narrow = ITEM_SIZE[move.entry.tensor.dtype], ITEM_SIZE[move.entry.dtype]
        at = move.begin
        while at < move.end:
            offset = move.offset + (at - move.begin) // wide * narrow
            shift = 0 if move.run else offset % PAGE
            step = BLOCK // move.run * move.run if move.run else BLOCK - shift // narrow * wide
            block = self._read(source, record, at, min(step, move.end - at), shift if wide == narrow else 0)
            if record.crc is not None:
                crc = zlib.crc32(block.data, crc)
            content = self._converted(block, move, at, shift)
            if move.run:
                first = move.offset + (at - move.begin) // move.run * move.stride
                _put_rows(content, move.run // wide * narrow, first, move, put)
            else:
                put(content, offset, move.entry)
            at += len(block)
        return crc

    def _read(self, source: int, record: Record, begin: int, size: int, shift: int = 0) -> Block:
        """``size`` bytes, ``shift`` bytes behind a page boundary in memory, as they will be in the output file."""
        view = self._buffer[shift : shift + size]
        got = 0
        while got < size:
            count = read_into(view[got:], source, record.offset + begin + got)
            if not count:
                raise UserError(f"{record.path} ended at byte {record.offset + begin + got}: it is cut off.")
            got += count
        return view

    def _converted(self, block: Block, move: Move, at: int, shift: int) -> Block:
        """``block``, byte ``at`` of the record on, in the output's type, ``shift`` bytes behind a page boundary."""
        source, target, update = move.entry.tensor.dtype, move.entry.dtype, move.entry.tensor.update
        if source == target and update is None:
            return block
        if self._converter is None:
            self._converter = Converter(BLOCK // 2)
        if update is None:
            return self._converter.convert(block, source, target, shift)
        first = (move.offset - move.entry.offset) // ITEM_SIZE[target] + (at - move.begin) // ITEM_SIZE[source]
        delta = self._delta(update, first, len(block) // ITEM_SIZE[source])
        return self._converter.add(block, source, target, delta, shift)

    def _delta(self, update: Update, first: int, count: int) -> Block:
        """Elements ``[first, first + count)`` of what a LoRA adapter adds, row-major, as float32."""
        if self._factors is None or self._factors[0] is not update:
            self._factors = (update, read_array(update.a), read_array(update.b) * np.float32(update.scale))
        _, a, b = self._factors
        columns = a.shape[1]
        begin, end = first // columns, -(-(first + count) // columns)
        flat: Block = (b[begin:end] @ a).reshape(-1)
        return flat[first - begin * columns :][:count]


def check_record(record: Record) -> None:
    """Read a small record whole and compare its CRC-32; a `UserError` if it is damaged."""
    with record.path.open("rb") as file:
        content = os.pread(file.fileno(), record.size, record.offset)
    if record.crc is not None and zlib.crc32(content) != record.crc:
        raise damaged(str(record.path), record.offset, record.size)


def damaged(file: str, offset: int, size: int) -> UserError:
    """The error for bytes that do not have the CRC-32 that their file records."""
    return UserError(
        f"{file} is damaged: the {size} bytes from byte {offset} on do not have the CRC-32 that the file itself "
        "records for them (a flipped bit on the disk or on the way). Copy it again, or take an older checkpoint."
    )


def read_array(tensor: Tensor) -> Block:
    """A small tensor, whole, as a float32 array of its shape."""
    entry = Entry(tensor, "F32", 0)
    out = np.empty(tensor.numel * 4, np.uint8)

    def put(content: Block, offset: int, _entry: Entry) -> None:
        out[offset : offset + len(content)] = content

    streamer = Streamer()
    for job in plan_jobs([Shard("", b"", (entry,), len(out))])[0]:
        streamer.run(job, put)
    return out.view(np.float32).reshape(tensor.shape)


def _put_rows(content: Block, row: int, first: int, move: Move, put: Put) -> None:
    for index in range(len(content) // row):
        put(content[index * row : (index + 1) * row], first + index * move.stride, move.entry)


def run_parallel(tasks: Iterable[T], work: Callable[[Streamer, T], Any], workers: int) -> None:
    """Do ``work`` on each of ``tasks`` in threads, each with its own `Streamer`; the first error stops all."""
    local = threading.local()

    def run(task: T) -> None:
        if not hasattr(local, "streamer"):
            local.streamer = Streamer()
        work(local.streamer, task)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(run, task) for task in tasks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

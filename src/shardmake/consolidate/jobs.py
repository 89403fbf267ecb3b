"""Divide the merge into jobs with one source and one output each, and the jobs into blocks of one read each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardmake.checkpoint.formats.contents import Piece
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.consolidate.blocks import PAGE
from shardmake.consolidate.layout import PlannedShard, PlannedTensor

BLOCK = 4 << 20
"""Bytes of one read."""
JOB = 64 << 20
"""Approximate source bytes per checksum."""
_SMALL = 1 << 18
"""Bytes; smaller parts are read together with their neighbours, because a separate read would cost more."""


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes ``[begin, end)`` of a record for ``target``, to be written from byte ``offset`` of the output on.

    With ``run``, each run of ``run`` source bytes is written ``stride`` output bytes behind the previous one.
    """

    begin: int
    end: int
    target: PlannedTensor
    offset: int
    run: int = 0
    stride: int = 0

    def part(self, begin: int, end: int) -> "Move":
        """Return the bytes ``[begin, end)`` of the move, which are complete runs if it has runs."""
        done, tensor = begin - self.begin, self.target.tensor
        if self.run:
            moved = done // self.run * self.stride
        else:
            moved = done // ITEM_SIZE[tensor.dtype] * ITEM_SIZE[self.target.dtype]
        return replace(self, begin=begin, end=end, offset=self.offset + moved)


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Bytes ``[begin, end)`` of ``record``, which are all read for the checksum, and their moves into one file."""

    record: ZipRecord
    begin: int
    end: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Bytes ``[begin, end)`` of a record for one read, and the parts of them that are not padding.

    ``shift`` is the distance of the first output byte from a page boundary, for a block with one large part.
    """

    begin: int
    end: int
    parts: tuple[Move, ...] = ()
    shift: int = 0


def plan_jobs(shards: Sequence[PlannedShard]) -> list[list[CopyJob]]:
    """Return the jobs of each shard, in the order of the source files.

    Every byte of a record with a CRC-32 belongs to exactly one job, padding included.
    """
    jobs: list[list[CopyJob]] = [[] for _ in shards]
    by_record: dict[ZipRecord, list[tuple[Move, int]]] = {}
    for index, shard in enumerate(shards):
        for planned in shard.tensors:
            for piece in planned.tensor.pieces:
                by_record.setdefault(piece.record, []).extend((move, index) for move in _moves(planned, piece))
    for record, moves in by_record.items():
        for index, job in _jobs(record, sorted(moves, key=lambda item: item[0].begin)):
            jobs[index].append(job)
    for of_shard in jobs:
        of_shard.sort(key=lambda job: (str(job.record.path), job.record.offset, job.begin))
    return jobs


def _moves(target: PlannedTensor, piece: Piece) -> Iterator[Move]:
    """Yield the piece in steps that fit a block, or a job if the bytes form one run."""
    wide, narrow = ITEM_SIZE[target.tensor.dtype], ITEM_SIZE[target.dtype]
    offset, run = target.offset + piece.at * narrow, piece.count * wide
    if piece.runs > 1 and run <= BLOCK:
        yield Move(piece.start, piece.start + piece.runs * run, target, offset, run, piece.stride * narrow)
        return
    for index in range(piece.runs):
        for done in range(0, run, JOB):
            begin = piece.start + index * run + done
            to = offset + index * piece.stride * narrow + done // wide * narrow
            yield Move(begin, begin + min(JOB, run - done), target, to)


def _jobs(record: ZipRecord, moves: Sequence[tuple[Move, int]]) -> Iterator[tuple[int, CopyJob]]:
    """Yield jobs of neighbouring moves into the same file, up to a job's size; a gap belongs to the job before it.

    If two tensors share bytes, the move of the second one is a separate job without a checksum.
    """
    disjoint, shared = _split_overlapping(moves)
    for move, shard in shared:
        yield shard, CopyJob(replace(record, crc=None), move.begin, move.end, (move,))
    begin = 0
    group: list[Move] = []
    for index, (move, shard) in enumerate(disjoint):
        group.append(move)
        following = disjoint[index + 1] if index + 1 < len(disjoint) else None
        end = following[0].begin if following else record.size
        if following is None or following[1] != shard or end - begin >= JOB:
            yield shard, CopyJob(record, begin, end, tuple(group))
            begin, group = end, []


def _split_overlapping(moves: Sequence[tuple[Move, int]]) -> tuple[list[tuple[Move, int]], list[tuple[Move, int]]]:
    """Return the moves that do not overlap an earlier one, and those that do."""
    disjoint: list[tuple[Move, int]] = []
    shared: list[tuple[Move, int]] = []
    end = 0
    for item in moves:
        if item[0].begin < end:
            shared.append(item)
        else:
            disjoint.append(item)
            end = item[0].end
    return disjoint, shared


def read_blocks(job: CopyJob) -> Iterator[ReadBlock]:
    """Yield the blocks to read for ``job``; padding is skipped if there is no checksum to compare."""
    held: list[ReadBlock] = []
    for block in _single_blocks(job):
        if held and not _fits(held, block):
            yield _joined(held)
            held = []
        held.append(block)
    if held:
        yield _joined(held)


def _single_blocks(job: CopyJob) -> Iterator[ReadBlock]:
    """Yield blocks of at most one part."""
    at = job.begin
    for move in job.moves:
        yield from _padding(job, at, move.begin)
        yield from _move_blocks(move)
        at = move.end
    yield from _padding(job, at, job.end)


def _padding(job: CopyJob, begin: int, end: int) -> Iterator[ReadBlock]:
    if job.record.crc is not None:
        for at in range(begin, end, BLOCK):
            yield ReadBlock(at, min(at + BLOCK, end))


def _move_blocks(move: Move) -> Iterator[ReadBlock]:
    """Yield a move in blocks, with space for the shift that direct writes need."""
    wide, narrow = ITEM_SIZE[move.target.tensor.dtype], ITEM_SIZE[move.target.dtype]
    at = move.begin
    while at < move.end:
        shift = 0 if move.run else move.part(at, at).offset % PAGE
        size = BLOCK // move.run * move.run if move.run else BLOCK - shift // narrow * wide
        part = move.part(at, min(at + size, move.end))
        yield ReadBlock(part.begin, part.end, (part,), shift)
        at = part.end


def _fits(held: Sequence[ReadBlock], block: ReadBlock) -> bool:
    """Return True if ``block`` can be read together with the blocks before it."""
    small = all(each.end - each.begin < _SMALL for each in (held[-1], block))
    return small and held[-1].end == block.begin and block.end - held[0].begin <= BLOCK


def _joined(held: Sequence[ReadBlock]) -> ReadBlock:
    if len(held) == 1:
        return held[0]
    return ReadBlock(held[0].begin, held[-1].end, tuple(part for block in held for part in block.parts))

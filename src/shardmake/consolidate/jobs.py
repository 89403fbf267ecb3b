"""Cut the merge into jobs of one source and one output each, and those into the blocks that are read at once. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardmake.checkpoint.formats.contents import Piece
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.consolidate.blocks import PAGE
from shardmake.consolidate.layout import PlannedShard, PlannedTensor

BLOCK = 4 << 20
"""Bytes read at once."""
JOB = 64 << 20
"""Bytes of a source of which one checksum is kept, about."""
_SMALL = 1 << 18
"""Bytes; less is read together with its neighbours, because a read of its own would cost more than the bytes."""


@dataclass(frozen=True)
class Move:
    """Bytes ``[begin, end)`` of a record for ``entry``, from byte ``offset`` of the output on.

    With ``run``, each run of so many source bytes goes ``stride`` output bytes behind the one before.
    """

    begin: int
    end: int
    entry: PlannedTensor
    offset: int
    run: int = 0
    stride: int = 0


@dataclass(frozen=True)
class CopyJob:
    """Bytes ``[begin, end)`` of ``record``, all read for the checksum, and what of them goes where in one file."""

    record: ZipRecord
    begin: int
    end: int
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Part:
    """Bytes ``[begin, end)`` of a record that belong to ``move``, in whole runs where it has them."""

    move: Move
    begin: int
    end: int

    @property
    def offset(self) -> int:
        """Where the first of them goes in the output."""
        move, entry, done = self.move, self.move.entry, self.begin - self.move.begin
        if move.run:
            return move.offset + done // move.run * move.stride
        return move.offset + done // ITEM_SIZE[entry.tensor.dtype] * ITEM_SIZE[entry.dtype]


@dataclass(frozen=True)
class Span:
    """Bytes ``[begin, end)`` of a record that are read at once, and the parts that are not padding.

    ``shift``: how far behind a page boundary the first output byte lies, where there is a single large part.
    """

    begin: int
    end: int
    parts: tuple[Part, ...] = ()
    shift: int = 0


def plan_jobs(shards: Sequence[PlannedShard]) -> list[list[CopyJob]]:
    """The jobs of each shard, in the order of the source files.

    Every byte of a record with a CRC-32 belongs to exactly one job, also the bytes that go nowhere (padding).
    """
    jobs: list[list[CopyJob]] = [[] for _ in shards]
    by_record: dict[ZipRecord, list[tuple[Move, int]]] = {}
    for index, shard in enumerate(shards):
        for entry in shard.entries:
            for piece in entry.tensor.pieces:
                by_record.setdefault(piece.record, []).extend((move, index) for move in _moves(entry, piece))
    for record, moves in by_record.items():
        for index, job in _jobs(record, sorted(moves, key=lambda item: item[0].begin)):
            jobs[index].append(job)
    for of_shard in jobs:
        of_shard.sort(key=lambda job: (str(job.record.path), job.record.offset, job.begin))
    return jobs


def _moves(entry: PlannedTensor, piece: Piece) -> Iterator[Move]:
    """The piece in steps that fit a block, or at most a job's size where the bytes lie in one run."""
    wide, narrow = ITEM_SIZE[entry.tensor.dtype], ITEM_SIZE[entry.dtype]
    offset, run = entry.offset + piece.at * narrow, piece.count * wide
    if piece.runs > 1 and run <= BLOCK:
        yield Move(piece.start, piece.start + piece.runs * run, entry, offset, run, piece.stride * narrow)
        return
    for index in range(piece.runs):
        for done in range(0, run, JOB):
            begin = piece.start + index * run + done
            where = offset + index * piece.stride * narrow + done // wide * narrow
            yield Move(begin, begin + min(JOB, run - done), entry, where)


def _jobs(record: ZipRecord, moves: Sequence[tuple[Move, int]]) -> Iterator[tuple[int, CopyJob]]:
    """Neighbouring moves into the same file, up to a job's size; gaps go to the job before them.

    Where two tensors share bytes, the second one's move is a job of its own that is left out of the checksum.
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


def _split_overlapping(
    moves: Sequence[tuple[Move, int]],
) -> tuple[list[tuple[Move, int]], list[tuple[Move, int]]]:
    """The moves that do not overlap an earlier one, and those that do."""
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


def spans(job: CopyJob) -> Iterator[Span]:
    """What to read for ``job``, in blocks; without a checksum to compare, padding is left out."""
    held: list[Span] = []
    for span in _single_spans(job):
        if held and not _fits(held, span):
            yield _joined(held)
            held = []
        held.append(span)
    if held:
        yield _joined(held)


def _single_spans(job: CopyJob) -> Iterator[Span]:
    """Spans of one part at most."""
    at = job.begin
    for move in job.moves:
        yield from _padding(job, at, move.begin)
        yield from _cut(move)
        at = move.end
    yield from _padding(job, at, job.end)


def _padding(job: CopyJob, begin: int, end: int) -> Iterator[Span]:
    if job.record.crc is not None:
        for at in range(begin, end, BLOCK):
            yield Span(at, min(at + BLOCK, end))


def _cut(move: Move) -> Iterator[Span]:
    """A move in blocks, with room for the shift that direct writes need."""
    wide, narrow = ITEM_SIZE[move.entry.tensor.dtype], ITEM_SIZE[move.entry.dtype]
    at = move.begin
    while at < move.end:
        shift = 0 if move.run else Part(move, at, at).offset % PAGE
        size = BLOCK // move.run * move.run if move.run else BLOCK - shift // narrow * wide
        part = Part(move, at, min(at + size, move.end))
        yield Span(part.begin, part.end, (part,), shift)
        at = part.end


def _fits(held: Sequence[Span], span: Span) -> bool:
    """Whether ``span`` can be read together with those before it."""
    small = all(each.end - each.begin < _SMALL for each in (held[-1], span))
    return small and held[-1].end == span.begin and span.end - held[0].begin <= BLOCK


def _joined(held: Sequence[Span]) -> Span:
    if len(held) == 1:
        return held[0]
    return Span(held[0].begin, held[-1].end, tuple(part for span in held for part in span.parts))

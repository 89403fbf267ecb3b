"""Cut the merge into jobs that any worker can take in any order, such that source checksums can still be had. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardmake.consolidate.archive import Record
from shardmake.consolidate.contents import Piece
from shardmake.consolidate.dtypes import ITEM_SIZE
from shardmake.consolidate.layout import Entry, Shard

BLOCK = 4 << 20
"""Bytes read at once."""
JOB = 64 << 20
"""Bytes of a source that one worker takes at a time, about."""


@dataclass(frozen=True)
class Move:
    """Bytes ``[begin, end)`` of a record for ``entry``, from byte ``offset`` of the output on.

    With ``run``, each run of so many source bytes goes ``stride`` output bytes behind the one before.
    """

    begin: int
    end: int
    entry: Entry
    offset: int
    run: int = 0
    stride: int = 0


@dataclass(frozen=True)
class Job:
    """Bytes ``[begin, end)`` of ``record``, all read for the checksum, and what of them goes where in one file."""

    record: Record
    begin: int
    end: int
    moves: tuple[Move, ...]


def plan_jobs(shards: Sequence[Shard]) -> list[list[Job]]:
    """The jobs of each shard, in the order of the source files.

    Every byte of a record with a CRC-32 belongs to exactly one job, also the bytes that go nowhere (padding).
    """
    jobs: list[list[Job]] = [[] for _ in shards]
    by_record: dict[Record, list[tuple[Move, int]]] = {}
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


def _moves(entry: Entry, piece: Piece) -> Iterator[Move]:
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


def _jobs(record: Record, moves: Sequence[tuple[Move, int]]) -> Iterator[tuple[int, Job]]:
    """Neighbouring moves into the same file, up to a job's size; gaps go to the job before them.

    Where two tensors share bytes, the second one's move is a job of its own that is left out of the checksum.
    """
    disjoint, shared = _split_overlapping(moves)
    for move, shard in shared:
        yield shard, Job(replace(record, crc=None), move.begin, move.end, (move,))
    begin = 0
    group: list[Move] = []
    for index, (move, shard) in enumerate(disjoint):
        group.append(move)
        following = disjoint[index + 1] if index + 1 < len(disjoint) else None
        end = following[0].begin if following else record.size
        if following is None or following[1] != shard or end - begin >= JOB:
            yield shard, Job(record, begin, end, tuple(group))
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

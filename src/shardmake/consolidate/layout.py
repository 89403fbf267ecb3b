"""The layout of the merged model: every output file and every offset, computed before the first byte is written.

The copy is divided into jobs with one source and one output each, and the jobs into blocks of one read each.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from shardmake.checkpoint.formats.contents import Piece, StoredTensor
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target, converted
from shardmake.checkpoint.formats.huggingface import MODEL, WeightFiles
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.consolidate.blocks import PAGE

BLOCK = 4 << 20
"""Bytes of one read."""
JOB = 64 << 20
"""Approximate source bytes per checksum."""
_SMALL = 1 << 18
"""Bytes; smaller parts are read together with their neighbours, because a separate read would cost more."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of an output file: its type there, and the offset of its first byte in the file."""

    tensor: StoredTensor
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in the output, in bytes."""
        return self.tensor.numel * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class PlannedShard:
    """One output file: its name, its header, its tensors, its size in bytes."""

    name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]
    size: int

    @property
    def nbytes(self) -> int:
        """Size of the tensors, in bytes."""
        return sum(planned.nbytes for planned in self.tensors)


def plan_shards(
    tensors: Iterable[StoredTensor], target: Target, max_shard_size: int, files: WeightFiles = MODEL
) -> list[PlannedShard]:
    """Divide the model into files of at most ``max_shard_size`` bytes; a larger tensor gets a file of its own.

    The order of the tensors is kept, so that the source is read from front to back.
    """
    groups: list[list[tuple[StoredTensor, str]]] = [[]]
    filled = 0
    for tensor in tensors:
        dtype = converted(tensor.dtype, target)
        size = tensor.numel * ITEM_SIZE[dtype]
        if groups[-1] and filled + size > max_shard_size:
            groups.append([])
            filled = 0
        groups[-1].append((tensor, dtype))
        filled += size
    return [_plan_shard(files.shard(index, len(groups)), group) for index, group in enumerate(groups)]


def index_json(shards: list[PlannedShard]) -> dict[str, object]:
    """Return the index of a model in several files."""
    weight_map = {planned.tensor.name: shard.name for shard in shards for planned in shard.tensors}
    elements = sum(planned.tensor.numel for shard in shards for planned in shard.tensors)
    metadata = {"total_parameters": elements, "total_size": sum(shard.nbytes for shard in shards)}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _plan_shard(name: str, group: list[tuple[StoredTensor, str]]) -> PlannedShard:
    """Place wider types first, so that every tensor is aligned to its element size."""
    ordered = sorted(group, key=lambda item: -ITEM_SIZE[item[1]])
    ends = list(accumulate((tensor.numel * ITEM_SIZE[dtype] for tensor, dtype in ordered), initial=0))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for (tensor, dtype), offsets in zip(ordered, pairwise(ends), strict=True):
        entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    planned = (PlannedTensor(*held, len(header) + begin) for held, begin in zip(ordered, ends, strict=False))
    return PlannedShard(name, header, tuple(planned), len(header) + ends[-1])


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
    disjoint: list[tuple[Move, int]] = []
    end = 0
    for move, shard in moves:
        if move.begin < end:
            yield shard, CopyJob(replace(record, crc=None), move.begin, move.end, (move,))
        else:
            disjoint.append((move, shard))
            end = move.end
    begin = 0
    group: list[Move] = []
    for index, (move, shard) in enumerate(disjoint):
        group.append(move)
        following = disjoint[index + 1] if index + 1 < len(disjoint) else None
        end = following[0].begin if following else record.size
        if following is None or following[1] != shard or end - begin >= JOB:
            yield shard, CopyJob(record, begin, end, tuple(group))
            begin, group = end, []


def read_blocks(job: CopyJob) -> Iterator[ReadBlock]:
    """Yield the blocks to read for ``job``; padding is skipped if there is no checksum to compare."""
    held: list[ReadBlock] = []
    was_small = False
    for block in _single_blocks(job):
        is_small = block.end - block.begin < _SMALL
        fits = held and held[-1].end == block.begin and block.end - held[0].begin <= BLOCK
        if held and not (fits and is_small and was_small):
            yield _joined(held)
            held = []
        held.append(block)
        was_small = is_small
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


def _joined(held: Sequence[ReadBlock]) -> ReadBlock:
    if len(held) == 1:
        return held[0]
    return ReadBlock(held[0].begin, held[-1].end, tuple(part for block in held for part in block.parts))

"""The contents of a checkpoint: each tensor of the model as byte ranges on disk."""

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shardmake.checkpoint.formats.dtypes import CONVERTIBLE, ITEM_SIZE
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord, read_small
from shardmake.checkpoint.formats.unpickle import Sized, TensorRef, locate, numel, row_major
from shardmake.core.errors import CheckpointError
from shardmake.run.adapter_settings import AdapterSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_BLOCK = 1 << 20
_MOST_PIECES = 1_000_000
"""Pieces of one box."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements in ``record`` from byte ``start`` on, and their position in the tensor.

    There are ``runs`` runs of ``count`` elements each. The first run belongs to element ``at`` of the tensor
    (row-major), each following run ``stride`` elements further. A plain piece has one run.
    """

    record: ZipRecord
    start: int
    at: int
    count: int
    runs: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        """Number of elements in all runs."""
        return self.count * self.runs

    def cut(self, begin: int, end: int, itemsize: int) -> Iterator["Piece"]:
        """Yield the part with the elements ``[begin, end)`` of the tensor, as pieces of a tensor of those elements."""
        last = self.at + (self.runs - 1) * self.stride + self.count
        if begin <= self.at and last <= end:
            yield replace(self, at=self.at - begin)
            return
        for index in range(self.runs):
            at = self.at + index * self.stride
            low, high = max(begin, at), min(end, at + self.count)
            if low < high:
                start = self.start + (index * self.count + low - at) * itemsize
                yield Piece(self.record, start, low - begin, high - low)


Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offsets and sizes by dimension."""
Change = Callable[["Array", int], "Array"]
"""Takes consecutive values of a weight in float32 and the number of the first one; returns the changed values."""
Read = Callable[["StoredTensor"], "Array"]


@dataclass(frozen=True)
class Update(ABC):
    """The change that an adapter makes to a weight [rows, columns].

    PEFT stores the tensors ``parts``, by the ends of their names, for ``module``, by its name in the trained model.
    """

    module: str
    parts: "Mapping[str, StoredTensor]" = field(repr=False)
    settings: AdapterSettings
    start: int = field(default=0, kw_only=True)
    """The first element of a weight that is a part of the updated one."""
    PARTS: ClassVar[tuple[str, ...]]
    READS_WEIGHT: ClassVar[bool] = False
    """`load` reads the weight, which must be a whole one."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""

    @abstractmethod
    def load(self, read: Read, weight: "StoredTensor") -> Change:
        """Return the change; ``read`` returns a tensor in float32."""

    @abstractmethod
    def part(self, read: Read, rows: Sequence[int]) -> "dict[str, Array]":
        """Return what changes these ``rows`` of the weight, or of each matrix in it, alone, by PEFT's names."""

    def fitting(self, weight: "StoredTensor | None") -> Self:
        """Return the update of ``weight``; raise `CheckpointError` if it is none."""
        if problem := next(self.problems(weight), None):
            raise CheckpointError(f"Cannot merge the adapter: {problem}")
        return self

    def problems(self, weight: "StoredTensor | None") -> Iterator[str]:
        """Yield why the update cannot be merged into ``weight``."""
        for part, tensor in self.parts.items():
            if not tensor.numel or not all(tensor.shape):
                yield (
                    f"{self.module}.{part} is empty. It was saved under ZeRO-3 without gathering the weights. Merge "
                    "the ZeRO checkpoint, or save again inside GatheredParameters."
                )
            if tensor.dtype not in CONVERTIBLE:
                yield f"{self.module}.{part} is of type {tensor.dtype}. Save it in float32."
        if weight is not None and weight.dtype not in CONVERTIBLE:
            yield (
                f"the base weight {weight.name} is of type {weight.dtype}, to which nothing can be added. Name the "
                "model in bf16, fp16 or fp32 with --base."
            )
        if weight is not None and any(piece.runs > 1 for piece in weight.pieces):
            yield (
                f"{self.module} is sharded in two dimensions. Write the adapter alone with --adapter, then merge that "
                "into the base model."
            )

    def misfit(self, weight: "StoredTensor | None") -> str:
        """Return the problem of an adapter that was trained on another weight."""
        parts = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in self.parts.items())
        held = "no such weight" if weight is None else f"a weight of {list(weight.shape)}"
        advice = "The adapter was trained on another model. Name that model with --base."
        if weight is not None and re.search("embed|head", self.module.rpartition(".")[2]):
            advice += " If the vocabulary was resized before training, name a model that was saved after the resize."
        return f"it has {parts} for {self.module}, the base model has {held}. {advice}"


@dataclass(frozen=True)
class StoredTensor(Sized):
    """One tensor of the model: its name, type, shape, pieces on disk and the update by an adapter."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    update: Update | None = None

    @property
    def offset(self) -> int:
        """Offset of the first byte in the file of a tensor in one piece; 0 without any bytes."""
        return self.pieces[0].record.offset + self.pieces[0].start if self.pieces else 0

    def elements(self, begin: int, end: int, shape: tuple[int, ...]) -> "StoredTensor":
        """Return the elements ``[begin, end)``, without the update, as a tensor of ``shape``."""
        cut = (part for piece in self.pieces for part in piece.cut(begin, end, ITEM_SIZE[self.dtype]))
        return StoredTensor(self.name, self.dtype, shape, tuple(part for part in cut if part.count)).check()

    def rows(self, begin: int, end: int) -> "StoredTensor":
        """Return the rows ``[begin, end)`` of a matrix, or of consecutive ones, without the update."""
        width = self.shape[-1]
        return self.elements(begin * width, end * width, (end - begin, width))

    def check(self) -> "StoredTensor":
        """Return the tensor itself; raise `CheckpointError` unless its pieces hold exactly its elements."""
        held = sum(piece.numel for piece in self.pieces)
        if held != self.numel:
            raise CheckpointError(
                f"The checkpoint holds {held} of the {self.numel} elements of {self.name} {list(self.shape)}. "
                "Its files do not belong together. Use another checkpoint."
            )
        return self


@dataclass(frozen=True)
class Contents:
    """A checkpoint without the bytes of its tensors.

    Attributes:
        step: Training step, if the checkpoint records it.
        world_size: Ranks that wrote it.
        aliases: By name of a tensor that is not stored itself, the name of the tensor that it shares.
        versions: Versions of the libraries that wrote it.
        notes: Reasons why newer checkpoints were skipped.
        left_out: Names of the entries `is_extra_state` that are not tensors.
        trained: By name of each weight that an adapter changed or holds in full, the base model's, None without one.
    """

    format: str
    folder: Path
    step: int | None
    world_size: int
    tensors: dict[str, StoredTensor]
    aliases: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    trained: dict[str, StoredTensor | None] = field(default_factory=dict)

    def with_tensors(self, tensors: Iterable[StoredTensor], aliases: dict[str, str] | None = None) -> "Contents":
        """Return the same checkpoint with other tensors."""
        named = {tensor.name: tensor for tensor in tensors}
        return replace(self, tensors=named, aliases=self.aliases if aliases is None else aliases)


def is_extra_state(name: str) -> bool:
    """Return True for what a module's ``get_extra_state`` returned: of any type, and not a weight.

    Transformer Engine keeps the scales of its FP8 products there, which it measures again in use.
    """
    return name.rpartition(".")[2] == "_extra_state"


def unsharded(name: str, ref: TensorRef) -> StoredTensor:
    """Return a tensor that is stored in one piece."""
    if not ref.is_contiguous:
        raise CheckpointError(
            f"Cannot read {name} in {ref.record.path}. The tensor is stored transposed or with gaps (stride "
            f"{list(ref.stride)}). Call .contiguous() on it before saving."
        )
    pieces = (Piece(ref.record, ref.offset, 0, ref.numel),) if ref.numel else ()
    return StoredTensor(name, ref.dtype, ref.shape, pieces)


def flat_pieces(parts: Sequence[TensorRef], begin: int, count: int, at: int = 0) -> Iterator[Piece]:
    """Yield elements ``[begin, begin + count)`` of several vectors in a row, as pieces of a tensor from ``at`` on."""
    end, offset = begin + count, 0
    for part in parts:
        low, high = max(begin, offset), min(end, offset + part.numel)
        if low < high:
            start = part.offset + (low - offset) * ITEM_SIZE[part.dtype]
            yield Piece(part.record, start, at + low - begin, high - low)
        offset += part.numel


def covers(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Return True if ``boxes`` lie in a tensor of ``shape``, share no element, and leave none out.

    If the corners that an odd number of boxes have are those of the tensor, then an odd number of boxes hold each of
    its elements. This number is 1 if the boxes have as many elements as the tensor.
    """
    odd: set[Shape] = set()
    whole = ((0,) * len(shape), shape)
    filled = [(offsets, sizes) for offsets, sizes in (whole, *boxes) if all(sizes)]
    for offsets, sizes in filled:
        odd ^= set(itertools.product(*((begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))))
    return not odd and sum(numel(sizes) for _, sizes in filled) == 2 * numel(shape)


def box_pieces(record: ZipRecord, start: int, itemsize: int, shape: Shape, box: Box) -> tuple[Piece, ...]:
    """Return the pieces of a box of a tensor of ``shape``, which is stored from byte ``start`` on.

    Trailing dimensions that the box covers completely form one run with the last dimension that it covers in part. The
    dimension before that one becomes the piece's ``runs``. Each index of the dimensions before is a separate piece;
    raise `CheckpointError` for more than `_MOST_PIECES`.
    """
    offsets, sizes = box
    strides, split = row_major(shape), len(shape)
    while split and sizes[split - 1] == shape[split - 1]:
        split -= 1
    inner = max(split - 1, 0)
    count = numel(sizes[inner:])
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    if not numel(sizes):
        return ()
    if inner == 0:
        return (Piece(record, start, first, count),)
    if numel(sizes[: inner - 1]) > _MOST_PIECES:
        raise CheckpointError(
            f"Cannot read {record.path}. A part of a tensor of shape {list(shape)} would be read in more than "
            f"{_MOST_PIECES} pieces. Save the checkpoint with another layout."
        )
    runs, stride = sizes[inner - 1], strides[inner - 1]
    return tuple(
        Piece(
            record, start + index * runs * count * itemsize, first + sum(map(mul, place, strides)), count, runs, stride
        )
        for index, place in enumerate(itertools.product(*map(range, sizes[: inner - 1])))
    )


def have_same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two tensors hold the same bytes; tensors with different pieces count as different."""
    layouts = [
        (tensor.dtype, tensor.shape, [(piece.at, piece.count, piece.runs, piece.stride) for piece in _in_order(tensor)])
        for tensor in (one, other)
    ]
    return layouts[0] == layouts[1] and all(a == b for a, b in zip(_blocks(one), _blocks(other), strict=True))


def are_apart(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two tensors hold different values of one type; values of two types are not compared."""
    return one.dtype == other.dtype and not have_same_bytes(one, other)


def _in_order(tensor: StoredTensor) -> list[Piece]:
    return sorted(tensor.pieces, key=lambda piece: piece.at)


def _blocks(tensor: StoredTensor) -> Iterator[bytes]:
    """Yield the bytes of the pieces in the order of their elements."""
    for piece in _in_order(tensor):
        record, size = locate(piece.record, tensor.dtype), piece.numel * ITEM_SIZE[tensor.dtype]
        for at in range(0, size, _BLOCK):
            yield read_small(record.path, record.offset + piece.start + at, min(_BLOCK, size - at))

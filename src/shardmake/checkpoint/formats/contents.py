"""What a checkpoint holds: each tensor of the model as byte ranges on disk. Made by the readers, used by the writer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import TensorRef, numel, row_major
from shardmake.core.errors import ShardmakeError


@dataclass(frozen=True)
class Piece:
    """Elements that lie one after the other in ``record`` from byte ``start`` on, and where they belong.

    ``runs`` runs of ``count`` elements each; the first goes to element ``at`` of the tensor (row-major), each next one
    ``stride`` elements further. A plain piece has one run.
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


@dataclass(frozen=True)
class Update:
    """What a LoRA adapter adds to a weight [out, in]: ``scale`` * ``b`` [out, rank] @ ``a`` [rank, in]."""

    a: "Tensor"
    b: "Tensor"
    scale: float


@dataclass(frozen=True)
class Tensor:
    """One tensor of the model: its name, type, shape, the pieces it is made of, and what is added to them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    update: Update | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in the checkpoint's type, in bytes."""
        return self.numel * ITEM_SIZE[self.dtype]

    def check(self) -> "Tensor":
        """The tensor itself, if its pieces hold exactly its elements; a `ShardmakeError` if not."""
        held = sum(piece.numel for piece in self.pieces)
        if held != self.numel:
            raise ShardmakeError(
                f"The checkpoint holds {held} of the {self.numel} elements of {self.name} {list(self.shape)}: "
                "its files do not belong together."
            )
        return self


@dataclass(frozen=True)
class Contents:
    """A checkpoint, read but for the tensors' bytes.

    Attributes:
        format: What wrote it.
        folder: The folder with its files.
        step: Training step, where the checkpoint says it.
        world_size: Ranks that wrote it.
        tensors: By name.
        aliases: By name of a tensor that is not stored on its own, the name of the one it shares.
        versions: Of what wrote it.
        notes: Why newer checkpoints were passed over.
    """

    format: str
    folder: Path
    step: int | None
    world_size: int
    tensors: dict[str, Tensor]
    aliases: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def with_tensors(self, tensors: Iterable[Tensor], aliases: dict[str, str] | None = None) -> "Contents":
        """The same checkpoint with other tensors."""
        named = {tensor.name: tensor for tensor in tensors}
        return replace(self, tensors=named, aliases=self.aliases if aliases is None else aliases)


def whole(name: str, ref: TensorRef) -> Tensor:
    """A tensor that is stored in one piece."""
    if not ref.is_contiguous:
        raise ShardmakeError(
            f"{ref.record.path} stores {name} transposed or with gaps (stride {list(ref.stride)}), which is not "
            "supported: call .contiguous() on it before saving."
        )
    pieces = (Piece(ref.record, ref.offset, 0, ref.numel),) if ref.numel else ()
    return Tensor(name, ref.dtype, ref.shape, pieces)


class Flat:
    """Several one-dimensional tensors read as one vector, such as a rank's flat groups."""

    def __init__(self, parts: Sequence[TensorRef]) -> None:
        self.parts = parts
        self.numel = sum(part.numel for part in parts)

    def pieces(self, begin: int, count: int, at: int) -> Iterator[Piece]:
        """Elements ``[begin, begin + count)`` of the vector as pieces, the first for element ``at`` of a tensor."""
        end, offset = begin + count, 0
        for part in self.parts:
            low, high = max(begin, offset), min(end, offset + part.numel)
            if low < high:
                start = part.offset + (low - offset) * ITEM_SIZE[part.dtype]
                yield Piece(part.record, start, at + low - begin, high - low)
            offset += part.numel


def box(
    record: ZipRecord,
    start: int,
    itemsize: int,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> tuple[Piece, ...]:
    """The box ``sizes`` at ``offsets`` of a tensor of ``shape``, stored contiguously from byte ``start`` on.

    Trailing dimensions that the box covers whole make up one run with the last one that it covers in part; the
    dimension before that one is the piece's ``runs``, and each index of the dimensions before that a piece of its own.
    """
    strides = row_major(shape)
    split = len(shape)
    while split and sizes[split - 1] == shape[split - 1]:
        split -= 1
    inner = max(split - 1, 0)
    count = numel(sizes[inner:])
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    if not numel(sizes):
        return ()
    if inner == 0:
        return (Piece(record, start, first, count),)
    runs, stride = sizes[inner - 1], strides[inner - 1]
    return tuple(
        Piece(record, start + index * runs * count * itemsize, first + shift, count, runs, stride)
        for index, shift in enumerate(_shifts(sizes[: inner - 1], strides))
    )


def _shifts(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[int]:
    """Distance of every index in the box ``sizes`` from its first one, in elements, row by row."""
    if not sizes:
        yield 0
        return
    for index in range(sizes[0]):
        for shift in _shifts(sizes[1:], strides[1:]):
            yield index * strides[0] + shift

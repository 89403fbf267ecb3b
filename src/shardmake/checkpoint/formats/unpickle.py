"""Read the pickle of a checkpoint without executing any of its code.

A pickle is a program. `PickleMachine` runs it without importing or calling what it names: objects become `Inert`
placeholders, and tensors become `TensorRef`, the place of their bytes, not the bytes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.dtypes import FROM_STORAGE, FROM_TORCH, ITEM_SIZE
from shardmake.checkpoint.formats.pickle_machine import Inert, Name, PickleError, PickleMachine
from shardmake.checkpoint.formats.torch_zip_reader import ZipArchive, ZipRecord, read_small
from shardmake.core.errors import CheckpointError


@dataclass(frozen=True)
class StorageRef:
    """A storage in an archive: its record and, if the pickle has it, the element type."""

    record: ZipRecord
    dtype: str | None


class Sized:
    """A tensor by its type and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the elements in the type of the checkpoint, in bytes."""
        return self.numel * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class TensorRef(Sized):
    """A tensor whose bytes are still on disk: ``offset`` is in bytes from the start of ``record``."""

    record: ZipRecord
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are in row-major order without gaps."""
        return self.numel <= 1 or all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.stride, row_major(self.shape), strict=True)
        )


@dataclass(frozen=True)
class ShardRef:
    """A rank's part ``local`` of a distributed tensor (DTensor) of ``shape``."""

    shape: tuple[int, ...]
    local: TensorRef
    spec: Inert
    """torch's DTensorSpec: ``placements`` and ``mesh``."""


def numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of ``shape``."""
    return math.prod(shape)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def load(path: Path) -> Any:
    """Return what ``torch.save`` wrote, with tensors as `TensorRef`; raise `CheckpointError` for a damaged file."""
    with ZipArchive(path) as archive:
        return load_archive(archive)


def load_archive(archive: ZipArchive) -> Any:
    """Return the object in an open archive, as `load` does."""
    if "byteorder" in archive.entries and archive.read("byteorder") != b"little":
        raise CheckpointError(f"Cannot read {archive.path}. Checkpoints of big-endian machines are not supported.")
    storages: dict[str, StorageRef] = {}

    def storage(pid: Any) -> StorageRef:
        """Return the storage with the id ``("storage", type, key, location, number of elements)``."""
        is_storage = isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"
        if not is_storage or not isinstance(pid[1], Name) or not isinstance(pid[2], str):
            raise _not_a_storage(archive.path)
        if pid[2] not in storages:
            storages[pid[2]] = StorageRef(archive.record(f"data/{pid[2]}"), FROM_STORAGE.get(pid[1].name))
        return storages[pid[2]]

    return _run(PickleMachine(archive.read("data.pkl"), _FUNCTIONS, storage), archive.path)


def load_plain(path: Path) -> Any:
    """Return the object in a plain pickle file without tensors, such as DCP's ``.metadata``."""

    def refuse(_: Any) -> None:
        raise _not_a_storage(path)

    return _run(PickleMachine(read_small(path), _FUNCTIONS, refuse), path)


def names_in(content: bytes, path: Path) -> set[str]:
    """Return the ``module.name`` of each class and function that loading ``content``, of a file, would import."""
    machine = PickleMachine(content, _FUNCTIONS_OF_CONTAINERS, lambda _: None)
    _run(machine, path)
    return machine.names


def locate(record: ZipRecord, dtype: str) -> ZipRecord:
    """Return the byte range inside the archive of a DCP ``record``; return any other record unchanged.

    Raise `CheckpointError` if the archive does not hold one contiguous tensor of ``dtype`` and the expected size.
    """
    if record.archive_length is None:
        return record
    with ZipArchive(record.path, record.offset, record.archive_length) as archive:
        ref = load_archive(archive)
    place = f"The tensor at byte {record.offset} of {record.path}"
    if not isinstance(ref, TensorRef) or (ref.dtype, ref.nbytes) != (dtype, record.size):
        raise CheckpointError(f"{place} is not the one in .metadata. Use another checkpoint.")
    if not ref.is_contiguous:
        raise CheckpointError(
            f"{place} is stored transposed or with gaps (stride {list(ref.stride)}), which is not supported. Call "
            ".contiguous() on it before saving."
        )
    if ref.record.size != record.size:
        return ZipRecord(record.path, ref.record.offset + ref.offset, record.size, None)
    return ref.record


def _not_a_storage(path: Path) -> CheckpointError:
    return CheckpointError(
        f"Rejected {path}: its pickle refers to an object that is not a torch storage. Use another checkpoint."
    )


def _run(machine: PickleMachine, path: Path) -> Any:
    try:
        return machine.run()
    except PickleError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Use an older checkpoint.") from None


def _tensor(_: PickleMachine, storage: Any, offset: int, shape: Any, stride: Any, *others: Any) -> TensorRef | Inert:
    """Return a tensor, or a placeholder for one of a type that no safetensors file has."""
    if not isinstance(storage, StorageRef):
        raise PickleError("a tensor has no storage")
    dtype = others[2] if len(others) > 2 else None  # only version 3 of torch's function has it at this position
    named = FROM_TORCH.get(dtype.name) if isinstance(dtype, Name) else storage.dtype
    if named is None:
        return Inert(dtype if isinstance(dtype, Name) else Name("torch", "Tensor"), (storage,))
    _sizes((offset,))
    if len(_sizes(shape)) != len(_sizes(stride)):
        raise PickleError("a tensor has no valid shape")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if numel(shape) else 0
    if last * ITEM_SIZE[named] > storage.record.size:
        raise CheckpointError(
            f"{storage.record.path} is damaged: a tensor of shape {list(shape)} exceeds its storage. "
            "Use an older checkpoint."
        )
    return TensorRef(storage.record, offset * ITEM_SIZE[named], named, shape, stride)


def _sizes(value: Any) -> tuple[Any, ...]:
    if (
        not isinstance(value, tuple)
        or len(value) > _MOST_DIMENSIONS
        or not all(isinstance(size, int) and 0 <= size <= _LARGEST for size in value)
    ):
        raise PickleError("a tensor has no valid shape")
    return value


def _wrapped(_machine: PickleMachine, _type: Any, _dtype: Any, shape: Any, *_: Any) -> tuple[Any, ...]:
    """Return the shape of a tensor without bytes of its own; `_subclass` receives the wrapped tensor."""
    return _sizes(shape)


def _subclass(machine: PickleMachine, function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Return a tensor subclass: the plain tensor in ``args`` for Parameter, a part of a tensor for DTensor."""
    if not isinstance(function, Name) or not isinstance(args, tuple):
        raise PickleError("a tensor subclass is not one that torch writes")
    call = function.replacement
    if call is _tensor:
        return _tensor(machine, *args)
    values = state[1] if isinstance(state, tuple) and len(state) > 1 else state
    local, spec = (values.get(key) if isinstance(values, Mapping) else None for key in ("_local_tensor", "_spec"))
    if call is not _wrapped or not isinstance(local, TensorRef) or not isinstance(spec, Inert):
        return Inert(kind if isinstance(kind, Name) else function, args)
    return ShardRef(_wrapped(machine, *args), local, spec)


def _copied(machine: PickleMachine, items: Any, copy: Callable[[Any], Any]) -> Any:
    machine.spend(len(items))
    return copy(items)


def _first(_machine: PickleMachine, value: Any = None, *_: Any) -> Any:
    return value


def _reconstruct(_machine: PickleMachine, kind: Any, *_: Any) -> Inert:
    if not isinstance(kind, Name):
        raise PickleError("an object has no class")
    return Inert(kind)


_LARGEST = 2**62
_MOST_DIMENSIONS = 64
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): PickleMachine.ordered,
    ("collections", "defaultdict"): lambda machine, *_: machine.ordered(),
    **{
        (module, name): lambda machine, items=(), *_: _copied(machine, items, list)
        for module in ("builtins", "__builtin__") for name in ("set", "frozenset")
    },
    **{(module, "complex"): lambda _, *parts: complex(*parts) for module in ("builtins", "__builtin__")},
    **{("torch._utils", f"_rebuild_tensor{version}"): _tensor for version in ("", "_v2", "_v3")},
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapped,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    ("torch", "Size"): lambda _, value=(), *__: _sizes(value),
    ("torch", "device"): _first,
    ("torch.serialization", "_get_layout"): _first,
    ("copy_reg", "_reconstructor"): _reconstruct,
    ("copyreg", "_reconstructor"): _reconstruct,
    ("_codecs", "encode"): lambda machine, text, *_: _copied(machine, text, lambda it: it.encode("latin1")),
}  # fmt: skip
"""Replacements of the functions and classes whose results are used; every other one yields an `Inert` placeholder."""
_FUNCTIONS_OF_CONTAINERS = {name: call for name, call in _FUNCTIONS.items() if not name[0].startswith("torch")}
"""Those without the ones of tensors, which need the storages."""

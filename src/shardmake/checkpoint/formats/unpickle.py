"""Read the pickle of a checkpoint without executing any of its code.

A pickle is a program. This unpickler gives it nothing to execute: every global that DeepSpeed, torch, Accelerate and
Transformers write into checkpoints is mapped to an inert class of this module. Any other name is rejected. Tensors
become `TensorRef`: the place of their bytes, not the bytes.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.dtypes import FROM_STORAGE, FROM_TORCH, ITEM_SIZE
from shardmake.checkpoint.formats.torch_zip_reader import ZipArchive, ZipRecord
from shardmake.core.errors import CheckpointError


@dataclass(frozen=True)
class StorageRef:
    """A storage in an archive: its record and, if the pickle has it, the element type."""

    record: ZipRecord
    dtype: str | None


@dataclass(frozen=True)
class TensorRef:
    """A tensor whose bytes are still on disk: ``offset`` is in bytes from the start of ``record``."""

    record: ZipRecord
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return self.numel * ITEM_SIZE[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are in row-major order without gaps."""
        return self.numel <= 1 or all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.stride, row_major(self.shape), strict=True)
        )


@dataclass(frozen=True)
class ShardRef:
    """A rank's part of a distributed tensor (DTensor).

    Attributes:
        shape: Shape of the whole tensor.
        local: This rank's part.
        spec: torch's DTensorSpec: ``placements`` and ``mesh``.
    """

    shape: tuple[int, ...]
    local: TensorRef
    spec: Any


def numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of ``shape``."""
    count = 1
    for size in shape:
        count *= size
    return count


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class Inert:
    """Placeholder for an object of an allowed class, which keeps its pickled state and has no behavior."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the pickled object; None if it had no such attribute."""
        state = self.__dict__.get("state")
        return state.get(name) if isinstance(state, dict) and not name.startswith("__") else None


class Dtype(str):
    """A torch dtype by its safetensors name."""

    __slots__ = ()


def load(path: Path) -> Any:
    """Return the object that ``torch.save`` wrote to ``path``, with tensors as `TensorRef`.

    Raises:
        CheckpointError: The file is damaged, or its pickle names something that is not in the allowlist.
    """
    with ZipArchive(path) as archive:
        return load_archive(archive)


def load_archive(archive: ZipArchive) -> Any:
    """Return the object in an open archive, as `load` does."""
    if "byteorder" in archive and archive.read("byteorder") != b"little":
        raise CheckpointError(f"Cannot read {archive.path}. Checkpoints of big-endian machines are not supported.")
    return _unpickle(_Unpickler(archive.read("data.pkl"), archive.path, archive))


def load_plain(path: Path) -> Any:
    """Return the object in a plain pickle file without tensors, such as DCP's ``.metadata``."""
    return _unpickle(_Unpickler(path.read_bytes(), path, None))


def locate(record: ZipRecord, dtype: str) -> ZipRecord:
    """Return the byte range inside the archive of a DCP ``record``; return any other record unchanged.

    Raises:
        CheckpointError: The archive does not hold one contiguous tensor of ``dtype`` and the expected size.
    """
    if record.archive_length is None:
        return record
    with ZipArchive(record.path, record.offset, record.archive_length) as archive:
        ref = load_archive(archive)
    if not isinstance(ref, TensorRef) or (ref.dtype, ref.nbytes) != (dtype, record.size) or not ref.is_contiguous:
        raise CheckpointError(
            f"The tensor at byte {record.offset} of {record.path} is not the one in .metadata. Use another checkpoint."
        )
    if ref.record.size != record.size:
        return ZipRecord(record.path, ref.record.offset + ref.offset, record.size, None)
    return ref.record


def _unpickle(unpickler: "_Unpickler") -> Any:
    try:
        return unpickler.load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged or hostile pickle can raise anything
        raise CheckpointError(
            f"{unpickler.path} cannot be read: {type(error).__name__}: {error}. Use an older checkpoint."
        ) from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, path: Path, archive: ZipArchive | None) -> None:
        super().__init__(io.BytesIO(content))
        self.path, self._archive = path, archive
        self._storages: dict[str, StorageRef] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the inert class for an allowed global."""
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module == "torch" and name in FROM_TORCH:
            return Dtype(FROM_TORCH[name])
        if module in ("torch", "torch.storage") and name in {*FROM_STORAGE, "UntypedStorage"}:
            return Dtype(FROM_STORAGE.get(name, ""))
        if name in _INERT.get(module, ()):
            return type(name, (Inert,), {})
        raise CheckpointError(
            f"Rejected {self.path}: its pickle uses {module}.{name}, which checkpoints of DeepSpeed and torch do not "
            "need. Loading the file could execute foreign code. Nothing was executed."
        )

    def persistent_load(self, pid: Any) -> StorageRef:
        """Return a storage by ``("storage", type, key, location, number of elements)``."""
        if self._archive is None or not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise CheckpointError(f"Rejected {self.path}: its pickle refers to an object that is not a torch storage.")
        dtype, key = str(pid[1]) or None, str(pid[2])
        if key not in self._storages:
            self._storages[key] = StorageRef(self._archive.record(f"data/{key}"), dtype)
        return self._storages[key]


def _tensor(
    storage: StorageRef,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    _grad: Any = None,
    _hooks: Any = None,
    dtype: Any = None,
    *_: Any,
) -> TensorRef:
    """Return a tensor; only version 3 of torch's function has ``dtype`` at this position."""
    shape, stride, dtype = tuple(shape), tuple(stride), dtype if isinstance(dtype, Dtype) else storage.dtype
    if dtype is None:
        raise CheckpointError(f"{storage.record.path} holds a tensor without a data type. Use another checkpoint.")
    itemsize = ITEM_SIZE[dtype]
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if numel(shape) else 0
    if offset < 0 or min((*shape, *stride), default=0) < 0 or last * itemsize > storage.record.size:
        raise CheckpointError(
            f"{storage.record.path} is damaged: a tensor of shape {list(shape)} exceeds its storage. "
            "Use an older checkpoint."
        )
    return TensorRef(storage.record, offset * itemsize, str(dtype), shape, stride)


def _wrapped(_type: Any, _dtype: Any, shape: tuple[int, ...], *_: Any) -> tuple[int, ...]:
    """Return the shape of a tensor without bytes of its own; `_subclass` receives the wrapped tensor."""
    return tuple(shape)


def _subclass(function: Callable[..., Any], _type: Any, args: tuple[Any, ...], state: Any) -> Any:
    """Return a tensor subclass: the plain tensor in ``args`` for Parameter, a part of a tensor for DTensor."""
    if function is not _wrapped:
        return function(*args)
    values = state[1] if isinstance(state, tuple) else state
    return ShardRef(_wrapped(*args), values["_local_tensor"], values["_spec"])


def _first(value: Any = None, *_: Any) -> Any:
    return value


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: OrderedDict(),
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("__builtin__", "set"): set,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapped,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    ("torch", "Size"): tuple,
    ("torch", "device"): _first,
    ("torch.serialization", "_get_layout"): _first,
    ("copy_reg", "_reconstructor"): lambda kind, *_: kind(),
    ("copyreg", "_reconstructor"): lambda kind, *_: kind(),
    ("numpy.core.multiarray", "scalar"): Inert,
    ("numpy._core.multiarray", "scalar"): Inert,
    ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
}

_INERT: dict[str, set[str]] = {
    "builtins": {"object"},
    "__builtin__": {"object"},
    "numpy": {"dtype"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Tensor"},
    "torch.nn.parameter": {"Parameter", "Buffer"},
    "deepspeed.runtime.zero.config": {"ZeroStageEnum"},
    "deepspeed.runtime.fp16.loss_scaler": {"LossScaler", "DynamicLossScaler", "LossScaleConfig", "LossScaleProfile"},
    "deepspeed.utils.tensor_fragment": {"fragment_address"},
    "deepspeed.runtime.config": {"DeepSpeedConfig"},
    "torch.distributed._mesh_layout": {"_MeshLayout", "_FlatLayout"},
    "torch.distributed.device_mesh": {"DeviceMesh"},
    "torch.distributed.tensor": {"DTensor"},
    "torch.distributed.tensor._dtensor_spec": {"DTensorSpec", "ShardOrderEntry", "TensorMeta"},
    "torch.distributed.tensor.placement_types": {"Shard", "Replicate", "Partial", "_StridedShard"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint._fsspec_filesystem": {"_StorageInfo"},
}  # fmt: skip

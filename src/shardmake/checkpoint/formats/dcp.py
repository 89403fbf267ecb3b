"""Checkpoints of FSDP: torch's distributed checkpoint (DCP), and files with each rank's own part of every tensor.

FSDP1 and FSDP2 write DCP with SHARDED_STATE_DICT.
``.metadata`` records the boxes of every tensor and where each box is stored. Bytes ``[offset, offset + length)`` of a
``__R_I.distcp`` file are a ``torch.save`` archive of one box. Names are nested: Accelerate and the Trainer save
``{"model": state_dict}``, Lightning ``{"state_dict": ...}``, and torchtitan puts the weights beside ``optimizer`` and
``train_state``. ``planner_data`` keeps the levels separate.

Accelerate's FSDP and verl write a file for each rank, which Accelerate's ``merge-weights`` cannot read. Each tensor
must be whole on every rank or divided along one dimension over all ranks. Other meshes (hybrid sharding, tensor
parallelism) are rejected, because a file does not record which part of such a mesh it holds.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from shardmake.checkpoint.formats import contents, unpickle
from shardmake.checkpoint.formats.contents import Box, Contents, Piece, Shape, StoredTensor, box_pieces
from shardmake.checkpoint.formats.dtypes import FROM_TORCH, ITEM_SIZE, Target
from shardmake.checkpoint.formats.models import choose, names_of_model
from shardmake.checkpoint.formats.pickle_machine import Inert, Name
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import ShardRef, TensorRef, load_plain, numel
from shardmake.core.errors import CheckpointError

_Value = TypeVar("_Value")
OLDER = "Use an older checkpoint, or copy this one again."


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor by its type, shape and boxes; ``dtype`` is torch's name if safetensors files do not have the type."""

    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class DcpMetadata:
    """Content of ``.metadata``.

    Attributes:
        entries: By name, a tensor, or None for another object.
        paths: By name, its levels in the saved dictionary.
        places: By name and offsets, the archive of a box; other objects have the offsets ``()``.
    """

    entries: dict[str, TensorEntry | None]
    paths: dict[str, tuple[str, ...]]
    places: dict[tuple[str, Shape], ZipRecord]


def read_metadata(path: Path) -> DcpMetadata:
    """Read ``.metadata``; raise `CheckpointError` if it is damaged, or a field is missing or of another type."""
    try:
        metadata = _is(load_plain(path), Inert, "the whole")
        entries = _is(metadata.state_dict_metadata, dict, "state_dict_metadata")
        stored = _is(metadata.storage_data, dict, "storage_data")
        planner = _is(metadata.planner_data or {}, dict, "planner_data")
        paths = {_is(name, str, "a name"): _levels(name, planner) for name in entries}
        files: dict[str, Path] = {}
        places = dict(_place(path.parent, files, *item) for item in _emptied(stored))
        return DcpMetadata({name: _entry(name, entry) for name, entry in _emptied(entries)}, paths, places)
    except TypeError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error} has an unexpected value. The file is damaged, or another version of torch "
            f"wrote it. {OLDER}"
        ) from None


def _is(value: Any, kind: type[_Value], what: str) -> _Value:
    if not isinstance(value, kind):
        raise TypeError(what)
    return value


def _emptied(held: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield and remove the items: with many ranks, placeholders need more memory than what is read from them."""
    while held:
        yield held.popitem()


def _shape(value: Any, what: str, dimensions: int | None = None) -> Shape:
    value = _is(value, tuple, what)
    if not all(isinstance(size, int) and size >= 0 for size in value) or dimensions not in (None, len(value)):
        raise TypeError(what)
    return value


def _levels(name: str, planner: dict[Any, Any]) -> tuple[str, ...]:
    """Return the levels of an entry; torch joins them to its name, so that a damaged one does not rename a tensor."""
    if not planner:
        return (name,)
    levels = _is(planner.get(name), tuple, f"the path of {name}")
    if not all(isinstance(level, str | int) for level in levels) or ".".join(map(str, levels)) != name:
        raise TypeError(f"the path of {name}")
    return tuple(map(str, levels))


def _entry(name: str, entry: Any) -> TensorEntry | None:
    """Return a tensor, None for another object; torch pickles the properties as a tuple that begins with the type."""
    entry = _is(entry, Inert, name)
    if entry.kind.name == "BytesStorageMetadata":
        return None
    shape, what = _shape(entry.size, f"the size of {name}"), f"a chunk of {name}"
    chunks = (_is(chunk, Inert, what) for chunk in _is(entry.chunks, list, f"chunks of {name}"))
    boxes = ((_shape(chunk.offsets, what, len(shape)), _shape(chunk.sizes, what, len(shape))) for chunk in chunks)
    properties = _is(entry.properties, Inert, f"properties of {name}")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state and isinstance(state[0], Name) else properties.dtype
    dtype = _is(dtype, Name, f"the type of {name}").name
    return TensorEntry(FROM_TORCH.get(dtype, dtype), shape, tuple(boxes))


def _place(folder: Path, files: dict[str, Path], index: Any, info: Any) -> tuple[tuple[str, Shape], ZipRecord]:
    name = _is(_is(index, Inert, "an index").fqn, str, "fqn of an index")
    info, what = _is(info, Inert, f"the place of {name}"), f"the place of {name}"
    file, offset, length = _is(info.relative_path, str, what), _is(info.offset, int, what), _is(info.length, int, what)
    if offset < 0 or length < 0 or "/" in file or "\0" in file:
        raise TypeError(what)
    path = files.setdefault(file, folder / file)
    if info.get("transform_descriptors"):
        raise CheckpointError(f"Cannot read {path}. The file is compressed or encrypted. Save it without that.")
    return (name, _shape(index.get("offset") or (), what)), ZipRecord(path, offset, length, None, archive_length=length)


MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
"""Accelerate's names for the only model and its optimizer."""
METADATA = ".metadata"
_RANK = re.compile(r"__(\d+)_")


def find(path: Path) -> dict[str, Path]:
    """Return the folders of DCP checkpoints, complete or not, by name: ``path``, or those of Accelerate in it."""
    if (path / METADATA).is_file() or any(path.glob("*.distcp")):
        return {"": path}
    return {it.name: it for it in sorted(path.glob("pytorch_model_fsdp_*")) if it.is_dir()}


def read(folder: Path, target: Target = "keep", key: str | None = None) -> Contents:
    """Read the checkpoint in ``folder`` (the one with ``.metadata``); of several models, read the one at ``key``.

    Raise `CheckpointError` for a file that is missing, truncated or of another save, and for an unsupported tensor.
    """
    if not (folder / METADATA).is_file():
        raise CheckpointError(f"{folder} has no .metadata. The checkpoint was not finished. Use an older checkpoint.")
    metadata = read_metadata(folder / METADATA)
    entries = {fqn: entry for fqn, entry in metadata.entries.items() if entry is not None}
    names, left_out = names_of_model(metadata.paths, entries, key, folder)
    _check_files(metadata.places.values())
    held = [_read_tensor(folder, name, fqn, entries[fqn], metadata) for fqn, name in names.items()]
    ranks = {match[1] for place in metadata.places.values() if (match := _RANK.match(place.path.name))}
    tensors = {tensor.name: tensor for tensor in held}
    return Contents("torch DCP (FSDP)", folder, None, max(len(ranks), 1), tensors, left_out=left_out)


def _check_files(places: Iterable[ZipRecord]) -> None:
    """Raise `CheckpointError` unless every file exists with exactly the length in ``.metadata``."""
    ends: dict[Path, int] = {}
    for place in places:
        ends[place.path] = max(ends.get(place.path, 0), place.offset + place.size)
    for path, end in ends.items():
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. The checkpoint is not complete. {OLDER}")
        if path.stat().st_size != end:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes, but .metadata describes {end}. The file is truncated or "
                f"comes from another save. {OLDER}"
            )


def _read_tensor(folder: Path, name: str, fqn: str, entry: TensorEntry, metadata: DcpMetadata) -> StoredTensor:
    if entry.dtype not in ITEM_SIZE:
        raise CheckpointError(f"Cannot read {folder}. The type {entry.dtype} of {fqn} is not supported.")
    if not contents.covers(entry.shape, entry.boxes):
        raise CheckpointError(
            f"{folder / METADATA} divides {fqn} {list(entry.shape)} into boxes that overlap or leave a part out. "
            f"{OLDER}"
        )
    return StoredTensor(name, entry.dtype, entry.shape, tuple(_read_pieces(folder, fqn, entry, metadata))).check()


def _read_pieces(folder: Path, fqn: str, entry: TensorEntry, metadata: DcpMetadata) -> Iterator[Piece]:
    itemsize = ITEM_SIZE[entry.dtype]
    for offsets, sizes in entry.boxes:
        place = metadata.places.get((fqn, offsets))
        if place is None:
            raise CheckpointError(f"{folder / METADATA} does not locate {fqn} at {list(offsets)}. {OLDER}")
        size = numel(sizes) * itemsize
        if size > place.size:
            raise CheckpointError(
                f"{place.path} has {place.size} bytes for the {size} of {fqn} at {list(offsets)}. {OLDER}"
            )
        yield from box_pieces(replace(place, size=size), 0, itemsize, entry.shape, (offsets, sizes))


_OTHER = "Use another checkpoint."
RANK_FILES = ("pytorch_model_fsdp*_rank*.bin", "model_world_size_*_rank_*.pt")
"""Accelerate's and verl's."""
_RANK_FILE = re.compile(r"(?P<model>pytorch_model_fsdp(?:_\d+)?|model_world_size_\d+)_rank_?(?P<rank>\d+)\.(?:bin|pt)")


def find_ranks(path: Path) -> dict[str, Path]:
    """Return the folder with per-rank files: ``path``, or verl's folder of the trained model, beside its critic."""
    places = (path, path / "actor")
    return next(({"": place} for place in places for name in RANK_FILES if any(place.glob(name))), {})


def read_ranks(folder: Path, target: Target = "keep", key: str | None = None) -> Contents:
    """Read the files of all ranks in ``folder``, of several models those whose names begin with ``key``."""
    files: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _RANK_FILE.fullmatch(path.name):
            files.setdefault(match["model"], {})[int(match["rank"])] = path
    found = choose(files, key, folder)
    count = re.search(r"world_size_(\d+)", next(iter(found.values())).name)
    missing = sorted(set(range(max(max(found) + 1, int(count[1]) if count else 0))) - set(found))
    if missing:
        raise CheckpointError(
            f"{folder} lacks the file of rank {missing[0]}. The checkpoint is not complete. Use an older checkpoint."
        )
    ranks = [unpickle.load(path) for _, path in sorted(found.items())]
    for rank, state in enumerate(ranks):
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{found[rank]} is not a per-rank file. Use another checkpoint.")
    if any(state.keys() != ranks[0].keys() for state in ranks):
        raise CheckpointError(f"The per-rank files in {folder} do not hold the same tensors. Use another checkpoint.")
    tensors = {name: _join(folder, name, [state[name] for state in ranks]) for name in ranks[0]}
    return Contents("per-rank FSDP", folder, None, len(ranks), tensors)


def _join(folder: Path, name: str, parts: Sequence[Any]) -> StoredTensor:
    first = parts[0]
    if isinstance(first, TensorRef):
        return contents.unsharded(name, first)
    if not all(isinstance(part, ShardRef) and part.local.is_contiguous for part in parts):
        raise CheckpointError(f"Cannot merge {folder}. The layout of {name} is not supported. Save with DCP instead.")
    placements = first.spec.placements
    kinds = [held.kind.name for held in placements if isinstance(held, Inert)] if isinstance(placements, tuple) else []
    if len(kinds) != 1 or len(placements) != 1 or kinds[0] not in ("Shard", "Replicate"):
        raise CheckpointError(
            f"Cannot merge {folder}. The mesh of {name} has several dimensions. Save with DCP instead (use_dcp=True)."
        )
    if kinds[0] == "Replicate":
        return contents.unsharded(name, first.local)
    rank = len(first.shape)
    if placements[0].dim not in range(rank) or any(len(part.local.shape) != rank for part in parts):
        raise CheckpointError(f"Cannot merge {folder}. {name} lacks the dimension that is sharded. {_OTHER}")
    boxes, pieces, at = [], list[Piece](), 0
    for local in (part.local for part in parts):
        boxes.append((tuple(at * (index == placements[0].dim) for index in range(len(local.shape))), local.shape))
        at += local.shape[placements[0].dim]
    if not contents.covers(first.shape, boxes):
        raise CheckpointError(f"Cannot merge {folder}. The ranks do not hold the parts of {name}. {_OTHER}")
    for local, box in zip((part.local for part in parts), boxes, strict=True):
        pieces += box_pieces(local.record, local.offset, ITEM_SIZE[local.dtype], first.shape, box)
    return StoredTensor(name, first.local.dtype, first.shape, tuple(pieces))

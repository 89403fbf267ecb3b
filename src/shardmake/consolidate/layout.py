"""The merged model's files, known to the last byte before the first one is written. Pure."""

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardmake.checkpoint.formats.contents import Tensor
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target, converted
from shardmake.checkpoint.formats.naming import MODEL, Naming
from shardmake.consolidate import torchzip
from shardmake.core.errors import ShardmakeError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor in an output file: the type it has there, and where its first byte is, from the file's start."""

    tensor: Tensor
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in the output, in bytes."""
        return self.tensor.numel * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class PlannedShard:
    """One output file: its name, what it begins with, its tensors, its size in bytes.

    ``archive``: for a file in torch's own format, what else goes into it once the tensors' checksums are known.
    """

    name: str
    header: bytes
    entries: tuple[PlannedTensor, ...]
    size: int
    archive: torchzip.ZipPlan | None = None

    def closing(self, sums: Mapping[str, int]) -> Iterable[tuple[int, bytes]]:
        """What is written last, and where; ``sums``: the CRC-32 of each tensor's bytes, 0 for those not given."""
        if self.archive is None:
            return ()
        return self.archive.closing([sums.get(entry.tensor.name, 0) for entry in self.entries])


def parse_size(text: str) -> int:
    """Bytes in a size such as ``5GB``, ``500MB`` or ``2GiB``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text.upper())
    if not match or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ShardmakeError(f"Size {text!r} is not understood; write something like 5GB, 500MB or 2GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def plan_shards(
    tensors: Iterable[Tensor], target: Target, max_shard_size: int, naming: Naming = MODEL
) -> list[PlannedShard]:
    """Cut the model into files of at most ``max_shard_size`` bytes of tensors; a larger tensor has a file to itself.

    The order of the tensors is kept, so that the source is read from front to back.
    """
    groups: list[list[tuple[Tensor, str]]] = [[]]
    filled = 0
    for tensor in tensors:
        dtype = converted(tensor.dtype, target)
        size = tensor.numel * ITEM_SIZE[dtype]
        if groups[-1] and filled + size > max_shard_size:
            groups.append([])
            filled = 0
        groups[-1].append((tensor, dtype))
        filled += size
    make = _archive if naming.suffix == "bin" else _shard
    return [make(naming.file(index, len(groups)), group) for index, group in enumerate(groups)]


def index_json(shards: list[PlannedShard]) -> dict[str, object]:
    """The index of a model in several files."""
    weight_map = {entry.tensor.name: shard.name for shard in shards for entry in shard.entries}
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    elements = sum(entry.tensor.numel for shard in shards for entry in shard.entries)
    metadata = {"total_parameters": elements, "total_size": total}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _shard(name: str, group: list[tuple[Tensor, str]]) -> PlannedShard:
    """Wider types first, so that every tensor is aligned to its element size."""
    ordered = sorted(group, key=lambda item: -ITEM_SIZE[item[1]])
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    begins = []
    for tensor, dtype in ordered:
        size = tensor.numel * ITEM_SIZE[dtype]
        described[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        begins.append(at)
        at += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    entries = (
        PlannedTensor(tensor, dtype, len(header) + begin)
        for (tensor, dtype), begin in zip(ordered, begins, strict=True)
    )
    return PlannedShard(name, header, tuple(entries), len(header) + at)


def _archive(name: str, group: list[tuple[Tensor, str]]) -> PlannedShard:
    """A file in torch's own format."""
    sizes = [tensor.numel * ITEM_SIZE[dtype] for tensor, dtype in group]
    plan = torchzip.plan([(t.name, dtype, t.shape, size) for (t, dtype), size in zip(group, sizes, strict=True)])
    places = plan.records[len(plan.small) :]
    entries = (PlannedTensor(tensor, dtype, place.begin) for (tensor, dtype), place in zip(group, places, strict=True))
    return PlannedShard(name, plan.start, tuple(entries), plan.size, plan)

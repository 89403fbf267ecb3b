"""The layout of the merged model: every output file and every offset, computed before the first byte is written."""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target, converted
from shardmake.checkpoint.formats.huggingface import MODEL, WeightFiles


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
    total = sum(planned.nbytes for shard in shards for planned in shard.tensors)
    elements = sum(planned.tensor.numel for shard in shards for planned in shard.tensors)
    metadata = {"total_parameters": elements, "total_size": total}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _plan_shard(name: str, group: list[tuple[StoredTensor, str]]) -> PlannedShard:
    """Place wider types first, so that every tensor is aligned to its element size."""
    ordered = sorted(group, key=lambda item: -ITEM_SIZE[item[1]])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    begins = []
    for tensor, dtype in ordered:
        size = tensor.numel * ITEM_SIZE[dtype]
        entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        begins.append(at)
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    planned = (
        PlannedTensor(tensor, dtype, len(header) + begin)
        for (tensor, dtype), begin in zip(ordered, begins, strict=True)
    )
    return PlannedShard(name, header, tuple(planned), len(header) + at)

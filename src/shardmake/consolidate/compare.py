"""Compare a merged model with the checkpoint it came from, bit for bit in the model's type."""

import os
from collections.abc import Iterable
from pathlib import Path

from shardmake.checkpoint.formats import huggingface as hf_folder
from shardmake.checkpoint.formats.contents import Contents, Tensor
from shardmake.checkpoint.formats.registry import read_model
from shardmake.consolidate.blocks import Block
from shardmake.consolidate.jobs import CopyJob, plan_jobs
from shardmake.consolidate.layout import PlannedShard, PlannedTensor
from shardmake.consolidate.stream import StreamTask, stream
from shardmake.core.errors import ShardmakeError


def compare(
    model: Path,
    checkpoint: Path,
    *,
    base: Path | None = None,
    ties: Iterable[tuple[str, str]] = (),
    workers: int = 4,
) -> None:
    """Read both and compare every stored bit; each of ``ties`` may be stored under either of its names.

    ``base`` is the base model's folder, for the checkpoint of an adapter.

    Raises:
        ShardmakeError: a tensor differs, or is only in one of them.
    """
    expected = read_model(checkpoint, base=base)
    merged = hf_folder.read(model).tensors
    missing = sorted(merged.keys() - expected.tensors.keys())
    left_out = expected.tensors.keys() - merged.keys() - expected.aliases.keys() - {alias for alias, _ in ties}
    if missing or left_out:
        raise ShardmakeError(
            f"{model} and {expected.folder} do not hold the same tensors: {[*missing, *sorted(left_out)]}."
        )
    shards = [_as_shard(model / name, expected) for name in hf_folder.shard_names(model)]
    different = _different(shards, model, workers)
    if different:
        lines = (f"  {name} differs." for name in sorted(different))
        raise ShardmakeError("\n".join([f"{model} is not what {expected.folder} holds:", *lines]))


def _as_shard(path: Path, expected: Contents) -> PlannedShard:
    """A file of the model as the plan that would have written it."""
    entries = tuple(_entry(tensor, expected.tensors[tensor.name], path) for tensor in hf_folder.read_file(path))
    return PlannedShard(path.name, b"", entries, path.stat().st_size)


def _entry(merged: Tensor, source: Tensor, path: Path) -> PlannedTensor:
    if merged.shape != source.shape:
        raise ShardmakeError(
            f"{merged.name} is {list(merged.shape)} in {path}, but {list(source.shape)} in the checkpoint."
        )
    return PlannedTensor(source, merged.dtype, merged.pieces[0].record.offset if merged.pieces else 0)


def _different(shards: list[PlannedShard], model: Path, workers: int) -> set[str]:
    """Names of the tensors of which a byte differs."""
    found: set[str] = set()
    for shard, jobs in zip(shards, plan_jobs(shards), strict=True):
        with (model / shard.name).open("rb") as file:
            stream([_comparison(job, file.fileno(), found) for job in jobs], workers)
    return found


def _comparison(job: CopyJob, file: int, found: set[str]) -> StreamTask:
    def put(content: Block, offset: int, entry: PlannedTensor) -> None:
        if os.pread(file, len(content), offset) != content.tobytes():
            found.add(entry.tensor.name)

    return StreamTask(job, put, lambda _record, _crc: None)

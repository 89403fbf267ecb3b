"""Compare a merged model with its checkpoint, bit for bit in the model's type."""

import os
from collections.abc import Iterable
from pathlib import Path

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import Contents, StoredTensor
from shardmake.checkpoint.formats.registry import read_model
from shardmake.consolidate.blocks import Block
from shardmake.consolidate.jobs import CopyJob, plan_jobs
from shardmake.consolidate.layout import PlannedShard, PlannedTensor
from shardmake.consolidate.stream import StreamTask, stream
from shardmake.core.errors import CheckpointError


def compare(
    model: Path,
    checkpoint: Path,
    *,
    base: Path | None = None,
    ties: Iterable[tuple[str, str]] = (),
    workers: int = 4,
) -> None:
    """Read both and compare every stored bit; a tied weight may be stored under either of its names.

    ``base`` is the base model's folder, for the checkpoint of an adapter.

    Raises:
        CheckpointError: A tensor differs, or is in only one of them.
    """
    expected = read_model(checkpoint, base=base)
    merged = huggingface.read(model).tensors
    missing = sorted(merged.keys() - expected.tensors.keys())
    left_out = expected.tensors.keys() - merged.keys() - expected.aliases.keys() - {alias for alias, _ in ties}
    if missing or left_out:
        raise CheckpointError(
            f"{model} and {expected.folder} do not hold the same tensors: {[*missing, *sorted(left_out)]}. "
            "Merge the checkpoint again."
        )
    shards = [_as_shard(model / name, expected) for name in huggingface.shard_names(model)]
    different = _different(shards, model, workers)
    if different:
        lines = (f"  {name} differs." for name in sorted(different))
        raise CheckpointError("\n".join([f"{model} does not equal {expected.folder}:", *lines]))


def _as_shard(path: Path, expected: Contents) -> PlannedShard:
    """Return a file of the model as the plan that would have written it."""
    planned = tuple(_as_planned(merged, expected.tensors[merged.name], path) for merged in huggingface.read_file(path))
    return PlannedShard(path.name, b"", planned, path.stat().st_size)


def _as_planned(merged: StoredTensor, source: StoredTensor, path: Path) -> PlannedTensor:
    if merged.shape != source.shape:
        raise CheckpointError(
            f"{merged.name} is {list(merged.shape)} in {path}, but {list(source.shape)} in the checkpoint. "
            "Merge the checkpoint again."
        )
    return PlannedTensor(source, merged.dtype, merged.pieces[0].record.offset if merged.pieces else 0)


def _different(shards: list[PlannedShard], model: Path, workers: int) -> set[str]:
    """Return the names of the tensors with a different byte."""
    found: set[str] = set()
    for shard, jobs in zip(shards, plan_jobs(shards), strict=True):
        with (model / shard.name).open("rb") as file:
            stream([_comparison(job, file.fileno(), found) for job in jobs], workers)
    return found


def _comparison(job: CopyJob, file: int, found: set[str]) -> StreamTask:
    def put(content: Block, offset: int, target: PlannedTensor) -> None:
        if os.pread(file, len(content), offset) != content.tobytes():
            found.add(target.tensor.name)

    return StreamTask(job, put, lambda _record, _crc: None)

"""Compare a merged model with its checkpoint, bit for bit in the model's type."""

import os
from pathlib import Path

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import Contents, StoredTensor
from shardmake.checkpoint.formats.hub_layout import in_hub_layout
from shardmake.checkpoint.formats.registry import read_model
from shardmake.consolidate.blocks import Block
from shardmake.consolidate.jobs import CopyJob, plan_jobs
from shardmake.consolidate.layout import PlannedShard, PlannedTensor
from shardmake.consolidate.loading import LoadingReport
from shardmake.consolidate.stream import StreamTask, stream
from shardmake.core.errors import CheckpointError
from shardmake.run.paths import MODEL_RECEIPT
from shardmake.run.receipts import MergeReceipt


def compare(
    model: Path,
    checkpoint: Path,
    loading: LoadingReport | None = None,
    *,
    base: Path | None = None,
    workers: int = 4,
    key: str | None = None,
) -> None:
    """Read both and compare every stored bit; a tied weight may be stored under either of its names.

    Args:
        model: The merged model's folder.
        checkpoint: The checkpoint.
        loading: What transformers reports of ``model``: its ties and the layout of its weights; None for neither.
        base: The base model's folder, for the checkpoint of an adapter.
        workers: Threads.
        key: Of several models in the checkpoint, the one to compare with. Default: the one in the model's receipt.

    Raises:
        CheckpointError: A tensor differs, or is in only one of them.
    """
    loading = loading or LoadingReport()
    expected = in_hub_layout(read_model(checkpoint, base=base, key=key or _merged_key(model)), loading.weights)
    merged = huggingface.read(model).tensors
    missing = sorted(merged.keys() - expected.tensors.keys() - set(loading.unloaded))
    left_out = expected.tensors.keys() - merged.keys() - expected.aliases.keys() - {alias for alias, _ in loading.ties}
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


def _merged_key(model: Path) -> str | None:
    path = model / MODEL_RECEIPT
    return MergeReceipt.read(path).key if path.is_file() else None


def _as_shard(path: Path, expected: Contents) -> PlannedShard:
    """Return a file of the model as the plan that would have written it."""
    held = ((merged, expected.tensors.get(merged.name)) for merged in huggingface.read_file(path))
    planned = tuple(_as_planned(merged, source, path) for merged, source in held if source is not None)
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
    def put(rows: Block, offset: int, stride: int, target: PlannedTensor) -> None:
        places = ((row, offset + index * stride) for index, row in enumerate(rows))
        if any(os.pread(file, len(row), at) != row.tobytes() for row, at in places):
            found.add(target.tensor.name)

    return StreamTask(job, put, lambda _record, _crc: None)

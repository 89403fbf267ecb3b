"""The consolidate stage: merge the checkpoint that the training receipt names."""

from pathlib import Path

from shardmake.checkpoint.formats.tensor_parallel import joined_parts
from shardmake.config.models import Run
from shardmake.consolidate.merge import consolidate
from shardmake.run.paths import RunDir
from shardmake.run.receipts import MergeReceipt, TrainingReceipt


def consolidate_run(run: Run, rundir: RunDir, *, workers: int) -> MergeReceipt:
    """Write `rundir.model` from the last checkpoint; raise `ShardmakeError` if the training is not finished."""
    trained = TrainingReceipt.read(rundir.train_receipt)
    with joined_parts(rundir.root / trained.checkpoint, rundir.train) as checkpoint:
        receipt = consolidate(
            checkpoint,
            rundir.model,
            base=base_folder(run),
            dtype=run.dtype,
            max_shard_size=run.max_shard_size,
            workers=workers,
            trust_remote_code=run.trust_remote_code,
        )
    assert receipt is not None, "the only task finishes"
    return receipt


def base_folder(run: Run) -> Path | None:
    """Return the base model's folder: the one in the config, or the hub model's in the local cache."""
    if Path(run.model).is_dir():
        return Path(run.model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(run.model, revision=run.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None

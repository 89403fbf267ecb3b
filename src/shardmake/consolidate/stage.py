"""The consolidate stage: merge the checkpoint that the training's receipt names."""

from collections.abc import Callable
from pathlib import Path

from shardmake.checkpoint.formats.tensor_parallel import readable
from shardmake.config.models import Run
from shardmake.consolidate.merge import MergeReceipt, consolidate
from shardmake.core.atomic import read_json
from shardmake.run.paths import RunDir


def consolidate_run(run: Run, rundir: RunDir, *, workers: int, tell: Callable[[str], None]) -> MergeReceipt:
    """Write `rundir.model` from the last checkpoint of a finished training; ShardmakeError if it is not finished."""
    trained = read_json(rundir.train_receipt, "shardmake train NAME")
    with readable(rundir.root / trained["checkpoint"], rundir.train, tell) as checkpoint:
        receipt = consolidate(
            checkpoint,
            rundir.model,
            base=base_folder(run),
            dtype=run.dtype,
            max_shard_size=run.max_shard_size,
            workers=workers,
            trust_remote_code=run.trust_remote_code,
            report=tell,
        )
    assert receipt is not None, "the only task finishes"
    return receipt


def base_folder(run: Run) -> Path | None:
    """The base model's folder: the one the config names, or the hub model's as the training downloaded it."""
    if Path(run.model).is_dir():
        return Path(run.model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(run.model, revision=run.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None

"""The consolidate stage: merge the checkpoint that the training receipt names.

DeepSpeed's own tool first joins the parts of tensor-parallel ranks.
"""

import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmake.checkpoint import store
from shardmake.config.methods import METHODS
from shardmake.config.models import Run
from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.source_checks import check_recorded
from shardmake.consolidate.stream import ShowProgress, no_progress, show_progress
from shardmake.core.errors import CheckpointError, ModelError
from shardmake.core.hub import cached_snapshot
from shardmake.core.process import NEUTRAL_FOLDER, absolute_python_path
from shardmake.core.temporary import temporary_folder
from shardmake.run.paths import RunDir
from shardmake.run.plan import planned_class
from shardmake.run.receipts import MergeReceipt, TrainingReceipt
from shardmake.run.sources import recorded_weights, refuse_changed


def consolidate_run(run: Run, rundir: RunDir, *, workers: int, progress: ShowProgress = no_progress) -> MergeReceipt:
    """Write `rundir.model` from the last checkpoint; raise `ShardmakeError` if the training is not finished."""
    trained = TrainingReceipt.read(rundir.train_receipt)
    base = base_folder(run)
    if base is None:
        raise ModelError(f"{run.model} is not in the hub's local cache. Run: shardmake fetch {rundir.root.name}")
    model_class = planned_class(run, rundir)
    if METHODS[run.method].has_adapters or (model_class and model_class.text_part):  # the model gets base weights
        refuse_changed(rundir, recorded_weights(rundir))
    with joined_parts(final_checkpoint(run, rundir, trained), rundir.train) as checkpoint:
        receipt = consolidate(
            checkpoint,
            rundir.model,
            base=base,
            dtype=run.dtype,
            max_shard_size=run.max_shard_size,
            workers=workers,
            trust_remote_code=run.trust_remote_code,
            model_class=model_class,
            progress=progress,
            overwrite=True,  # the folder belongs to the run, and Snakemake removes the receipt before a rerun
        )
    assert receipt is not None, "the only task finishes"
    return receipt


def merge_start(run: Run, source: Path, base: Path, out: Path) -> None:
    """Merge the checkpoint ``source``, of the model in ``base``, from which ``run`` starts, into the folder ``out``.

    If it is the start of the run's adapter, that is written alone.
    """
    options: dict[str, Any] = {"base": base, "adapter": bool(run.lora.adapter), "progress": show_progress}
    with joined_parts(source, out.parent) as checkpoint:
        consolidate(checkpoint, out, trust_remote_code=run.trust_remote_code, overwrite=True, **options)
    logger.info(
        "Training starts with the weights of %s. Its optimizer states, schedule and step are not taken over.", source
    )


def final_checkpoint(run: Run, rundir: RunDir, trained: TrainingReceipt) -> Path:
    """Return the checkpoint that becomes the model."""
    if run.final_checkpoint == "last":
        return rundir.root / trained.checkpoint
    found = [
        (record.eval_loss, record.step, path)
        for record, path in store.committed(rundir.checkpoints)
        if record.settings_digest == trained.settings_digest
        and record.eval_loss is not None
        and math.isfinite(record.eval_loss)
    ]
    if not found:
        raise CheckpointError(
            f"No checkpoint in {rundir.checkpoints} has an evaluation loss, which final_checkpoint: best needs. Set "
            "final_checkpoint: last."
        )
    loss, step, path = min(found)
    logger.info("The model is the checkpoint of step %d, with the lowest evaluation loss: %.4g.", step, loss)
    return path


def base_folder(run: Run) -> Path | None:
    """Return the base model's folder: the one in the config, or the hub model's in the local cache."""
    return Path(run.model) if Path(run.model).is_dir() else cached_snapshot(run.model, run.revision)


logger = logging.getLogger(__name__)

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
_PROCESSES = "2"


@contextmanager
def joined_parts(checkpoint: Path, scratch: Path) -> Iterator[Path]:
    """Yield ``checkpoint`` itself, or for tensor-parallel ranks a temporary universal checkpoint below ``scratch``.

    The conversion needs disk space for a second copy. Each of its two processes holds one rank's files in memory.
    """
    part = next(checkpoint.glob("*/mp_rank_01_model_states.pt"), None)
    if part is None:
        yield checkpoint
        return
    check_recorded([checkpoint], (), int(_PROCESSES))
    logger.info("Joining the parts of the tensor-parallel ranks with DeepSpeed's ds_to_universal.")
    with temporary_folder("universal", scratch) as folder:
        _convert(part.parent, folder / "checkpoint")
        yield folder / "checkpoint"


def _convert(source: Path, target: Path) -> None:
    """Run DeepSpeed's converter; if it fails, raise `CheckpointError` with the end of its output."""
    folders = ["--input_folder", str(source.absolute()), "--output_folder", str(target.absolute())]
    counts = ["--num_extract_workers", _PROCESSES, "--num_merge_workers", _PROCESSES]
    command = [sys.executable, "-P", "-m", CONVERTER, *folders, *counts]
    environment = {**os.environ, "PYTHONPATH": absolute_python_path(os.environ)}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, cwd=NEUTRAL_FOLDER
    )
    if done.returncode:
        raise CheckpointError(f"DeepSpeed could not convert {source}:\n{done.stderr[-2000:]}")

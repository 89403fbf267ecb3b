"""Merge a checkpoint into a verified Hugging Face folder."""

import logging
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from shardmake.checkpoint.formats.dtypes import Target, check_target
from shardmake.checkpoint.formats.huggingface import ADAPTER, MODEL
from shardmake.checkpoint.formats.registry import read_model
from shardmake.checkpoint.formats.unpickle import locate
from shardmake.consolidate.layout import PlannedShard, parse_size
from shardmake.consolidate.loading import LoadingReport
from shardmake.consolidate.merge_plan import MergePlan
from shardmake.consolidate.staging import (
    StagingLock,
    check_space,
    discard_on_error,
    remove_others,
    replace_folder,
    staging_folder,
)
from shardmake.consolidate.stream import check_record
from shardmake.consolidate.verify import verify_loaded
from shardmake.consolidate.writer import ShardWriter
from shardmake.core.errors import ConfigError
from shardmake.run.paths import MODEL_RECEIPT
from shardmake.run.receipts import MergeReceipt

logger = logging.getLogger(__name__)


def consolidate(
    checkpoint: Path,
    out: Path,
    *,
    base: Path | None = None,
    dtype: Target = "keep",
    adapter: bool = False,
    max_shard_size: str = "5GB",
    workers: int = 4,
    task: tuple[int, int] = (0, 1),
    trust_remote_code: bool = False,
) -> MergeReceipt | None:
    """Merge ``checkpoint`` into the Hugging Face folder ``out``, verify it and write its ``receipt.json``.

    ``out`` is replaced as a whole at the end. Until then the files are written to ``.NAME.partial`` beside it. A merge
    that was killed resumes there.

    Args:
        checkpoint: A run, a checkpoint, or DeepSpeed's or FSDP's inner folder; for a run, its newest checkpoint.
        out: The model's folder.
        base: The base model's folder, for config and tokenizer if the checkpoint has none beside it, and for the
            weights that a LoRA adapter is added to.
        dtype: Type of the weights; ``keep`` keeps the checkpoint's master weights unchanged.
        adapter: Write a LoRA adapter alone, as PEFT saves it, instead of the base model with the adapter.
        max_shard_size: Largest output file, such as ``5GB``.
        workers: Number of threads.
        task: ``(i, n)``: this is process i of n processes that merge together, on any nodes that share the folder of
            ``out``. Each writes every n-th file; the last one to end verifies and finishes.
        trust_remote_code: Allow model code beside the config to run in the check with transformers.

    Returns:
        The receipt; None while another task has yet to finish.

    Raises:
        ShardmakeError: The checkpoint cannot be merged, the disk is too small, or the verification failed; ``out`` is
            then unchanged.
    """
    check_target(dtype)
    if not 0 <= task[0] < task[1]:
        raise ConfigError(f"Invalid task index: {task[0]}. The {task[1]} tasks are numbered from 0 to {task[1] - 1}.")
    contents = read_model(checkpoint, dtype, base, adapter)
    for note in contents.notes:
        logger.warning("Skipped a newer checkpoint: %s", note)
    logger.info("Merging %s: %s, %d tensors.", contents.folder, contents.format, len(contents.tensors))
    staging = staging_folder(out)
    plan = MergePlan.of(contents, base, dtype, ADAPTER if adapter else MODEL, parse_size(max_shard_size))
    with StagingLock(staging, task) as lock, discard_on_error(staging), ThreadPoolExecutor(1) as pool:
        check_space(plan.shards, staging)
        skeleton = staging / f".skeleton-{task[0]}"
        check = pool.submit(plan.check_skeleton, skeleton, trust_remote_code)
        if not plan.matches_base():
            plan = plan.without_ties(check.result())
        writer = ShardWriter(plan.shards, staging)
        _check_adapter(plan.shards)
        if task[1] == 1:
            remove_others(plan.shards, staging, skeleton.name)
        writer.write(workers, task)
        loading = check.result()
        plan.check(loading)
        if task[1] > 1 and not (writer.is_complete() and lock.is_last()):
            logger.info("Task %d of %d has written its files; the last task finishes the merge.", *task)
            return None
        receipt = _finish(writer, plan, staging, loading, workers)
        replace_folder(staging, out)
    found = receipt.verification
    logger.info("Wrote %s: %s parameters, %s, verified.", out, f"{found.parameters:,}", found.dtype)
    return receipt


def _check_adapter(shards: list[PlannedShard]) -> None:
    """Check the CRC-32 of the adapter's factors, which are read in parts while the weights are copied."""
    updates = [planned.tensor.update for shard in shards for planned in shard.tensors if planned.tensor.update]
    factors = [factor for update in updates for factor in (update.a, update.b)]
    types = {piece.record: factor.dtype for factor in factors for piece in factor.pieces}
    for record, dtype in types.items():
        check_record(locate(record, dtype))


def _finish(writer: ShardWriter, plan: MergePlan, staging: Path, loading: LoadingReport, workers: int) -> MergeReceipt:
    """Check the source checksums, write the small files, verify the model and write its receipt."""
    checked = writer.check_sums()
    remove_others(plan.shards, staging)
    plan.write_small_files(staging)
    verification = verify_loaded(staging, loading, workers=workers)
    tools = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    receipt = MergeReceipt(
        checkpoint=str(plan.contents.folder),
        format=plan.contents.format,
        step=plan.contents.step,
        world_size=plan.contents.world_size,
        dtype=plan.dtype,
        source_bytes_checked=checked,
        versions={**plan.contents.versions, **tools},
        verification=verification,
    )
    receipt.write(staging / MODEL_RECEIPT)
    writer.remove_journals()
    return receipt

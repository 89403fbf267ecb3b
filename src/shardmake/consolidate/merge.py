"""Merge a checkpoint into a verified Hugging Face folder."""

import logging
import shutil
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Unpack

from shardmake.checkpoint.formats.torch_zip_reader import damaged_bytes
from shardmake.checkpoint.formats.unpickle import locate
from shardmake.consolidate import destination
from shardmake.consolidate.destination import StagingLock
from shardmake.consolidate.layout import PlannedShard
from shardmake.consolidate.loading import LoadingReport
from shardmake.consolidate.merge_plan import MergeOptions, MergePlan, plan_merge
from shardmake.consolidate.peft_check import PeftSample, compare_with_peft, merge_with_peft
from shardmake.consolidate.scan import scan
from shardmake.consolidate.source_checks import crc32_of
from shardmake.consolidate.stream import ShowProgress, no_progress
from shardmake.consolidate.verify import verify_loaded
from shardmake.consolidate.writer import ShardWriter
from shardmake.core.errors import ConfigError
from shardmake.core.temporary import temporary_folder
from shardmake.core.units import format_bytes, plural
from shardmake.run.model_class import ModelClass
from shardmake.run.paths import MODEL_RECEIPT
from shardmake.run.receipts import MergeReceipt

logger = logging.getLogger(__name__)


def consolidate(
    checkpoint: Path,
    out: Path,
    *,
    workers: int = 4,
    task: tuple[int, int] = (0, 1),
    trust_remote_code: bool = False,
    model_class: ModelClass | None = None,
    overwrite: bool = False,
    progress: ShowProgress = no_progress,
    **options: Unpack[MergeOptions],
) -> MergeReceipt | None:
    """Merge ``checkpoint`` into the Hugging Face folder ``out``, verify it and write its ``receipt.json``.

    Args:
        checkpoint: A run, a checkpoint, or DeepSpeed's or FSDP's inner folder; for a run, its newest checkpoint.
        out: The model's folder. An earlier result is replaced as a whole at the end. Until then the files are written
            to ``.NAME.partial`` beside it. A merge that was killed resumes there.
        workers: Number of threads.
        task: ``(i, n)``: process i of n on nodes that share the folder of ``out``. The last one to end finishes.
        trust_remote_code: Allow model code beside the config to run in the check with transformers.
        model_class: The class that was trained; None for the one that config.json names.
        overwrite: Replace an ``out`` that holds anything else than an earlier result of a merge.
        progress: Shows the bytes that were written and read back.
        options: Base model, type of the weights and more: the options of `plan_merge`.

    Returns:
        The receipt; None while another task has yet to finish.

    Raises:
        ShardmakeError: The merge is refused, the disk is too small, or the verification failed; ``out`` is unchanged.
    """
    if not 0 <= task[0] < task[1]:
        raise ConfigError(f"Invalid task index: {task[0]}. The {task[1]} tasks are numbered from 0 to {task[1] - 1}.")
    plan = plan_merge(checkpoint, **options)
    plan.check_destination(out, overwrite=overwrite)
    staging = destination.staging_folder(out)
    with StagingLock(staging, task) as lock, destination.discard_on_error(staging), ThreadPoolExecutor(1) as pool:
        destination.recover_replaced(out)
        destination.check_space(plan.shards, staging)
        skeleton = staging / f".skeleton-{task[0]}"
        plan, check = final_plan(plan, skeleton, trust_remote_code, model_class, pool)
        writer = ShardWriter(plan.shards, staging)
        _check_adapter(plan.shards)
        proof = pool.submit(merge_with_peft, plan.contents, plan.base)
        if task[1] == 1:
            destination.remove_others(plan.shards, staging, skeleton.name)
        with progress("Writing", writer.size(task)) as advance:
            writer.write(workers, task, advance)
        if check.done() or task[1] > 1:
            plan.check(check.result())
        if task[1] > 1 and not (writer.is_complete() and lock.is_last()):
            logger.info("Task %d of %d has written its files; the last task finishes the merge.", *task)
            return None
        destination.remove_others(plan.shards, staging, skeleton.name)
        receipt = _finish(writer, plan, check, workers, progress, proof, code=trust_remote_code)
        plan.check_destination(out, overwrite=overwrite)  # it may have changed during the copy
        destination.replace_folder(staging, out)
    _report(out, receipt)
    return receipt


def final_plan(
    plan: MergePlan, skeleton: Path, trust_remote_code: bool, model_class: ModelClass | None, pool: Executor
) -> tuple[MergePlan, Future[LoadingReport]]:
    """Return ``plan`` in the layout of the base model's files and without tied weights, and its check in progress."""
    check = pool.submit(plan.check_skeleton, skeleton, trust_remote_code, model_class)
    if plan.matches_base() and "untied" not in plan.allow:
        return plan, check
    found = check.result()
    fitted = plan.fitted(found)
    if fitted is not plan:
        check = pool.submit(fitted.check_skeleton, skeleton, trust_remote_code, model_class)
    final = fitted.check(check.result())
    if final.untied:
        check = pool.submit(final.check_skeleton, skeleton, trust_remote_code, model_class)
    return final, check


def preview(plan: MergePlan, out: Path, *, trust_remote_code: bool = False, overwrite: bool = False) -> str:
    """Return the files that the merge of ``plan`` would write, after every check that needs no weights.

    Nothing is written beside ``out``. Raise `ShardmakeError` if the merge would be refused.
    """
    plan.check_destination(out, overwrite=overwrite)
    with temporary_folder("preview") as scratch, ThreadPoolExecutor(1) as pool:
        plan, check = final_plan(plan, scratch / "skeleton", trust_remote_code, None, pool)
        plan.check(check.result())
        small = scratch / "small"
        changes = plan.write_small_files(small, trust_remote_code)
        files = {str(path.relative_to(small)): path.stat().st_size for path in small.rglob("*") if path.is_file()}
    files |= {shard.name: shard.size for shard in plan.shards}
    contents = plan.contents
    step = "" if contents.step is None else f", step {contents.step}"
    replaced = " (replaces what is there)" if out.is_dir() and any(out.iterdir()) else ""
    free = shutil.disk_usage(next(folder for folder in out.resolve().parents if folder.exists())).free
    parameters = sum(tensor.numel for tensor in plan.stored.values())
    lines = [
        f"Checkpoint: {contents.folder} ({contents.format}, {contents.world_size} ranks{step})",
        f"Base model: {plan.base or 'none'}",
        f"Model: {out}{replaced}, {parameters:,} parameters in {len(plan.stored)} tensors, type: {plan.dtype}",
        *(f"  {name:<40} {format_bytes(size):>10}" for name, size in sorted(files.items())),
        f"Space: {format_bytes(sum(files.values()))} needed, {format_bytes(free)} free",
        *changes,
        "Nothing was written.",
    ]
    return "\n".join(lines)


def _check_adapter(shards: list[PlannedShard]) -> None:
    """Check the CRC-32 of the adapter's tensors, which are read in parts while the weights are copied."""
    updates = [planned.tensor.update for shard in shards for planned in shard.tensors if planned.tensor.update]
    parts = [part for update in updates for part in update.parts.values()]
    types = {piece.record: part.dtype for part in parts for piece in part.pieces}
    for record in (locate(record, dtype) for record, dtype in types.items()):
        with record.path.open("rb") as file:
            crc = crc32_of(file.fileno(), record.offset, record.offset + record.size)
        if record.crc not in (None, crc):
            raise damaged_bytes(str(record.path), record.offset, record.size)


def _finish(
    writer: ShardWriter,
    plan: MergePlan,
    check: Future[LoadingReport],
    workers: int,
    progress: ShowProgress,
    proof: Future[list[PeftSample]],
    *,
    code: bool,
) -> MergeReceipt:
    """Check the source checksums, write the small files, verify the model and write its receipt.

    The files are read back while the check with transformers, which takes seconds, is in progress.
    """
    checked = writer.check_sums()
    for change in plan.write_small_files(writer.folder, code):
        logger.info(change)
    with progress("Verifying", writer.size()) as advance:
        found = scan(writer.folder, workers, advance)
    read_back = writer.check_read_back(found.tensors)
    loading = check.result()
    plan.check(loading)
    doubts = plan.doubts(loading)
    for doubt in doubts:
        logger.warning(doubt)
    compared = compare_with_peft(proof.result(), found.contents.tensors)
    verification = verify_loaded(writer.folder, loading, found, plan.accepted(loading))
    tools = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    receipt = MergeReceipt(
        checkpoint=str(plan.contents.folder),
        written_by=plan.contents.format,
        step=plan.contents.step,
        world_size=plan.contents.world_size,
        dtype=plan.dtype,
        source_bytes_checked=checked,
        output_bytes_compared=read_back,
        peft_modules=compared or None,
        recorded_files=plan.source.recorded_files,
        warnings=[*plan.source.warnings, *doubts],
        allowed=list(plan.allow),
        untied=plan.untied,
        key=plan.key,
        versions={**plan.contents.versions, **tools},
        verification=verification,
    )
    receipt.write(writer.folder / MODEL_RECEIPT)
    writer.remove_journals()
    return receipt


def _report(out: Path, receipt: MergeReceipt) -> None:
    found = receipt.verification
    size = f"{found.parameters:,} parameters, {found.describe_types()}"
    logger.info("Wrote %s: %s. Verified: every byte read back equals what was copied.", out, size)
    if receipt.peft_modules:
        compared = plural(receipt.peft_modules, "module")
        logger.info("PEFT merges %s, one of each shape and kind, to the same weights.", compared)
    for remark in found.remarks():
        logger.warning(remark)

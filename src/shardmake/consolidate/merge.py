"""Merge a checkpoint into a verified Hugging Face folder.

Of tied weights that a checkpoint holds under both names, one is dropped if the bytes are equal.
"""

import logging
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from shardmake.checkpoint.formats import huggingface, lora
from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target, check_target
from shardmake.checkpoint.formats.huggingface import ADAPTER, MODEL, WeightFiles
from shardmake.checkpoint.formats.registry import read_model
from shardmake.checkpoint.formats.unpickle import locate
from shardmake.consolidate.aux_files import config_folder, copy_aux_files
from shardmake.consolidate.layout import PlannedShard, index_json, plan_shards
from shardmake.consolidate.loading import LoadingReport, check_loading
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
from shardmake.core.atomic import write_json
from shardmake.core.errors import CheckpointError, ConfigError
from shardmake.core.units import parse_size
from shardmake.run.paths import MODEL_RECEIPT
from shardmake.run.receipts import MergeReceipt

logger = logging.getLogger(__name__)
_MAX_LINES = 20
_BLOCK = 1 << 20


@dataclass(frozen=True)
class MergePlan:
    """The checkpoint to merge, the base model's folder, and the output files."""

    contents: Contents
    base: Path | None
    dtype: Target
    files: WeightFiles
    max_shard_size: int
    stored: dict[str, StoredTensor]
    shards: list[PlannedShard]

    @classmethod
    def of(cls, contents: Contents, base: Path | None, dtype: Target, files: WeightFiles, size: int) -> "MergePlan":
        """Plan the merge of every tensor that is not an alias."""
        stored = {name: tensor for name, tensor in contents.tensors.items() if name not in contents.aliases}
        shards = plan_shards(stored.values(), dtype, size, files)
        if files == ADAPTER and len(shards) > 1:  # PEFT reads one file
            shards = plan_shards(stored.values(), dtype, sum(shard.size for shard in shards), files)
        return cls(contents, base, dtype, files, size, stored, shards)

    @property
    def sources(self) -> list[Path]:
        """Folders to search for the small files, in order: the shards' folder, its parent, the base model's folder."""
        folder = self.contents.folder
        return [folder, folder.parent, *([self.base] if self.base is not None else [])]

    @property
    def is_adapter(self) -> bool:
        """True if an adapter is written alone."""
        return self.files == ADAPTER

    def without_ties(self, loading: LoadingReport) -> "MergePlan":
        """Return the plan in which each weight that transformers reports as tied is stored once."""
        self.check(loading)
        stored = without_aliases(self.stored, loading.ties)
        if stored.keys() == self.stored.keys():
            return self
        shards = plan_shards(stored.values(), self.dtype, self.max_shard_size, self.files)
        return replace(self, stored=stored, shards=shards)

    def matches_base(self) -> bool:
        """Return True if the base model's files hold the same tensors, so that no tied weight is stored twice.

        Copying can then start before transformers, which takes seconds, has confirmed it.
        """
        if self.base is None or self.is_adapter or huggingface.find_weight_files(self.base) != MODEL:
            return False
        base = {name: tensor.shape for name, tensor in huggingface.read(self.base).tensors.items()}
        return base == {name: tensor.shape for name, tensor in self.stored.items()}

    def check_skeleton(self, skeleton: Path, trust_remote_code: bool) -> LoadingReport:
        """Load files with the headers of the merged model and without its bytes, and report what transformers finds.

        This detects a checkpoint of another model before any weight is copied. The verification at the end sees the
        same headers and need not load them again.
        """
        shutil.rmtree(skeleton, ignore_errors=True)
        try:
            self.write_small_files(skeleton)
            for shard in self.shards:
                with (skeleton / shard.name).open("wb") as file:
                    file.truncate(shard.size)
                    file.write(shard.header)
            base = config_folder(self.sources) if self.is_adapter else None
            return check_loading(skeleton, trust_remote_code, base)
        finally:
            shutil.rmtree(skeleton, ignore_errors=True)

    def check(self, loading: LoadingReport) -> None:
        """Raise `CheckpointError` if transformers reports a problem."""
        problems = loading.problems()
        if problems:
            rest = len(problems) - _MAX_LINES
            more = [f"... and {rest} more"] if rest > 0 else []
            lines = (f"  {line}." for line in [*problems[:_MAX_LINES], *more])
            headline = f"{self.contents.folder} does not fit the model's config.json:"
            raise CheckpointError("\n".join([headline, *lines]))

    def write_small_files(self, folder: Path) -> None:
        """Write config, tokenizer, index and the like."""
        dtypes = (planned.dtype for shard in self.shards for planned in shard.tensors)
        adapter = lora.config_file(self.contents.folder) if self.is_adapter else None
        copy_aux_files(self.sources, folder, dtypes, adapter)
        if len(self.shards) > 1:
            write_json(folder / self.files.index, index_json(self.shards))


def without_aliases(tensors: dict[str, StoredTensor], ties: Iterable[tuple[str, str]]) -> dict[str, StoredTensor]:
    """Return ``tensors`` without those that the model ties to another stored tensor.

    Args:
        tensors: Tensors by name.
        ties: Name of each tied weight and of the weight that it shares.

    Raises:
        CheckpointError: Two tied weights are not equal, so that dropping one would lose it.
    """
    aliases = {alias: owner for alias, owner in ties if alias in tensors and owner in tensors and alias != owner}
    for alias, owner in aliases.items():
        if not have_same_bytes(tensors[alias], tensors[owner]):
            raise CheckpointError(
                f"The model's config ties {alias} to {owner}, but the checkpoint holds different values for them. Set "
                "tie_word_embeddings to false in the config.json to keep both."
            )
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}


def have_same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two tensors hold the same bytes; tensors with different pieces count as different."""
    if (one.dtype, one.shape, len(one.pieces)) != (other.dtype, other.shape, len(other.pieces)):
        return False
    pairs = zip(_ordered(one), _ordered(other), strict=True)
    return all(_is_same_piece(a, b, one.dtype) for a, b in pairs)


def _ordered(tensor: StoredTensor) -> list[Piece]:
    return sorted(tensor.pieces, key=lambda piece: piece.at)


def _is_same_piece(one: Piece, other: Piece, dtype: str) -> bool:
    if (one.at, one.count, one.runs, one.stride) != (other.at, other.count, other.runs, other.stride):
        return False
    places = [(locate(piece.record, dtype), piece.start) for piece in (one, other)]
    files = [os.open(record.path, os.O_RDONLY) for record, _ in places]
    try:
        size = one.numel * ITEM_SIZE[dtype]
        return all(
            len({os.pread(file, min(_BLOCK, size - at), record.offset + start + at)
                 for file, (record, start) in zip(files, places, strict=True)}) == 1
            for at in range(0, size, _BLOCK)
        )  # fmt: skip
    finally:
        for file in files:
            os.close(file)


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

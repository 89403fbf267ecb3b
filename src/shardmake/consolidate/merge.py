"""Merge a checkpoint into a verified Hugging Face folder.

Of tied weights that a checkpoint holds under both names, one is dropped if the bytes are equal.
"""

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from shardmake.checkpoint.formats import huggingface, lora
from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target, check_target
from shardmake.checkpoint.formats.hub_layout import HubWeight, in_hub_layout
from shardmake.checkpoint.formats.huggingface import ADAPTER, MODEL, WeightFiles
from shardmake.checkpoint.formats.registry import read_checkpoint, read_model
from shardmake.checkpoint.formats.unpickle import locate
from shardmake.consolidate.allowed import Allowed
from shardmake.consolidate.aux_files import config_folder, copy_aux_files
from shardmake.consolidate.destination import check_destination, checkpoint_folders, staging_folder
from shardmake.consolidate.layout import PlannedShard, index_json, plan_shards
from shardmake.consolidate.loading import LoadingReport, check_loading
from shardmake.consolidate.progress import ShowProgress, no_progress
from shardmake.consolidate.source_checks import SourceReport, check_source
from shardmake.consolidate.staging import (
    StagingLock,
    check_space,
    discard_on_error,
    recover_replaced,
    remove_others,
    replace_folder,
)
from shardmake.consolidate.stream import check_record
from shardmake.consolidate.verify import scan, verify_loaded
from shardmake.consolidate.writer import ShardWriter
from shardmake.core.atomic import write_json
from shardmake.core.errors import CheckpointError, ConfigError
from shardmake.core.units import parse_size
from shardmake.run.model_class import ModelClass
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
    raw: bool = False
    """Write weights alone, under the checkpoint's own names, without a check with transformers."""
    source: SourceReport = field(default_factory=SourceReport)
    allow: tuple[Allowed, ...] = ()
    key: str | None = None

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
        """Folders to search for the config, in order: those of the checkpoint, the base model's folder."""
        return [*checkpoint_folders(self.contents), *([self.base] if self.base is not None else [])]

    @property
    def is_adapter(self) -> bool:
        """True if an adapter is written alone."""
        return self.files == ADAPTER

    def in_layout(self, weights: Iterable[HubWeight]) -> "MergePlan":
        """Return the plan that writes ``weights`` in place of the parameters that hold them."""
        contents = in_hub_layout(self.contents, weights)
        return self if contents.tensors.keys() == self.contents.tensors.keys() else self._of(contents)

    def _of(self, contents: Contents) -> "MergePlan":
        """Return the plan of the same merge with other tensors."""
        plan = MergePlan.of(contents, self.base, self.dtype, self.files, self.max_shard_size)
        return replace(plan, raw=self.raw, source=self.source, allow=self.allow, key=self.key)

    def with_unloaded(self, names: Iterable[str]) -> "MergePlan":
        """Return the plan that also copies the base model's weights ``names``, which its class does not load."""
        missing = [name for name in names if name not in self.contents.tensors]
        if self.is_adapter or self.base_weights is None or not missing:
            return self
        held = huggingface.read(self.base_weights).tensors
        return self._of(
            self.contents.with_tensors([*self.contents.tensors.values(), *(held[name] for name in missing)])
        )

    def without_ties(self, loading: LoadingReport) -> "MergePlan":
        """Return the plan in which each weight that transformers reports as tied is stored once."""
        self.check(loading)
        stored = without_aliases(self.stored, loading.ties)
        if stored.keys() == self.stored.keys():
            return self
        shards = plan_shards(stored.values(), self.dtype, self.max_shard_size, self.files)
        return replace(self, stored=stored, shards=shards)

    @property
    def base_weights(self) -> Path | None:
        """The base model's folder if its weights are there."""
        return self.base if self.base is not None and huggingface.recognise(self.base) else None

    def matches_base(self) -> bool:
        """Return True if the base model's files hold the same tensors, so that no tied weight is stored twice.

        Copying can then start before transformers, which takes seconds, has confirmed it.
        """
        if self.base is None or self.is_adapter or huggingface.find_weight_files(self.base) != MODEL:
            return False
        if not all((self.base / name).is_file() for name in huggingface.shard_names(self.base)):
            return False  # only the small files were fetched
        base = {name: tensor.shape for name, tensor in huggingface.read(self.base).tensors.items()}
        return base == {name: tensor.shape for name, tensor in self.stored.items()}

    def check_skeleton(self, skeleton: Path, trust_remote_code: bool, model_class: ModelClass | None) -> LoadingReport:
        """Load files with the headers of the merged model and without its bytes, and report what transformers finds.

        This detects a checkpoint of another model before any weight is copied. The verification at the end sees the
        same headers and need not load them again.
        """
        if self.raw:
            return LoadingReport(ties=tuple(sorted(self.contents.aliases.items())))
        shutil.rmtree(skeleton, ignore_errors=True)
        try:
            self.write_small_files(skeleton, trust_remote_code)
            for shard in self.shards:
                with (skeleton / shard.name).open("wb") as file:
                    file.truncate(shard.size)
                    file.write(shard.header)
            base = config_folder(self.sources) if self.is_adapter else None
            return check_loading(skeleton, trust_remote_code, base, self.base_weights, model_class)
        finally:
            shutil.rmtree(skeleton, ignore_errors=True)

    def check(self, loading: LoadingReport) -> None:
        """Raise `CheckpointError` if transformers reports a problem."""
        problems = loading.problems(self.accepted(loading))
        if problems:
            if set(loading.unexpected) - set(self.accepted(loading)):
                problems.insert(0, "To keep tensors that the class does not have, add --allow unexpected")
            rest = len(problems) - _MAX_LINES
            more = [f"... and {rest} more"] if rest > 0 else []
            lines = (f"  {line}." for line in [*problems[:_MAX_LINES], *more])
            headline = f"{self.contents.folder} does not fit the model's config.json:"
            raise CheckpointError("\n".join([headline, *lines]))

    def accepted(self, loading: LoadingReport) -> Collection[str]:
        """Return the tensors that are kept although the model's class does not have them."""
        return loading.unexpected if "unexpected" in self.allow else ()

    def write_small_files(self, folder: Path, code: bool) -> list[str]:
        """Write config, tokenizer, index and the like, with ``code`` the base model's code; return what is not its own.

        Raises:
            ModelError: There is no config.json, or a file cannot be copied.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if len(self.shards) > 1:
            write_json(folder / self.files.index, index_json(self.shards))
        if self.raw:
            return []
        dtypes = (planned.dtype for shard in self.shards for planned in shard.tensors)
        adapter = lora.config_file(self.contents.folder) if self.is_adapter else None
        trained = checkpoint_folders(self.contents)
        return copy_aux_files(self.base, trained, folder, dtypes, adapter=adapter, code=code)

    def check_destination(self, out: Path, *, overwrite: bool) -> None:
        """Raise `ConfigError` if ``out`` must not be replaced; see `destination.check_destination`."""
        protected = dict.fromkeys(checkpoint_folders(self.contents), "the checkpoint")
        if self.base is not None:
            protected[self.base] = "the base model"
        check_destination(out, protected, overwrite=overwrite)


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
    model_class: ModelClass | None = None,
    overwrite: bool = False,
    raw: bool = False,
    allow: Collection[Allowed] = (),
    key: str | None = None,
    progress: ShowProgress = no_progress,
) -> MergeReceipt | None:
    """Merge ``checkpoint`` into the Hugging Face folder ``out``, verify it and write its ``receipt.json``.

    An ``out`` that holds an earlier result is replaced as a whole at the end. Until then the files are written to
    ``.NAME.partial`` beside it. A merge that was killed resumes there.

    Args:
        checkpoint: A run, a checkpoint, or DeepSpeed's or FSDP's inner folder; for a run, its newest checkpoint.
        out: The model's folder.
        base: The base model's folder, for the tokenizer and other small files, for the config if the checkpoint has
            none, and for the weights that a LoRA adapter is added to.
        dtype: Type of the weights; ``keep`` keeps the checkpoint's master weights unchanged.
        adapter: Write a LoRA adapter alone, as PEFT saves it, instead of the base model with the adapter.
        max_shard_size: Largest output file, such as ``5GB``.
        workers: Number of threads.
        task: ``(i, n)``: this is process i of n processes that merge together, on any nodes that share the folder of
            ``out``. Each writes every n-th file; the last one to end verifies and finishes.
        trust_remote_code: Allow model code beside the config to run in the check with transformers.
        model_class: The class that was trained; None for the one that config.json names.
        overwrite: Replace an ``out`` that holds anything else than an earlier result of a merge.
        raw: Write the weights alone, under the checkpoint's own names. Nothing else than the weights is checked.
        allow: ``steps``: merge although the optimizer counted other steps than the training, because it was started
            again. ``unexpected``: keep tensors that the model's class does not have, such as a value head.
        key: Of several models in a checkpoint of DCP, the one to merge: the levels above its weights, joined by dots.
        progress: Shows the bytes that were written and read back.

    Returns:
        The receipt; None while another task has yet to finish.

    Raises:
        ShardmakeError: The checkpoint cannot be merged, ``out`` must not be replaced, the disk is too small, or the
            verification failed; ``out`` is then unchanged.
    """
    if not 0 <= task[0] < task[1]:
        raise ConfigError(f"Invalid task index: {task[0]}. The {task[1]} tasks are numbered from 0 to {task[1] - 1}.")
    plan = plan_merge(
        checkpoint, base, dtype, adapter=adapter, max_shard_size=max_shard_size, raw=raw, allow=allow, key=key
    )
    plan.check_destination(out, overwrite=overwrite)
    staging = staging_folder(out)
    with StagingLock(staging, task) as lock, discard_on_error(staging), ThreadPoolExecutor(1) as pool:
        recover_replaced(out)
        check_space(plan.shards, staging)
        skeleton = staging / f".skeleton-{task[0]}"
        plan, check = final_plan(plan, skeleton, trust_remote_code, model_class, pool)
        writer = ShardWriter(plan.shards, staging)
        _check_adapter(plan.shards)
        if task[1] == 1:
            remove_others(plan.shards, staging, skeleton.name)
        with progress("Writing", writer.size(task)) as advance:
            writer.write(workers, task, advance)
        if check.done() or task[1] > 1:
            plan.check(check.result())
        if task[1] > 1 and not (writer.is_complete() and lock.is_last()):
            logger.info("Task %d of %d has written its files; the last task finishes the merge.", *task)
            return None
        remove_others(plan.shards, staging, skeleton.name)
        with progress("Verifying", writer.size()) as advance:
            receipt = _finish(writer, plan, staging, check, workers, code=trust_remote_code, advance=advance)
        plan.check_destination(out, overwrite=overwrite)  # it may have changed during the copy
        replace_folder(staging, out)
    found = receipt.verification
    logger.info(
        "Wrote %s: %s parameters, %s. Verified: every byte read back equals what was copied.",
        out,
        f"{found.parameters:,}",
        found.describe_types(),
    )
    for remark in found.remarks():
        logger.warning(remark)
    return receipt


def plan_merge(
    checkpoint: Path,
    base: Path | None = None,
    dtype: Target = "keep",
    *,
    adapter: bool = False,
    max_shard_size: str = "5GB",
    raw: bool = False,
    allow: Collection[Allowed] = (),
    key: str | None = None,
) -> MergePlan:
    """Read the checkpoint and plan the merge that `consolidate` does with these arguments.

    Raises:
        ShardmakeError: The checkpoint cannot be merged, or the arguments contradict each other.
    """
    check_target(dtype)
    size = parse_size(max_shard_size)
    if raw and (base is not None or adapter):
        raise ConfigError("A raw merge writes the checkpoint's own weights. Leave out --base and --adapter, or --raw.")
    contents = read_checkpoint(checkpoint, dtype, key) if raw else read_model(checkpoint, dtype, base, adapter, key)
    for note in contents.notes:
        logger.warning("Skipped a newer checkpoint: %s", note)
    source = check_source(contents, allow)
    contents = replace(contents, step=source.step if contents.step is None else contents.step)
    step = "" if contents.step is None else f", step {contents.step}"
    logger.info("Merging %s: %s%s, %d tensors.", contents.folder, contents.format, step, len(contents.tensors))
    for warning in source.warnings:
        logger.warning(warning)
    if base is None and not raw:
        logger.warning(
            "No base model is named: the model gets no tokenizer, generation config or licence. Name one with --base."
        )
    plan = MergePlan.of(contents, base, dtype, ADAPTER if adapter else MODEL, size)
    return replace(plan, raw=raw, source=source, allow=tuple(allow), key=key)


def final_plan(
    plan: MergePlan, skeleton: Path, trust_remote_code: bool, model_class: ModelClass | None, pool: Executor
) -> tuple[MergePlan, Future[LoadingReport]]:
    """Return ``plan`` in the layout of the base model's files and without tied weights, and its check in progress."""
    check = pool.submit(plan.check_skeleton, skeleton, trust_remote_code, model_class)
    if plan.matches_base():
        return plan, check
    in_layout = plan.in_layout(check.result().weights).with_unloaded(check.result().unloaded)
    if in_layout is not plan:
        check = pool.submit(in_layout.check_skeleton, skeleton, trust_remote_code, model_class)
    return in_layout.without_ties(check.result()), check


def _check_adapter(shards: list[PlannedShard]) -> None:
    """Check the CRC-32 of the adapter's factors, which are read in parts while the weights are copied."""
    updates = [planned.tensor.update for shard in shards for planned in shard.tensors if planned.tensor.update]
    factors = [factor for update in updates for factor in (update.a, update.b)]
    types = {piece.record: factor.dtype for factor in factors for piece in factor.pieces}
    for record, dtype in types.items():
        check_record(locate(record, dtype))


def _finish(
    writer: ShardWriter,
    plan: MergePlan,
    staging: Path,
    check: Future[LoadingReport],
    workers: int,
    *,
    code: bool,
    advance: Callable[[int], None],
) -> MergeReceipt:
    """Check the source checksums, write the small files, verify the model and write its receipt.

    The files are read back while the check with transformers, which takes seconds, is in progress.
    """
    checked = writer.check_sums()
    for change in plan.write_small_files(staging, code):
        logger.info(change)
    scans = scan(staging, workers, advance)
    read_back = writer.check_read_back({found.name: found.tensors for found in scans})
    loading = check.result()
    plan.check(loading)
    verification = verify_loaded(staging, loading, scans, plan.accepted(loading))
    tools = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    receipt = MergeReceipt(
        checkpoint=str(plan.contents.folder),
        format=plan.contents.format,
        step=plan.contents.step,
        world_size=plan.contents.world_size,
        dtype=plan.dtype,
        source_bytes_checked=checked,
        output_bytes_compared=read_back,
        recorded_files=plan.source.recorded_files,
        warnings=list(plan.source.warnings),
        allowed=list(plan.allow),
        key=plan.key,
        versions={**plan.contents.versions, **tools},
        verification=verification,
    )
    receipt.write(staging / MODEL_RECEIPT)
    writer.remove_journals()
    return receipt

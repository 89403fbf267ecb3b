"""From a checkpoint to a verified Hugging Face folder: the order of the steps, and what is left if one fails."""

import ctypes
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, Field

from shardmake.checkpoint.formats import huggingface as hf_folder
from shardmake.checkpoint.formats import lora
from shardmake.checkpoint.formats.contents import Contents, Tensor
from shardmake.checkpoint.formats.dtypes import Target, check_target
from shardmake.checkpoint.formats.naming import ADAPTER, ADAPTER_BIN, MODEL, MODEL_BIN, Format, Naming
from shardmake.checkpoint.formats.registry import read_model
from shardmake.checkpoint.formats.unpickle import unbox
from shardmake.consolidate.aux_files import config_folder, copy_companions, folders
from shardmake.consolidate.layout import PlannedShard, index_json, parse_size, plan_shards
from shardmake.consolidate.loading import Loading, try_loading
from shardmake.consolidate.stream import check_record
from shardmake.consolidate.tied_weights import without_aliases
from shardmake.consolidate.verify import Verification, verify_loaded
from shardmake.consolidate.writer import ShardWriter
from shardmake.core.atomic import fsync_directory, write_json
from shardmake.core.errors import ShardmakeError

Report = Callable[[str], None]


class MergeReceipt(BaseModel):
    """``model/receipt.json``: where the model came from, and what was checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    checkpoint: str = Field(description="The folder with the merged files.")
    format: str = Field(description="What wrote them.")
    step: int | None = Field(description="Training step, where the checkpoint says it.")
    world_size: int = Field(description="Ranks that wrote it.")
    dtype: Target = Field(description="The type that was asked for.")
    source_bytes_checked: int = Field(description="Source bytes whose CRC-32 was recomputed and agreed.")
    versions: dict[str, str] = Field(description="What wrote the checkpoint, and what merged it.")
    verification: Verification = Field(description="What was checked in the result.")


def consolidate(
    checkpoint: Path,
    out: Path,
    *,
    base: Path | None = None,
    dtype: Target = "keep",
    format: Format = "safetensors",
    adapter: bool = False,
    max_shard_size: str = "5GB",
    workers: int = 4,
    task: tuple[int, int] = (0, 1),
    trust_remote_code: bool = False,
    report: Report = lambda _: None,
) -> MergeReceipt | None:
    """Merge ``checkpoint`` into the Hugging Face folder ``out``, verified, with its receipt in ``receipt.json``.

    ``out`` is replaced as a whole at the end; until then the files grow in ``.NAME.partial`` beside it, where a merge
    that was killed goes on.

    Args:
        checkpoint: A run, a checkpoint, or DeepSpeed's or FSDP's inner folder; in a run, its newest one is taken.
        out: The model's folder.
        base: The base model's folder, for the config and tokenizer where the checkpoint has none beside it, and for
            the weights that a LoRA adapter is added to.
        dtype: Type of the weights; ``keep``: the checkpoint's master weights as they are.
        format: ``safetensors``, or ``bin`` for what ``torch.load`` reads.
        adapter: Write a LoRA adapter alone, as PEFT saves it, instead of the base model with it.
        max_shard_size: Largest output file, such as ``5GB``.
        workers: Threads.
        task: ``(i, n)``: this is the i-th of n processes, on any nodes that share the folder of ``out``, which do this
            together. Each writes every n-th file; the one that ends last verifies and finishes.
        trust_remote_code: Whether model code beside the config may run in the check with transformers.
        report: Takes lines for people about what is being done.

    Returns:
        The receipt; None where another task has yet to finish.

    Raises:
        ShardmakeError: the checkpoint cannot be merged, the disk is too small, or the result is not what it should be;
            ``out`` is then as it was before.
    """
    check_target(dtype)
    _check_task(task)
    contents = read_model(checkpoint, dtype, base, adapter)
    for note in contents.notes:
        report(f"Passed over a newer checkpoint: {note}")
    report(f"Merging {contents.folder}: {contents.format}, {len(contents.tensors)} tensors.")
    staging = staging_folder(out)
    plan = _Plan.of(contents, base, dtype, _naming(format, adapter), parse_size(max_shard_size))
    with _Lock(staging, task) as lock, _nothing_left_on_error(staging), ThreadPoolExecutor(1) as pool:
        _check_space(plan.shards, staging)
        skeleton = staging / f".skeleton-{task[0]}"
        asked = pool.submit(plan.ask, skeleton, trust_remote_code)
        if not plan.is_like_base():
            plan = plan.without_ties(asked.result())
        writer = ShardWriter(plan.shards, staging)
        _check_adapter(plan.shards)
        if task[1] == 1:
            _remove_others(plan.shards, staging, skeleton.name)
        writer.write(workers, task)
        loading = asked.result()
        plan.check(loading)
        if task[1] > 1 and not (writer.is_complete() and lock.is_last()):
            report(f"Task {task[0]} of {task[1]} has written its files; the last one finishes.")
            return None
        receipt = _finish(writer, plan, staging, loading, workers)
        _replace(staging, out)
    report(f"Wrote {out}: {receipt.verification.parameters:,} parameters, {receipt.verification.dtype}, verified.")
    return receipt


@dataclass(frozen=True)
class _Plan:
    """What is merged, from where, into which files."""

    contents: Contents
    base: Path | None
    dtype: Target
    naming: Naming
    size: int
    stored: dict[str, Tensor]
    shards: list[PlannedShard]

    @classmethod
    def of(cls, contents: Contents, base: Path | None, dtype: Target, naming: Naming, size: int) -> "_Plan":
        stored = {name: tensor for name, tensor in contents.tensors.items() if name not in contents.aliases}
        shards = plan_shards(stored.values(), dtype, size, naming)
        if naming.stem == ADAPTER.stem and len(shards) > 1:  # PEFT reads one file
            shards = plan_shards(stored.values(), dtype, sum(shard.size for shard in shards), naming)
        return cls(contents, base, dtype, naming, size, stored, shards)

    @property
    def sources(self) -> list[Path]:
        return folders(self.contents.folder, self.base)

    @property
    def is_adapter(self) -> bool:
        return self.naming.stem == ADAPTER.stem

    def without_ties(self, loading: Loading) -> "_Plan":
        """The plan once transformers has said what is tied; each is stored once."""
        self.check(loading)
        stored = without_aliases(self.stored, loading.ties)
        if stored.keys() == self.stored.keys():
            return self
        return replace(self, stored=stored, shards=plan_shards(stored.values(), self.dtype, self.size, self.naming))

    def is_like_base(self) -> bool:
        """Whether the base model's files hold the same tensors, so that the merge fits and no tie is stored twice.

        Then the bytes need not wait for transformers, which takes seconds to say the same.
        """
        if self.base is None or self.is_adapter or hf_folder.naming_of(self.base) != MODEL:
            return False
        base = {name: tensor.shape for name, tensor in hf_folder.read(self.base).tensors.items()}
        return base == {name: tensor.shape for name, tensor in self.stored.items()}

    def ask(self, skeleton: Path, trust_remote_code: bool) -> Loading:
        """What transformers says of the merged model, from files with its headers and no bytes.

        So a checkpoint of another model is found without its weights, and the verification at the end, which finds
        the same headers, need not load them again.
        """
        shutil.rmtree(skeleton, ignore_errors=True)
        try:
            self.write_small_files(skeleton)
            for shard in self.shards:
                with (skeleton / shard.name).open("wb") as file:
                    file.truncate(shard.size)
                    file.write(shard.header)
                    for offset, content in shard.closing({}):
                        file.seek(offset)
                        file.write(content)
            base = config_folder(self.sources) if self.is_adapter else None
            return try_loading(skeleton, trust_remote_code, base)
        finally:
            shutil.rmtree(skeleton, ignore_errors=True)

    def check(self, loading: Loading) -> None:
        """A `ShardmakeError` if transformers misses anything."""
        problems = loading.problems()
        if problems:
            more = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
            lines = (f"  {line}." for line in [*problems[:20], *more])
            raise ShardmakeError("\n".join([f"{self.contents.folder} does not fit the model's config.json:", *lines]))

    def write_small_files(self, folder: Path) -> None:
        """Config, tokenizer, index and the like."""
        dtypes = (entry.dtype for shard in self.shards for entry in shard.entries)
        adapter = lora.config_file(self.contents.folder) if self.is_adapter else None
        copy_companions(self.sources, folder, dtypes, adapter)
        if len(self.shards) > 1:
            write_json(folder / self.naming.index, index_json(self.shards))


def _naming(format: Format, adapter: bool) -> Naming:
    known = {"safetensors": (MODEL, ADAPTER), "bin": (MODEL_BIN, ADAPTER_BIN)}
    if format not in known:
        raise ShardmakeError(f"format {format!r} is not known; use one of {', '.join(known)}.")
    return known[format][adapter]


def _check_task(task: tuple[int, int]) -> None:
    index, count = task
    if not 0 <= index < count:
        raise ShardmakeError(f"Task {index} of {count} tasks: tasks are numbered from 0 to {count - 1}.")


def staging_folder(out: Path) -> Path:
    """Where the files of ``out`` grow."""
    return out.resolve().parent / f".{out.resolve().name}.partial"


def _check_adapter(shards: list[PlannedShard]) -> None:
    """The adapter's factors are read piecemeal while the weights stream, so their checksums are looked at before."""
    updates = [entry.tensor.update for shard in shards for entry in shard.entries if entry.tensor.update is not None]
    factors = [factor for update in updates for factor in (update.a, update.b)]
    types = {piece.record: factor.dtype for factor in factors for piece in factor.pieces}
    for record, dtype in types.items():
        check_record(unbox(record, dtype))


def _finish(writer: ShardWriter, plan: _Plan, staging: Path, loading: Loading, workers: int) -> MergeReceipt:
    """Once all files are whole: check the sources' sums, add the small files, verify, and say so."""
    checked = writer.check_sums()
    _remove_others(plan.shards, staging)
    plan.write_small_files(staging)
    verification = verify_loaded(staging, loading, workers=workers)
    receipt = _receipt(plan.contents, plan.dtype, checked, verification)
    write_json(staging / "receipt.json", receipt.model_dump(mode="json"))
    writer.remove_journals()
    return receipt


def _remove_others(shards: list[PlannedShard], staging: Path, *keep: str) -> None:
    """What a killed merge, perhaps with another plan, left in the staging folder."""
    wanted = {name for shard in shards for name in (shard.name, f".{shard.name}.done")} | {".lock", *keep}
    for path in staging.iterdir():
        if path.name not in wanted:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_space(shards: list[PlannedShard], staging: Path) -> None:
    files = [staging / name for shard in shards for name in (shard.name, f".{shard.name}.tmp")]
    there = sum(path.stat().st_blocks * 512 for path in files if path.is_file())
    needed = sum(shard.size for shard in shards) - there
    state = os.statvfs(staging)
    free = state.f_bavail * state.f_frsize
    if needed > free:
        raise ShardmakeError(
            f"The merged model needs {needed / 2**30:.1f} GiB in {staging.parent}, where {free / 2**30:.1f} GiB are "
            "free. Make room, choose another folder, or take --dtype bf16."
        )


def _receipt(contents: Contents, dtype: Target, checked: int, verification: Verification) -> MergeReceipt:
    from importlib.metadata import version

    tools = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    return MergeReceipt(
        checkpoint=str(contents.folder),
        format=contents.format,
        step=contents.step,
        world_size=contents.world_size,
        dtype=dtype,
        source_bytes_checked=checked,
        versions={**contents.versions, **tools},
        verification=verification,
    )


class _Lock:
    """Keeps a second merge into the same folder away; tasks of one merge share it until the last one finishes."""

    def __init__(self, staging: Path, task: tuple[int, int]) -> None:
        self._staging, self._task = staging, task

    def __enter__(self) -> "_Lock":
        self._staging.mkdir(parents=True, exist_ok=True)
        index, count = self._task
        with ExitStack() as opened:
            self._file = opened.enter_context((self._staging / ".lock").open("w"))
            self._take(self._file, fcntl.LOCK_EX if count == 1 else fcntl.LOCK_SH)
            if count > 1:
                self._take(opened.enter_context((self._staging / f".task-{index}").open("w")), fcntl.LOCK_EX)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_there() and all(path.name.startswith((".lock", ".task-")) for path in self._staging.iterdir()):
            shutil.rmtree(self._staging, ignore_errors=True)
        self._opened.close()

    def _take(self, file: IO[str], kind: int) -> None:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ShardmakeError(f"Another merge writes {self._staging}. Wait for it, or stop it.") from None

    def is_last(self) -> bool:
        """Wait for the other tasks, and say whether none of them has finished the merge meanwhile."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return self._is_there()

    def _is_there(self) -> bool:
        """Whether the folder is still the one that was locked."""
        path = self._staging / ".lock"
        return path.is_file() and os.path.samestat(path.stat(), os.fstat(self._file.fileno()))


@contextmanager
def _nothing_left_on_error(staging: Path) -> Iterator[None]:
    """Whatever is wrong with the checkpoint or the disk, half a model must not stay; a kill leaves it for the next."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise ShardmakeError(f"Writing {staging} failed: {error}. Nothing was kept; mend it and run again.") from error
    except ShardmakeError:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _replace(staging: Path, out: Path) -> None:
    """Put the finished folder in the place of ``out``; a reader sees the old folder or the new one, never a mix."""
    out = out.resolve()
    (staging / ".lock").unlink()
    for path in staging.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    fsync_directory(staging)
    if not out.exists() or not any(out.iterdir()):
        staging.rename(out)  # over an empty folder, too
    elif not _exchange(staging, out):
        old = out.parent / f".{out.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        staging.rename(out)
        shutil.rmtree(old)
    fsync_directory(out.parent)
    shutil.rmtree(staging, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the file system cannot (NFS)."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE: see renameat2(2)
    return bool(libc.renameat2(here, bytes(one), here, bytes(other), exchange) == 0)

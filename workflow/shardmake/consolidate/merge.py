"""From a checkpoint to a verified Hugging Face folder: the order of the steps, and what is left if one fails."""

import ctypes
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shardmake.consolidate import folder as hf_folder
from shardmake.consolidate.companions import copy_companions, folders
from shardmake.consolidate.contents import Contents
from shardmake.consolidate.dtypes import Target, check_target
from shardmake.consolidate.layout import Shard, index_json, parse_size, plan_shards
from shardmake.consolidate.loading import Loading, try_loading
from shardmake.consolidate.locate import read_model
from shardmake.consolidate.stream import check_record
from shardmake.consolidate.ties import without_aliases
from shardmake.consolidate.unpickle import unbox
from shardmake.consolidate.verify import Verification, verify_loaded
from shardmake.consolidate.writer import ShardWriter
from shardmake.errors import UserError
from shardmake.receipt import fsync_directory, write_json

Report = Callable[[str], None]


class Receipt(BaseModel):
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
    max_shard_size: str = "5GB",
    workers: int = 2,
    trust_remote_code: bool = False,
    report: Report = lambda _: None,
) -> Receipt:
    """Merge ``checkpoint`` into the Hugging Face folder ``out``, verified, with its receipt in ``receipt.json``.

    ``out`` is replaced as a whole at the end; until then the files grow in ``.NAME.partial`` beside it, where a merge
    that was killed goes on.

    Args:
        checkpoint: A run, a checkpoint, or DeepSpeed's or FSDP's inner folder; in a run, its newest one is taken.
        out: The model's folder.
        base: The base model's folder, for the config and tokenizer where the checkpoint has none beside it.
        dtype: Type of the weights; ``keep``: the checkpoint's master weights as they are.
        max_shard_size: Largest output file, such as ``5GB``.
        workers: Threads.
        trust_remote_code: Whether model code beside the config may run in the check with transformers.
        report: Takes lines for people about what is being done.

    Raises:
        UserError: the checkpoint cannot be merged, the disk is too small, or the result is not what it should be;
            ``out`` is then as it was before.
    """
    check_target(dtype)
    contents = read_model(checkpoint, dtype, base)
    for note in contents.notes:
        report(f"Passed over a newer checkpoint: {note}")
    report(f"Merging {contents.folder}: {contents.format}, {len(contents.tensors)} tensors.")
    staging = staging_folder(out)
    with _locked(staging):
        sources = folders(contents.folder, base)
        size = parse_size(max_shard_size)
        stored = {name: tensor for name, tensor in contents.tensors.items() if name not in contents.aliases}
        shards = plan_shards(stored.values(), dtype, size)
        loading = _load_headers(shards, sources, staging / ".skeleton", trust_remote_code)
        _check_fit(contents, loading)
        shards = plan_shards(without_aliases(stored, loading.ties).values(), dtype, size)
        with _nothing_left_on_error(staging):
            _check_adapter(shards)
            writer = ShardWriter(shards, staging)
            checked = _write(writer, shards, staging, workers)
            _write_small_files(shards, sources, staging)
            verification = verify_loaded(staging, loading, workers=workers)
            receipt = _receipt(contents, dtype, checked, verification)
            write_json(staging / "receipt.json", receipt.model_dump(mode="json"))
            writer.remove_journals()
            _replace(staging, out)
    report(f"Wrote {out}: {verification.parameters:,} parameters, {verification.dtype}, verified.")
    return receipt


def staging_folder(out: Path) -> Path:
    """Where the files of ``out`` grow."""
    return out.resolve().parent / f".{out.resolve().name}.partial"


def _load_headers(shards: list[Shard], sources: list[Path], skeleton: Path, trust_remote_code: bool) -> Loading:
    """What transformers says of the merged model, from files with its headers and no bytes.

    So a checkpoint of another model is found before anything is written, and the verification at the end, which finds
    the same headers, need not load them again.
    """
    shutil.rmtree(skeleton, ignore_errors=True)
    try:
        _write_small_files(shards, sources, skeleton)
        for shard in shards:
            with (skeleton / shard.name).open("wb") as file:
                file.write(shard.header)
                file.truncate(shard.size)
        return try_loading(skeleton, trust_remote_code)
    finally:
        shutil.rmtree(skeleton, ignore_errors=True)


def _check_fit(contents: Contents, loading: Loading) -> None:
    problems = loading.problems()
    if problems:
        more = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
        lines = (f"  {line}." for line in [*problems[:20], *more])
        raise UserError("\n".join([f"{contents.folder} does not fit the model's config.json:", *lines]))


def _check_adapter(shards: list[Shard]) -> None:
    """The adapter's factors are read piecemeal while the weights stream, so their checksums are looked at before."""
    updates = [entry.tensor.update for shard in shards for entry in shard.entries if entry.tensor.update is not None]
    factors = [factor for update in updates for factor in (update.a, update.b)]
    types = {piece.record: factor.dtype for factor in factors for piece in factor.pieces}
    for record, dtype in types.items():
        check_record(unbox(record, dtype))


def _write(writer: ShardWriter, shards: list[Shard], staging: Path, workers: int) -> int:
    """The weights' files; returns how many source bytes were checked."""
    _remove_others(shards, staging)
    _check_space(shards, staging)
    writer.write(workers)
    return writer.check_sums()


def _remove_others(shards: list[Shard], staging: Path) -> None:
    """Files in the staging folder that a killed merge with another plan left."""
    wanted = {name for shard in shards for name in (shard.name, f".{shard.name}.done")} | {".lock"}
    for path in staging.iterdir():
        if path.name not in wanted:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_space(shards: list[Shard], staging: Path) -> None:
    there = sum((staging / shard.name).stat().st_size for shard in shards if (staging / shard.name).is_file())
    needed = sum(shard.size for shard in shards) - there
    state = os.statvfs(staging)
    free = state.f_bavail * state.f_frsize
    if needed > free:
        raise UserError(
            f"The merged model needs {needed / 2**30:.1f} GiB in {staging.parent}, where {free / 2**30:.1f} GiB are "
            "free. Make room, choose another folder, or take --dtype bf16."
        )


def _write_small_files(shards: list[Shard], sources: list[Path], folder: Path) -> None:
    copy_companions(sources, folder, (entry.dtype for shard in shards for entry in shard.entries))
    if len(shards) > 1:
        write_json(folder / hf_folder.INDEX, index_json(shards))


def _receipt(contents: Contents, dtype: Target, checked: int, verification: Verification) -> Receipt:
    from importlib.metadata import version

    tools = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    return Receipt(
        checkpoint=str(contents.folder),
        format=contents.format,
        step=contents.step,
        world_size=contents.world_size,
        dtype=dtype,
        source_bytes_checked=checked,
        versions={**contents.versions, **tools},
        verification=verification,
    )


@contextmanager
def _locked(staging: Path) -> Iterator[None]:
    """Keep a second merge into the same folder away."""
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another merge writes {staging}. Wait for it, or stop it.") from None
        try:
            yield
        finally:
            if staging.is_dir() and [path.name for path in staging.iterdir()] == [".lock"]:
                shutil.rmtree(staging)


@contextmanager
def _nothing_left_on_error(staging: Path) -> Iterator[None]:
    """Whatever is wrong with the checkpoint or the disk, half a model must not stay; a kill leaves it for the next."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise UserError(f"Writing {staging} failed: {error}. Nothing was kept; mend it and run again.") from error
    except UserError:
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

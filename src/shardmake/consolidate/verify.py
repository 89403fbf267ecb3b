"""Verify a merged model: its tensors, values, ties, types, index and checksums, in one pass over every byte.

Optionally compare it with its checkpoint, bit for bit in the model's type.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from isal.isal_zlib import crc32

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import Contents, StoredTensor
from shardmake.checkpoint.formats.dtypes import CONVERTIBLE, torch_name
from shardmake.checkpoint.formats.hub_layout import in_hub_layout
from shardmake.checkpoint.formats.registry import read_model
from shardmake.consolidate.aux_files import config_folder, read_object, widest
from shardmake.consolidate.blocks import Block, page_aligned, read_into
from shardmake.consolidate.jobs import CopyJob, plan_jobs
from shardmake.consolidate.layout import PlannedShard, PlannedTensor
from shardmake.consolidate.loading import LoadingReport, check_loading
from shardmake.consolidate.stream import StreamTask, stream
from shardmake.consolidate.values import infinite_rows, is_finite
from shardmake.core.errors import CheckpointError, ModelError
from shardmake.core.manifest import FileRecord, record
from shardmake.run.paths import MODEL_RECEIPT
from shardmake.run.receipts import MergeReceipt, Verification

_BLOCK = 4 << 20


@dataclass(frozen=True)
class FileScan:
    """The result of one pass over a file."""

    name: str
    sums: FileRecord
    tensors: Mapping[str, int] = field(default_factory=dict)
    """CRC-32 of the bytes of each tensor, by its name."""
    problems: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    zero_matrices: tuple[str, ...] = ()
    infinite_rows: Mapping[str, int] = field(default_factory=dict)
    """Number of rows of -inf, by the name of the tensor."""


def scan(model: Path, workers: int, advance: Callable[[int], None] = lambda _: None) -> list[FileScan]:
    """Read every file of the folder once: its checksum and, for weights, their values.

    ``advance`` takes the number of bytes of each weight file that was read.
    """
    huggingface.read(model)  # raises for a missing or damaged file
    weights = huggingface.shard_names(model)
    others = sorted(name for name in _visible_files(model) if name not in {*weights, MODEL_RECEIPT})
    with ThreadPoolExecutor(workers) as pool:
        scanned = pool.map(lambda name: _scan_weights(model / name, advance), weights)
        plain = pool.map(lambda name: FileScan(name, record(model / name)), others)
        return [*scanned, *plain]


def _visible_files(folder: Path) -> Iterator[str]:
    """Yield the files in ``folder`` and its folders; hidden ones at the top are of a merge in progress."""
    for top in folder.iterdir():
        if not top.name.startswith("."):
            files = [path for path in (top, *top.rglob("*")) if path.is_file()]
            yield from (str(path.relative_to(folder)) for path in files if not path.name.startswith("."))


class _HashingReader:
    """Reads a file in order; another thread hashes each block while the next one is read and checked."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        self._file = os.open(path, os.O_RDONLY)
        self._hash = hashlib.sha256()
        self._buffers = [page_aligned(_BLOCK), page_aligned(_BLOCK)]
        self._pool = ThreadPoolExecutor(1)
        self._hashing = self._pool.submit(lambda: None)

    def __enter__(self) -> "_HashingReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        os.close(self._file)

    def blocks(self, end: int) -> Iterator[Block]:
        """Yield the bytes up to ``end``; a block is valid until the second block after it."""
        while self.at < end:
            self._buffers.reverse()
            got = read_into(self._buffers[0][: end - self.at], self._file, self.at)
            if not got:
                raise CheckpointError(f"{self.path} changed while it was read. Run the command again.")
            block = self._buffers[0][:got]
            self._hashing.result()
            self._hashing = self._pool.submit(self._hash.update, block.data)
            self.at += got
            yield block

    def skip(self, end: int) -> None:
        """Hash the bytes up to ``end`` without returning them."""
        for _ in self.blocks(end):
            pass

    def digest(self) -> FileRecord:
        """Return size and checksum of all bytes so far."""
        self._hashing.result()
        return FileRecord(size=self.at, sha256=self._hash.hexdigest())


def _scan_weights(path: Path, advance: Callable[[int], None]) -> FileScan:
    problems: list[str] = []
    zero: list[StoredTensor] = []
    infinite: dict[str, int] = {}
    sums: dict[str, int] = {}
    with _HashingReader(path) as file:
        for tensor in sorted(huggingface.read_file(path), key=_start):
            file.skip(_start(tensor))
            finite, any_value, sums[tensor.name] = _scan_tensor(file, tensor)
            advance(tensor.nbytes)
            rows = 0 if finite else infinite_rows(path, _start(tensor), tensor)
            if rows is None:
                problems.append(f"{tensor.name} holds values that are not finite (NaN, or infinity outside of a row)")
            elif rows:
                infinite[tensor.name] = rows
            if not any_value and tensor.numel and tensor.dtype in CONVERTIBLE:
                zero.append(tensor)
        file.skip(path.stat().st_size)
        vectors = tuple(tensor.name for tensor in zero if len(tensor.shape) < 2)
        matrices = tuple(tensor.name for tensor in zero if len(tensor.shape) > 1)
        return FileScan(path.name, file.digest(), sums, tuple(problems), vectors, matrices, infinite)


def _start(tensor: StoredTensor) -> int:
    """Return the offset of a tensor of one piece in its file, 0 if it is empty."""
    return tensor.pieces[0].record.offset + tensor.pieces[0].start if tensor.pieces else 0


def _scan_tensor(file: _HashingReader, tensor: StoredTensor) -> tuple[bool, bool, int]:
    """Return (all values are finite, any value is not zero, CRC-32).

    Bytes that two tensors share count for the first.
    """
    finite, crc, end = True, 0, _start(tensor) + tensor.nbytes
    any_value = file.at >= end
    for block in file.blocks(end):
        any_value = any_value or bool(block.any())
        finite = finite and is_finite(block, tensor.dtype)
        crc = crc32(block.data, crc)
    return finite, any_value, crc


def verify(
    model: Path,
    against: Path | None = None,
    *,
    base: Path | None = None,
    workers: int = 4,
    trust_remote_code: bool = False,
    key: str | None = None,
) -> Verification:
    """Verify the model in the folder ``model``.

    The folder must hold exactly the tensors of its config, with their shapes and types. All values must be finite,
    except in rows of -inf. Ties and index must be correct. transformers must load the folder with no missing key, and
    with no unexpected key but those that the receipt lists. Files must match the checksums in the receipt, if there is
    one. Tensors that are all zero and rows of -inf are in the result.

    Args:
        model: A Hugging Face folder, of a model or of an adapter.
        against: A checkpoint to compare with: bit for bit, or after rounding to the model's type.
        base: The base model's folder, if ``model`` or ``against`` is an adapter.
        workers: Threads; each holds a few MiB.
        trust_remote_code: Allow code in the folder to run.
        key: Of several models in ``against``, the one to compare with. Default: the one in the folder's receipt.

    Raises:
        ShardmakeError: The model has problems; the message has one line for each.
    """
    loading = _raw_report(model)
    if loading is None:
        adapter_base = config_folder([base]) if huggingface.recognise_adapter(model) else None
        loading = check_loading(model, trust_remote_code, adapter_base, None if adapter_base else model)
    verification = verify_loaded(model, loading, scan(model, workers), _accepted(model))
    if against is None:
        return verification
    compare(model, against, loading, base=base, workers=workers, key=key)
    return verification.model_copy(update={"compared_with": str(against)})


def _raw_report(model: Path) -> LoadingReport | None:
    """Return the report for the result of a raw merge, which has no config; None for any other folder."""
    if (model / "config.json").exists() or not (model / MODEL_RECEIPT).is_file():
        return None
    merged = MergeReceipt.read(model / MODEL_RECEIPT).verification
    return LoadingReport(ties=tuple(merged.ties.items())) if not merged.architecture else None


def _accepted(model: Path) -> list[str]:
    """Return the tensors that the user wanted to keep although the class does not have them."""
    path = model / MODEL_RECEIPT
    return MergeReceipt.read(path).verification.unexpected if path.is_file() else []


def verify_loaded(
    model: Path, loading: LoadingReport, scans: list[FileScan], accepted: Collection[str] = ()
) -> Verification:
    """Do the checks of `verify` with the report of transformers on files with the same headers, and with `scan`."""
    contents = huggingface.read(model)
    problems = [*loading.problems(accepted), *_tie_problems(contents, loading), *_type_problems(model, contents)]
    problems += [problem for found in scans for problem in found.problems]
    problems += _stray_problems(model)
    problems += _receipt_problems(model, {found.name: found.sums for found in scans})
    if problems:
        raise ModelError("\n".join([f"{model} is not valid:", *(f"  {problem}." for problem in problems)]))
    return _summary(model, contents, loading, scans)


def _tie_problems(contents: Contents, loading: LoadingReport) -> list[str]:
    stored = contents.tensors
    return [
        f"{alias} is stored, although the model ties it to {owner}"
        for alias, owner in loading.ties
        if alias in stored and owner in stored
    ]


def _type_problems(model: Path, contents: Contents) -> list[str]:
    declared = _declared_type(model)
    held = {torch_name(tensor.dtype) for tensor in contents.tensors.values() if tensor.dtype in CONVERTIBLE}
    if declared is None or declared in held or not held:
        return []
    return [f"config.json declares {declared}, the tensors are {', '.join(sorted(held))}"]


def _declared_type(model: Path) -> str | None:
    """Return the type in config.json; None without a config, as for an adapter."""
    if not (model / "config.json").is_file():
        return None
    config = read_object(model / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype"))


def _stray_problems(model: Path) -> list[str]:
    used = set(huggingface.shard_names(model))
    found = {path.name for suffix in ("safetensors", "bin") for path in model.glob(f"*.{suffix}")}
    return [f"{name} is not part of the model" for name in sorted(found - used - {"training_args.bin"})]


def _receipt_problems(model: Path, found: dict[str, FileRecord]) -> list[str]:
    if not (model / MODEL_RECEIPT).is_file():
        return []
    recorded = MergeReceipt.read(model / MODEL_RECEIPT).verification.files
    gone = [f"{name} is in the receipt, but not in the folder" for name in recorded if name not in found]
    changed = [name for name, sums in recorded.items() if name in found and found[name] != sums]
    added = [f"{name} was added after the receipt was written" for name in found if name not in recorded]
    return gone + added + [f"{name} was changed after the receipt was written" for name in changed]


def _summary(model: Path, contents: Contents, loading: LoadingReport, scans: list[FileScan]) -> Verification:
    tensors = contents.tensors.values()
    elements = Counter[str]()
    for tensor in tensors:
        elements[torch_name(tensor.dtype)] += tensor.numel
    return Verification(
        architecture=loading.architecture,
        tensors=len(tensors),
        parameters=sum(tensor.numel for tensor in tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
        dtype=_declared_type(model) or torch_name(widest(tensor.dtype for tensor in tensors)),
        dtypes=dict(elements),
        ties=dict(loading.ties),
        zero=[name for found in scans for name in found.zero],
        zero_matrices=[name for found in scans for name in found.zero_matrices],
        infinite_rows={name: rows for found in scans for name, rows in found.infinite_rows.items()},
        unexpected=list(loading.unexpected),
        files={found.name: found.sums for found in scans},
        compared_with=None,
    )


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

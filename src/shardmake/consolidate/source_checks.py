"""Find checkpoints whose files are of two saves, and say what is doubtful about a checkpoint.

Shardmake's own record, if there is one, has the CRC-32 of every file. That of a ``torch.save`` file follows from its
zip directory, which has the CRC-32 of every tensor's bytes, and from the few other bytes of the file. So the tensors
are not read for it. The copy compares those that the model needs with the zip directory. Other files are read
completely.

Without a record the files themselves answer: the name that ``torch.save`` gives an archive, the optimizer's steps, the
two copies of the weights, and the times of the files.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from isal.isal_zlib import crc32, crc32_combine

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor
from shardmake.checkpoint.formats.dcp import RANK_FILES
from shardmake.checkpoint.formats.dtypes import CONVERTIBLE, ITEM_SIZE, torch_name
from shardmake.checkpoint.formats.torch_zip_reader import ZipArchive, ZipRecord, read_small
from shardmake.checkpoint.formats.unpickle import TensorRef
from shardmake.checkpoint.formats.zero_files import load_optimizer
from shardmake.checkpoint.record import RECORD_NAME, CheckpointRecord, file_problem, is_unfinished, read_record
from shardmake.consolidate.aux_files import read_object
from shardmake.consolidate.blocks import Converter
from shardmake.consolidate.destination import checkpoint_folders
from shardmake.core.errors import CheckpointError, ConfigError
from shardmake.core.fingerprint import BLOCK, FileEntry, fingerprint

Allowed = Literal["steps", "unexpected", "untied"]
"""``steps``: the optimizer counted other steps than the training, because it was started again. ``unexpected``: tensors
that the class lacks, such as a value head, are kept. ``untied``: both of two weights that the config ties and that
differ are written."""


def parse_allowed(names: Collection[str]) -> tuple[Allowed, ...]:
    """Return ``names`` if all of them are `Allowed`; raise `ConfigError` otherwise."""
    known: tuple[Allowed, ...] = get_args(Allowed)
    for name in names:
        if name not in known:
            raise ConfigError(f"Unknown value of --allow: {name!r}. Use one of {', '.join(known)}.")
    return tuple(name for name in known if name in names)


_ZERO_FILE = "*_states.pt"
_SHARDS = (_ZERO_FILE, "*.distcp", *RANK_FILES)
_SAMPLE = 1024
"""Elements of each piece of a tensor that are compared with the other copy of the weights."""
_APART = 600
"""Seconds between two files that one save writes at the same time, from which on the difference is reported."""
_READ = 1 << 20
"""Bytes; smaller records of an archive are read, because the plan of the merge depends on them."""
_LARGE = 64 << 20
"""Bytes; of larger files that are not archives and that the merge does not need, only the size is compared."""
_TWO_SAVES = "The checkpoint mixes files of two saves, or of two ranks. Copy it again, or use another checkpoint."


@dataclass(frozen=True)
class SourceReport:
    """Findings about a checkpoint beside its tensors.

    Attributes:
        recorded_files: Number of files that equal Shardmake's record; None without a record.
        step: Training step, if any file states it.
        warnings: One sentence for each doubt.
    """

    recorded_files: int | None = None
    step: int | None = None
    warnings: tuple[str, ...] = ()


def check_source(contents: Contents, allow: Collection[Allowed] = ()) -> SourceReport:
    """Check that the files of a checkpoint are of one save; read no tensor completely.

    Raises:
        CheckpointError: A file differs from the record, has the content of another rank or save, or the optimizer
            counted other steps than the training and ``allow`` does not hold ``steps``.
    """
    folders = checkpoint_folders(contents)
    used = {piece.record.path for tensor in contents.tensors.values() for piece in tensor.pieces}
    warnings = []
    if contents.left_out:
        warnings.append(
            f"{contents.left_out[0]} ({len(contents.left_out)} such entries) in {contents.folder} is the extra state "
            "of a module, not a tensor. safetensors files hold tensors only, so the model does not have it."
        )
    record = check_recorded(folders, used, 4)
    if record is not None:
        return SourceReport(len(record.files), record.step, tuple(warnings))
    warnings += _times_apart(contents.folder)
    if contents.format.startswith("DeepSpeed") and contents.format != "DeepSpeed universal":
        _check_archive_names(contents.folder)
        warnings += _check_zero(contents, allow)
    step = contents.step
    states = [path for folder in folders if (path := folder / "trainer_state.json").is_file()]
    if step is None and states:  # the format's own files do not have the step
        found = read_object(states[0]).get("global_step")
        step = found if isinstance(found, int) else None
    return SourceReport(None, step, tuple(warnings))


def check_recorded(folders: Collection[Path], used: Collection[Path], workers: int) -> CheckpointRecord | None:
    """Compare every file of a checkpoint of Shardmake with its record; return None for any other checkpoint.

    ``folders`` are the checkpoint's, ``used`` the files that the merge reads, ``workers`` is the number of threads.
    Raise `CheckpointError` if the record is damaged, or for files that differ from it.
    """
    checkpoint = next((folder for folder in folders if not is_unfinished(folder)), None)
    if checkpoint is None:
        return None
    record = read_record(checkpoint)
    if record is None:
        raise CheckpointError(f"{checkpoint / RECORD_NAME} is damaged. Use an older checkpoint, or copy it again.")
    files = {path.resolve() for path in used}
    with ThreadPoolExecutor(workers) as pool:
        entries = ((checkpoint / name, entry) for name, entry in record.files.items())
        found = pool.map(lambda item: _problem(item[0], item[1], item[0].resolve() in files), entries)
        problems = [problem for problem in found if problem]
    recorded = {(checkpoint / name).resolve() for name in record.files}
    inside = (path for path in sorted(files - recorded) if path.is_relative_to(checkpoint.resolve()))
    problems += [f"{path} was added after the save" for path in inside]
    if problems:
        lines = "\n".join(f"  {problem}." for problem in problems)
        raise CheckpointError(
            f"The files in {checkpoint} are not those that were saved, as {RECORD_NAME} lists them:\n{lines}\n"
            "Use an older checkpoint, or copy this one again."
        )
    return record


def _problem(path: Path, expected: FileEntry, is_used: bool) -> str:
    if problem := file_problem(path, expected, checksums=False):
        return problem
    from_directory = archive_crc32(path)
    if from_directory is None and expected.size > _LARGE and not is_used:
        return ""
    if from_directory is not None and f"{from_directory:08x}" == expected.crc32:
        return ""
    return "" if fingerprint(path).crc32 == expected.crc32 else f"{path} has another content"


def archive_crc32(path: Path) -> int | None:
    """Return the CRC-32 of a file of one or several zip archives, as their directories imply it.

    The file has this CRC-32 if every large record has the one in the directory. Return None for any other file.
    """
    records = _large_records(path)
    if records is None:
        return None
    with path.open("rb") as file:
        crc = at = 0
        for record in sorted(records, key=lambda record: record.offset):
            if record.offset < at or record.crc is None:
                return None
            crc = crc32_combine(crc32_of(file.fileno(), at, record.offset, crc), record.crc, record.size)
            at = record.offset + record.size
        return crc32_of(file.fileno(), at, path.stat().st_size, crc)


def crc32_of(file: int, begin: int, end: int, crc: int = 0) -> int:
    """Return ``crc``, extended by the bytes ``[begin, end)`` of ``file``."""
    while begin < end:
        content = os.pread(file, min(BLOCK, end - begin), begin)
        if not content:
            break
        crc, begin = crc32(content, crc), begin + len(content)
    return crc


def _large_records(path: Path) -> list[ZipRecord] | None:
    """Return the large records; None if the file is not made of archives of torch."""
    found: list[ZipRecord] = []
    end = path.stat().st_size
    try:
        while end:  # the directory of an archive is at its end, so the archives are read backwards
            with ZipArchive(path, 0, end) as archive:
                found += [archive.record(name) for name, entry in archive.entries.items() if entry.file_size > _READ]
                end = min(entry.header_offset for entry in archive.entries.values())
    except (CheckpointError, ValueError):
        return None
    return found


def _times_apart(folder: Path) -> Iterator[str]:
    """Yield a sentence if the shards were not written at about the same time."""
    found = (path for pattern in _SHARDS for path in folder.glob(pattern) if path.is_file())
    shards = sorted((path.stat().st_mtime, path.name) for path in found)
    gaps = [(after[0] - before[0], index) for index, (before, after) in enumerate(pairwise(shards), 1)]
    seconds, index = max(gaps, default=(0.0, 0))
    if seconds > _APART:
        names = [name for _, name in (shards[index:] if 2 * index > len(shards) else shards[:index])]
        yield (
            f"In {folder}, {names[0]} ({len(names)} of {len(shards)} files) was written {seconds / 60:.0f} minutes "
            "apart from the others. Nothing in these files shows whether they are of one save."
        )


def _check_archive_names(folder: Path) -> None:
    """Compare each file's name with the one under which ``torch.save`` wrote it: the folder in the archive."""
    for path in filter(Path.is_file, sorted(folder.glob(_ZERO_FILE))):
        with path.open("rb") as file:
            start = file.read(4096)
        length = int.from_bytes(start[26:28], "little")  # the first entry starts after a header of 30 bytes
        written = start[30 : 30 + length].decode(errors="replace").partition("/")[0]
        if written.endswith("_states") and written != path.stem:
            raise CheckpointError(f"{path} was written as {written}.pt. {_TWO_SAVES}")


def _check_zero(contents: Contents, allow: Collection[Allowed]) -> Iterator[str]:
    """Compare model file and optimizer file of rank 0; yield a sentence if there are no optimizer files."""
    path = next(iter(sorted(contents.folder.glob("*mp_rank_00_model_states.pt"))))
    model = unpickle.load(path)
    optimizers = sorted(contents.folder.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt"))
    if not optimizers:
        config = model.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
        stage = zero.get("stage") if isinstance(zero, Mapping) else None
        types = {tensor.dtype for tensor in contents.tensors.values()}
        if stage in (1, 2) and types & {"BF16", "F16"}:
            names = ", ".join(sorted(torch_name(dtype) for dtype in types & {"BF16", "F16"}))
            yield (
                f"{contents.folder} holds no optimizer files of ZeRO-{stage}. They had the fp32 weights of the "
                f"training, so the model has the rounded ones ({names})."
            )
        return
    if "steps" not in allow:
        _check_steps(contents.folder, model, optimizers[0])
    if contents.format != "DeepSpeed ZeRO-3":
        _check_rounded(contents, path, model["module"])


def _check_steps(folder: Path, model: Mapping[str, Any], optimizer: Path) -> None:
    """Compare the optimizer's steps with those of the training that were not skipped for an overflow."""
    steps, skipped = model.get("global_steps"), model.get("skipped_steps") or 0
    counted = load_optimizer(optimizer).step
    if counted is None or not (isinstance(steps, int) and isinstance(skipped, int)):
        return
    if counted != steps - skipped:
        raise CheckpointError(
            f"{folder} holds a model of step {steps} ({skipped} skipped), but its optimizer counts {counted:g} steps. "
            f"{_TWO_SAVES} If the training started with a new optimizer, add --allow steps."
        )


def _check_rounded(contents: Contents, path: Path, module: Mapping[str, Any]) -> None:
    """Compare the master weights of ZeRO-1 and 2, rounded, with the weights in the model file, in parts."""
    converter = Converter(_SAMPLE)
    for name, tensor in contents.tensors.items():
        ref = module.get(name, module.get(f"module.{name}"))
        if not isinstance(ref, TensorRef) or ref.shape != tensor.shape or not ref.is_contiguous:
            continue
        pieces = tensor.pieces if {ref.dtype, tensor.dtype} <= CONVERTIBLE else ()
        for piece in pieces:
            if piece.record.path != path and not _is_rounded(tensor, piece, ref, converter):
                raise CheckpointError(
                    f"The fp32 weights of {name} in {piece.record.path}, rounded to {torch_name(ref.dtype)}, are not "
                    f"the weights in {path}. {_TWO_SAVES}"
                )


def _is_rounded(tensor: StoredTensor, piece: Piece, ref: TensorRef, converter: Converter) -> bool:
    count = min(piece.count, _SAMPLE)
    wide = read_small(piece.record.path, piece.record.offset + piece.start, count * ITEM_SIZE[tensor.dtype])
    at = ref.record.offset + ref.offset + piece.at * ITEM_SIZE[ref.dtype]
    narrow = read_small(ref.record.path, at, count * ITEM_SIZE[ref.dtype])
    if tensor.dtype != ref.dtype:
        wide = converter.convert(np.frombuffer(wide, np.uint8), tensor.dtype, ref.dtype).tobytes()
    return wide == narrow

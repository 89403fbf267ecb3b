"""Find checkpoints whose files are of two saves, and say what is doubtful about a checkpoint.

Shardmake's own record, if there is one, answers for every file. Otherwise the files themselves answer: the name that
``torch.save`` gives an archive, the optimizer's steps, the two copies of the weights, and the times of the files.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from shardmake.checkpoint.formats import fsdp_per_rank, unpickle
from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor
from shardmake.checkpoint.formats.dtypes import CONVERTIBLE, ITEM_SIZE, torch_name
from shardmake.checkpoint.formats.torch_zip_reader import read_small
from shardmake.checkpoint.formats.unpickle import TensorRef
from shardmake.checkpoint.formats.zero_files import optimizer_step
from shardmake.consolidate.aux_files import read_object
from shardmake.consolidate.blocks import Converter
from shardmake.consolidate.destination import checkpoint_folders
from shardmake.consolidate.recorded import check_recorded
from shardmake.core.errors import CheckpointError, ConfigError

Allowed = Literal["steps", "unexpected", "untied"]
"""``steps``: the optimizer counted other steps than the training. ``unexpected``: tensors that the class lacks.
``untied``: weights that the config ties have different values, so that the model stores both."""


def parse_allowed(names: Collection[str]) -> tuple[Allowed, ...]:
    """Return ``names`` if all of them are `Allowed`; raise `ConfigError` otherwise."""
    known: tuple[Allowed, ...] = get_args(Allowed)
    for name in names:
        if name not in known:
            raise ConfigError(f"Unknown value of --allow: {name!r}. Use one of {', '.join(known)}.")
    return tuple(name for name in known if name in names)


_ZERO_FILE = "*_states.pt"
_SHARDS = (_ZERO_FILE, "*.distcp", *fsdp_per_rank.NAMES)
_SAMPLE = 1024
"""Elements of each piece of a tensor that are compared with the other copy of the weights."""
_APART = 600
"""Seconds between two files that one save writes at the same time, from which on the difference is reported."""
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
    counted = optimizer_step(unpickle.load(optimizer)["optimizer_state_dict"])
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
        if not {ref.dtype, tensor.dtype} <= CONVERTIBLE:
            continue
        for piece in tensor.pieces:
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

"""DeepSpeed's universal checkpoints: every state of every parameter unsharded, in a file of its own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, StoredTensor, unsharded
from shardmake.checkpoint.formats.dtypes import Target
from shardmake.checkpoint.formats.unpickle import TensorRef, numel
from shardmake.checkpoint.formats.zero_files import load_files, named_folder
from shardmake.checkpoint.formats.zero_tensors import module_tensors, zero3_buffers, zero3_frozen
from shardmake.core.errors import CheckpointError

LATEST = "latest_universal"


def is_universal(checkpoint: Path) -> bool:
    """Return True if DeepSpeed must load ``checkpoint`` as a universal one."""
    return (checkpoint / LATEST).is_file()


def inner_folder(checkpoint: Path) -> Path:
    """Return the folder with the states, which `LATEST` names."""
    return named_folder(checkpoint / LATEST)


def recognise(path: Path) -> Path | None:
    """Return ``path`` if it is the inner folder of a universal checkpoint."""
    return path if any(path.glob("zero/*/fp32.pt")) else None


def read(folder: Path, target: Target = "keep") -> Contents:
    """Read a universal checkpoint as ds_to_universal.py writes it: ``zero/NAME/fp32.pt`` for every trained parameter.

    Frozen parameters and buffers are in the ranks' model files beside it, as in the original checkpoint. If
    tensor-parallel ranks wrote that, the shapes in the model files are those of their parts.
    """
    tensor_parallel = any(folder.glob("mp_rank_01_*"))
    files = load_files(folder, tensor_parallel)
    is_stage3 = any(folder.glob("zero_pp_rank_*_model_states.pt"))
    trained = [
        _trained_tensor(folder, name, None if tensor_parallel else shape)
        for group in files.param_shapes
        for name, shape in group.items()
    ]
    names = {tensor.name for tensor in trained}
    rest = [*zero3_frozen(files), *zero3_buffers(files)] if is_stage3 else module_tensors(files, "keep")
    tensors = [*trained, *(tensor for tensor in rest if tensor.name not in names)]
    return files.contents("DeepSpeed universal", len(files.model), tensors)


def _trained_tensor(folder: Path, name: str, shape: tuple[int, ...] | None) -> StoredTensor:
    path = folder / "zero" / name / "fp32.pt"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. The universal checkpoint is not complete. Convert it again.")
    held = unpickle.load(path)
    ref = held.get("param") if isinstance(held, Mapping) else held
    if not isinstance(ref, TensorRef) or (shape is not None and ref.numel != numel(shape)):
        raise CheckpointError(
            f"{path} does not hold the {list(shape or ())} elements of {name}. Convert the checkpoint again."
        )
    return replace(unsharded(name, ref), shape=tuple(ref.shape if shape is None else shape))

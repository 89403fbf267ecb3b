"""Optimizer states on NVMe, which DeepSpeed checkpoints hold as copies of the swap files.

If a sub-group of ZeRO-3 is swapped out, the rank's optimizer file holds empty tensors in its place. The bytes are in
``offloaded_tensors/rankRR``: ``ID.tensor.swp`` has the fp32 weights, ``exp_avg-ID.tensor.swp`` the first moments, and
so on. Each file is a flat vector of fp32 with padding at its end. DeepSpeed derives ID from its numbers for the first
and the last parameter of the sub-group and does not save it. Trainings of Shardmake write an index of the IDs.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import TensorRef, numel
from shardmake.core.atomic import write_json
from shardmake.core.errors import CheckpointError

FOLDER = "offloaded_tensors"
_INDEX = TypeAdapter(list[str])
_DTYPE = "F32"


def write_index(folder: Path, ids: Sequence[str]) -> None:
    """Write the IDs of the sub-groups, in their order, into DeepSpeed's inner folder."""
    write_json(folder / FOLDER / "sub_groups.json", list(ids))


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of the swap files of ``rank`` in DeepSpeed's inner ``folder``."""
    return folder / FOLDER / f"rank{rank:02d}"


def with_swap_files(
    folder: Path, rank: int, state: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]], ranks: int
) -> Mapping[str, Any]:
    """Return a rank's optimizer ``state`` with references to the swap files instead of empty tensors.

    Args:
        folder: DeepSpeed's inner folder.
        rank: The rank of ``state``.
        state: Optimizer state with ``fp32_flat_groups``, one flat vector per sub-group.
        shapes: By sub-group, the shapes of its parameters by name.
        ranks: Number of ranks that share each parameter.

    Raises:
        CheckpointError: A swap file is missing or too short, or the index is missing.
    """
    groups = state["fp32_flat_groups"]
    if not (folder / FOLDER).is_dir() or all(group.numel for group in groups):
        return state
    ids = _read_index(folder, len(groups))
    files = rank_folder(folder, rank)
    elements = [sum(math.ceil(numel(shape) / ranks) for shape in group.values()) for group in shapes]

    def resolve(number: int, prefix: str, value: Any) -> Any:
        """Return ``value``, or the swap file of sub-group ``number`` if ``value`` is an empty tensor."""
        if not isinstance(value, TensorRef) or value.numel or not elements[number]:
            return value
        return _swap_file(files / f"{prefix}{ids[number]}.tensor.swp", elements[number])

    base = state["optimizer_state_dict"]
    moments = {
        number: {name: resolve(number, f"{name}-", value) for name, value in held.items()}
        for number, held in base["state"].items()
    }
    weights = [resolve(number, "", group) for number, group in enumerate(groups)]
    return {**state, "fp32_flat_groups": weights, "optimizer_state_dict": {**base, "state": moments}}


def _read_index(folder: Path, sub_groups: int) -> list[str]:
    path = folder / FOLDER / "sub_groups.json"
    try:
        ids = _INDEX.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"Cannot read the NVMe swap files in {folder}. {path.name}, which maps them to parameters, is missing. "
            "Trainings of Shardmake write it: resume from this checkpoint with Shardmake and merge the next one."
        ) from None
    except ValidationError:
        ids = []
    if len(ids) != sub_groups or not all(re.fullmatch(r"\d+_\d+", id) for id in ids):
        raise CheckpointError(f"{path} is damaged. Use an older checkpoint.")
    return ids


def _swap_file(path: Path, elements: int) -> TensorRef:
    """Return the first ``elements`` of a swap file; DeepSpeed pads the file for alignment."""
    size = elements * ITEM_SIZE[_DTYPE]
    held = path.stat().st_size if path.is_file() else 0
    if held < size:
        raise CheckpointError(
            f"{path} has {held} of {size} bytes. The checkpoint is not complete. Use an older checkpoint."
        )
    return TensorRef(ZipRecord(path, 0, size, None), 0, _DTYPE, (elements,), (1,))

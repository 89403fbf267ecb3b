"""Optimizer states that DeepSpeed kept on NVMe, which its checkpoints hold as copies of the swap files.

Where a sub-group of ZeRO-3 is swapped, the rank's optimizer file holds empty tensors in its place. The bytes lie in
``offloaded_tensors/rankRR``: ``ID.tensor.swp`` has the fp32 weights, ``exp_avg-ID.tensor.swp`` the first moments, and
so on, each a flat vector of fp32 with padding behind it. DeepSpeed makes ID of the numbers that it gave to the first
and the last parameter of the sub-group and writes them nowhere; Shardmake's trainings leave an index.
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
from shardmake.core.errors import ShardmakeError

FOLDER = "offloaded_tensors"
_INDEX = TypeAdapter(list[str])
_DTYPE = "F32"


def write_index(folder: Path, ids: Sequence[str]) -> None:
    """Write into DeepSpeed's inner folder which swap files are whose: the sub-groups' ids, in their order."""
    write_json(folder / FOLDER / "sub_groups.json", list(ids))


def rank_folder(folder: Path, rank: int) -> Path:
    """Where the swap files of ``rank`` lie in DeepSpeed's inner ``folder``."""
    return folder / FOLDER / f"rank{rank:02d}"


def with_swapped(
    folder: Path, rank: int, state: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]], ranks: int
) -> Mapping[str, Any]:
    """A rank's optimizer ``state`` with the swap files in the place of the empty tensors; any other as it is.

    Args:
        folder: DeepSpeed's inner folder.
        rank: Whose state it is.
        state: With ``fp32_flat_groups``, one flat vector a sub-group.
        shapes: By sub-group, the shapes of its parameters by name.
        ranks: Over how many each parameter is cut.

    Raises:
        ShardmakeError: a swap file is missing or too short, or nothing says which is which.
    """
    groups = state["fp32_flat_groups"]
    if not (folder / FOLDER).is_dir() or all(group.numel for group in groups):
        return state
    ids = _read_index(folder, len(groups))
    files = rank_folder(folder, rank)
    elements = [sum(math.ceil(numel(shape) / ranks) for shape in group.values()) for group in shapes]

    def found(number: int, prefix: str, value: Any) -> Any:
        """``value``, or what lies in the swap file of sub-group ``number`` in its place."""
        if not isinstance(value, TensorRef) or value.numel or not elements[number]:
            return value
        return _swap_file(files / f"{prefix}{ids[number]}.tensor.swp", elements[number])

    base = state["optimizer_state_dict"]
    moments = {
        number: {name: found(number, f"{name}-", value) for name, value in held.items()}
        for number, held in base["state"].items()
    }
    weights = [found(number, "", group) for number, group in enumerate(groups)]
    return {**state, "fp32_flat_groups": weights, "optimizer_state_dict": {**base, "state": moments}}


def _read_index(folder: Path, sub_groups: int) -> list[str]:
    path = folder / FOLDER / "sub_groups.json"
    try:
        ids = _INDEX.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ShardmakeError(
            f"{folder} holds what DeepSpeed kept on NVMe, and no {path.name} that says which of it is whose. "
            "Shardmake's trainings write it: resume from there with Shardmake, and merge the next checkpoint."
        ) from None
    except ValidationError:
        ids = []
    if len(ids) != sub_groups or not all(re.fullmatch(r"\d+_\d+", id) for id in ids):
        raise ShardmakeError(f"{path} is damaged. Take an older checkpoint.")
    return ids


def _swap_file(path: Path, elements: int) -> TensorRef:
    """The first ``elements`` of a swap file, which is as long as DeepSpeed's alignment wants it."""
    size = elements * ITEM_SIZE[_DTYPE]
    held = path.stat().st_size if path.is_file() else 0
    if held < size:
        raise ShardmakeError(f"{path} has {held} of {size} bytes: the checkpoint is not complete. Take an older one.")
    return TensorRef(ZipRecord(path, 0, size, None), 0, _DTYPE, (elements,), (1,))

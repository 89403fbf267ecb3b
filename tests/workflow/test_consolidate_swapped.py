"""Checkpoints of ZeRO-3 with the optimizer on NVMe: real DeepSpeed checkpoints, swapped out as DeepSpeed does it.

``make test-nvme`` merges one that DeepSpeed swapped out itself, which takes a compiler and minutes.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmake.checkpoint.formats.zero import MOMENTS, inner_folder, read_states
from shardmake.checkpoint.formats.zero_files import SWAP_FOLDER, write_swap_ids
from shardmake.checkpoint.reshard.states import read_tensor
from shardmake.core.errors import ShardmakeError
from tests.workflow.consolidate_checkpoints import assert_equal, expected_weights, merged

pytestmark = pytest.mark.training
ALIGNED = 4096


@pytest.fixture(params=[(4, "zero3-bf16-subgroups"), (2, "zero3-subgroups-resnet"), (3, "zero3-tied")], ids=str)
def variant(request: pytest.FixtureRequest, variant_of: Callable[[str, int, str], Path]) -> Path:
    return variant_of("zero", *request.param)


@pytest.fixture
def swapped(variant: Path, tmp_path: Path) -> Path:
    """Return DeepSpeed's inner folder of a copy of the checkpoint, with all sub-groups but the second swapped out."""
    folder = inner_folder(Path(shutil.copytree(variant / "checkpoint-2", tmp_path / "checkpoint-2")))
    for path in folder.glob("*_optim_states.pt"):
        rank = int(path.name.split("rank_")[1].split("_")[0])
        saved = torch.load(path, weights_only=False)
        count = swap_out(saved["optimizer_state_dict"], folder / SWAP_FOLDER / f"rank{rank:02d}")
        torch.save(saved, path)
    write_swap_ids(folder, [f"{number}_{number + 3}" for number in range(count)])
    return folder


def swap_out(state: dict[str, Any], files: Path) -> int:
    """Move a rank's large tensors to swap files; return the number of sub-groups."""
    files.mkdir(parents=True)
    weights, moments = state["fp32_flat_groups"], state["optimizer_state_dict"]["state"]
    for number, group in enumerate(weights):
        if number == 1:
            continue
        for prefix, tensor in (("", group), *((f"{name}-", moments[number][name]) for name in MOMENTS)):
            content = tensor.detach().numpy().tobytes()
            padding = bytes(-len(content) % ALIGNED)
            (files / f"{prefix}{number}_{number + 3}.tensor.swp").write_bytes(content + padding)
        weights[number] = torch.Tensor()
        moments[number] |= dict.fromkeys(MOMENTS, torch.Tensor())
    return len(weights)


def test_merged_model_is_unchanged(variant: Path, swapped: Path, tmp_path: Path) -> None:
    assert_equal(merged(swapped.parent, tmp_path / "out"), expected_weights(variant))


def test_states_for_resharding_are_unchanged(variant: Path, swapped: Path) -> None:
    def values(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for kind, tensors in read_states(folder).items():
            yield from ((f"{kind} {name}", read_tensor(tensor)) for name, tensor in tensors.items())

    assert_equal(dict(values(swapped)), dict(values(inner_folder(variant / "checkpoint-2"))))


def test_missing_swap_file_or_index_is_reported(swapped: Path, tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ShardmakeError, match=message):
            merged(swapped.parent, tmp_path / "out")

    file = swapped / SWAP_FOLDER / "rank01/0_3.tensor.swp"
    content = file.read_bytes()
    file.write_bytes(content[:100])
    refused(r"rank01/0_3\.tensor\.swp has 100 of \d+ bytes\. The checkpoint is not complete")
    file.unlink()
    refused(r"rank01/0_3\.tensor\.swp has 0 of \d+ bytes")
    file.write_bytes(content)
    for ids in ([], ["../../0"] * 99):
        write_swap_ids(swapped, ids)
        refused(r"sub_groups\.json is damaged")
    (swapped / SWAP_FOLDER / "sub_groups.json").unlink()
    refused(r"sub_groups\.json, which maps .* is missing.* resume from this checkpoint with Shardmake")

"""Layouts of torch's distributed checkpoints, each written by torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardmake.checkpoint.formats.contents import covers
from shardmake.checkpoint.formats.registry import read_checkpoint, read_model
from shardmake.checkpoint.formats.unpickle import locate
from shardmake.core.errors import CheckpointError

WEIGHTS = {"embed.weight": torch.ones(3, 2), "layers.0.weight": torch.zeros(2, 2), "optimus.bias": torch.ones(2)}
OPTIMIZER = {"state": {"embed.weight": {"exp_avg": torch.ones(3, 2)}}, "param_groups": [{"lr": 0.1}]}
TORCHTITAN = {
    **WEIGHTS, "optimizer": OPTIMIZER, "lr_scheduler": {"last_epoch": 4}, "dataloader": {"dp_rank_0": b"x"},
    "train_state": {"step": torch.tensor(5)},
}  # fmt: skip
LIGHTNING = {
    "state_dict": WEIGHTS, "optimizer_states": [OPTIMIZER], "lr_schedulers": [{"last_epoch": 1}], "epoch": 3,
    "pytorch-lightning_version": "2.6", "loops": {"fit_loop": {"step": torch.tensor(5)}},
}  # fmt: skip


WRAPPED = {
    "_orig_mod.layers.0._checkpoint_wrapped_module.weight": torch.ones(2),
    "_orig_mod.layers.1._fsdp_wrapped_module._orig_mod.weight": torch.ones(2),
}


SAVED = {
    "flat": (WEIGHTS, WEIGHTS), "model": ({"model": WEIGHTS, "optimizer": OPTIMIZER}, WEIGHTS),
    "net": ({"net": WEIGHTS, "optim": OPTIMIZER, "step": 5}, WEIGHTS), "flat with a step": ({**WEIGHTS, "step": 5}, WEIGHTS),
    "rng": ({"net": WEIGHTS, "rng_state": {"cpu": torch.ones(4, dtype=torch.uint8)}}, WEIGHTS),
    "torchtitan": (TORCHTITAN, WEIGHTS), "lightning": (LIGHTNING, WEIGHTS),
    "two models": ({"encoder": {"w": torch.ones(2)}, "decoder": {"v": torch.ones(2)}}, ("encoder.w", "decoder.v")),
    "wrappers": ({"model": WRAPPED}, ("layers.0.weight", "layers.1.weight")),
}  # fmt: skip


@pytest.mark.parametrize(("saved", "names"), SAVED.values(), ids=SAVED)
def test_weights_are_found(saved: dict[str, Any], names: Iterable[str], tmp_path: Path) -> None:
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    assert read_model(tmp_path).tensors.keys() == set(names)


@pytest.mark.parametrize(("weights", "message"), [
    ({"layers._orig_mod.weight": torch.ones(2), "layers.weight": torch.ones(2)}, "are one name without the levels"),
    ({"w": torch.ones(2, dtype=torch.complex128)}, r"The type complex128 of model\.w is not supported"),
])  # fmt: skip
def test_weights_that_cannot_be_merged(weights: dict[str, Any], message: str, tmp_path: Path) -> None:
    dcp.save({"model": weights}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=message):
        read_model(tmp_path)


AVERAGES = {name: weight + 1 for name, weight in WEIGHTS.items()}


@pytest.mark.parametrize(("saved", "keys"), [
    ({"net": WEIGHTS, "ema": AVERAGES}, ("net", "ema")), ({"model": WEIGHTS, "ema": AVERAGES}, ("model", "ema")),
    ({"model": WEIGHTS, "ema": {"model": AVERAGES}}, ("model", "ema.model")),
    ({"ema": {"model": AVERAGES}, "model": WEIGHTS, "optimizer": OPTIMIZER}, ("model", "ema.model")),
    ({"app": {"model": WEIGHTS}, "ema": {"model": AVERAGES}}, ("app.model", "ema.model")),
])  # fmt: skip
def test_one_of_two_models_must_be_named(saved: dict[str, Any], keys: tuple[str, str], tmp_path: Path) -> None:
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=rf"holds several: {', '.join(sorted(keys))}\."):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no model 'other'\. Leave out --key, or name one of"):
        read_checkpoint(tmp_path, key="other")
    places = []
    for key in keys:
        found = read_checkpoint(tmp_path, key=key).tensors
        assert found.keys() == WEIGHTS.keys()
        places.append(found["embed.weight"].pieces)
    assert places[0] != places[1]


@pytest.mark.parametrize(("folder", "step"), [
    ("checkpoint-10", 10), ("checkpoint_10", None), ("checkpoints/checkpoint_10", None), ("step-10", 10),
    ("checkpoint/step-10", 10), ("train/checkpoints/checkpoint-10", 10),
])  # fmt: skip
def test_newest_checkpoint_is_found_from_above(folder: str, step: int | None, tmp_path: Path) -> None:
    for name in (folder, f"{folder[:-2]}9"):
        dcp.save(WEIGHTS, checkpoint_id=tmp_path / name, no_dist=True)
    (tmp_path / f"{folder[:-2]}11").touch()  # a file, for example of another tool
    found = read_checkpoint(tmp_path)
    assert found.folder == tmp_path / folder and found.step == step


def test_no_checkpoint_no_key_and_a_transposed_tensor(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        read_checkpoint(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds no model 'model'\. Leave out --key, or name one of: none"):
        read_checkpoint(tmp_path, key="model")
    dcp.save({"model": {"w": torch.ones(3, 2).T}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (piece,) = read_checkpoint(tmp_path / "dcp").tensors["w"].pieces
    with pytest.raises(CheckpointError, match="is stored transposed or with gaps"):
        locate(piece.record, "F32")


@pytest.mark.parametrize(("shape", "boxes", "expected"), [
    ((4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))], True),
    ((4, 4), [((0, 0), (4, 1)), ((0, 1), (2, 3)), ((2, 1), (2, 3))], True),
    ((2, 2), [((0, 0), (2, 1)), ((0, 1), (1, 1)), ((1, 1), (1, 1))], True),
    ((), [((), ())], True), ((0, 3), [], True), ((3,), [((0,), (3,)), ((3,), (0,))], True),
    ((4, 2), [((0, 0), (2, 2)), ((1, 0), (2, 2))], False), ((4, 2), [((0, 0), (2, 2)), ((0, 0), (2, 2))], False),
    ((4, 2), [((0, 0), (2, 2))], False), ((4,), [((0,), (2,)), ((3,), (2,))], False), ((), [], False),
])  # fmt: skip
def test_boxes_divide_a_tensor(shape: tuple[int, ...], boxes: list[Any], expected: bool) -> None:
    assert covers(shape, boxes) is expected


@pytest.mark.parametrize(("old", "new", "message"), [
    (b"\x8c\x05model", b"\x8c\x05modem", r"the path of model\.embed\.weight has an unexpected value"),
    (b"model.embed", b"model.ember", r"the path of model\.ember\.weight has an unexpected value"),
    (b"planner_data", b"planner_date", "has no field 'planner_data'"),
    (b"\x07offsets", b"\x07offsetz", r"ChunkStorageMetadata in it has no field 'offsets'"),
])  # fmt: skip
def test_a_damaged_name_neither_renames_nor_hides_tensors(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    dcp.save({"model": WEIGHTS}, checkpoint_id=tmp_path, no_dist=True)
    content = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(content.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path)

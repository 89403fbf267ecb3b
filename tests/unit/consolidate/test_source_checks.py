"""Files of two saves or ranks are found by what is in them; doubts are reported."""

import io
import os
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardmake.checkpoint.formats.registry import read_checkpoint
from shardmake.checkpoint.formats.zero_files import load_files
from shardmake.consolidate.source_checks import SourceReport, check_source
from shardmake.core.errors import CheckpointError

SHAPES = OrderedDict({"a": torch.Size([4, 6]), "b": torch.Size([10])})
ELEMENTS = sum(shape.numel() for shape in SHAPES.values())
RANKS = 2


class Stage(int, Enum):
    """DeepSpeed's enumeration."""

    gradients = 2
    weights = 3


class ByName(int):
    """A member as Python 3.11.0 to 3.11.3 pickle it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Stage, Stage(self).name)


def write_zero(folder: Path, stage: int, step: int = 2, counted: int | None = None, skipped: int = 0) -> Path:
    """Write a checkpoint of ZeRO-2 or 3 on two ranks at ``step``; its optimizer counts ``counted`` steps."""
    inner = folder / f"global_step{step}"
    inner.mkdir(parents=True)
    (folder / "latest").write_text(inner.name)
    flat = torch.arange(float(ELEMENTS)) / 7 + step
    split = [flat[: ELEMENTS // 2], flat[ELEMENTS // 2 :]]
    half = dict(zip(SHAPES, flat.to(torch.bfloat16).split([24, 10]), strict=True))
    module = {name: half[name].view(shape) if stage == 2 else torch.empty(0) for name, shape in SHAPES.items()}
    model: dict[str, Any] = {
        "module": module, "param_shapes": [SHAPES], "global_steps": step, "skipped_steps": skipped, "buffer_names": [],
        "ds_config": {"zero_optimization": {"stage": stage}},
    }  # fmt: skip
    adam = {0: {"step": torch.tensor(float(step - skipped if counted is None else counted))}}
    for rank in range(RANKS):
        state = {
            "zero_stage": [Stage(stage), ByName(stage)][rank % 2],
            "partition_count": RANKS,
            "optimizer_state_dict": {"state": adam, "param_groups": [{"lr": 0.1}]},
            "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups": [split[rank].clone()],
        }
        torch.save({"optimizer_state_dict": state}, inner / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3:
            torch.save(model, inner / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage == 2:
        torch.save(model, inner / "mp_rank_00_model_states.pt")
    return inner


def checked(folder: Path, **settings: Any) -> SourceReport:
    return check_source(read_checkpoint(folder, "keep"), **settings)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("skipped", [0, 1])
def test_checkpoint_of_one_save(tmp_path: Path, stage: int, skipped: int) -> None:
    write_zero(tmp_path, stage, skipped=skipped)
    assert checked(tmp_path) == SourceReport(None, 2, ())


def test_model_files_of_other_ranks_are_kept_in_part(tmp_path: Path) -> None:
    """With hundreds of ranks, the names of all tensors in each of their files would fill the memory."""
    first, second = load_files(write_zero(tmp_path, 3)).model
    assert {"module", "param_shapes"} <= first.keys() and second.keys() == {"global_steps"}


@pytest.mark.parametrize("counted", [1, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_optimizer_of_another_step(tmp_path: Path, stage: int, counted: int) -> None:
    write_zero(tmp_path, stage, counted=counted)
    with pytest.raises(CheckpointError, match=rf"step 2 \(0 skipped\), but its optimizer counts {counted} steps"):
        checked(tmp_path)
    assert checked(tmp_path, allow=["steps"]).warnings == ()


def test_master_weights_of_another_step(tmp_path: Path) -> None:
    """An optimizer without steps, such as plain SGD."""
    inner = write_zero(tmp_path, 2)
    other = write_zero(tmp_path / "other", 2, step=3)
    for rank in range(RANKS):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(other / name, weights_only=False)
        state["optimizer_state_dict"]["optimizer_state_dict"]["state"] = {}
        torch.save(state, inner / name)
    with pytest.raises(
        CheckpointError, match=r"The fp32 weights of a in .*optim_states\.pt, rounded to bfloat16, are not"
    ):
        checked(tmp_path)


def test_zero_without_its_optimizer_files(tmp_path: Path) -> None:
    inner = write_zero(tmp_path, 2)
    for path in inner.glob("*optim_states.pt"):
        path.unlink()
    (warning,) = checked(tmp_path).warnings
    assert "holds no optimizer files of ZeRO-2" in warning and "rounded ones (bfloat16)" in warning


@pytest.mark.parametrize("stage", [2, 3])
def test_odd_entries_are_no_reason_to_fail(tmp_path: Path, stage: int) -> None:
    inner = write_zero(tmp_path, stage)
    for path in inner.glob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        torch.save({**state, "ds_config": None, "skipped_steps": "none"}, path)
    os.mkfifo(inner / "other_states.pt")
    (inner / "more_states.pt").mkdir()
    (inner / "lost_states.pt").symlink_to("nowhere")
    assert checked(tmp_path).warnings == ()


def test_files_written_far_apart_are_reported(tmp_path: Path) -> None:
    inner = write_zero(tmp_path, 3)
    path = inner / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.utime(path, (0, path.stat().st_mtime - 3600))
    (warning,) = checked(tmp_path).warnings
    assert f"{path.name} (1 of 4 files) was written 60 minutes apart" in warning


@pytest.mark.parametrize("kind", ["zero2", "zero3", "dcp"])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_extra_states_of_modules(kind: str, is_tensor: bool, tmp_path: Path) -> None:
    """A tensor stays, as a tensor that the model's class may not have; anything else is left out and reported."""
    state = torch.arange(5, dtype=torch.uint8) if is_tensor else io.BytesIO(b"scales")
    if kind == "dcp":
        dcp.save({"model": {"a": torch.ones(3), "b._extra_state": state}}, checkpoint_id=tmp_path, no_dist=True)
    else:
        for path in write_zero(tmp_path, int(kind[-1])).glob("*model_states.pt"):
            held = torch.load(path, weights_only=False)
            torch.save({**held, "module": {**held["module"], "b._extra_state": state}}, path)
    contents = read_checkpoint(tmp_path)
    assert ("b._extra_state" in contents.tensors) == is_tensor and "a" in contents.tensors
    warnings = checked(tmp_path).warnings
    assert warnings == () if is_tensor else "b._extra_state (1 such entries)" in warnings[0]


@pytest.mark.parametrize("latest", [b"../other/global_step2", b"/etc", b"..", b"", b"\xff\x00/x"])
def test_latest_that_names_another_place(tmp_path: Path, latest: bytes) -> None:
    write_zero(tmp_path / "run", 3)
    write_zero(tmp_path / "other", 3)
    (tmp_path / "run" / "latest").write_bytes(latest)
    with pytest.raises(CheckpointError, match="which is not a folder beside it"):
        read_checkpoint(tmp_path / "run")


def test_step_of_an_fsdp_checkpoint_comes_from_the_trainer(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "last" / "pytorch_model_fsdp_0", no_dist=True)
    assert checked(tmp_path / "last").step is None
    (tmp_path / "last" / "trainer_state.json").write_text('{"global_step": 12}')
    assert checked(tmp_path / "last").step == 12

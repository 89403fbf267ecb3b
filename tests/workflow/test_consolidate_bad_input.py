"""Damaged checkpoints are reported by file, and a failed merge leaves no output behind."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.registry import read_checkpoint
from shardmake.consolidate.merge import consolidate
from shardmake.core.errors import ShardmakeError

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("loading_in_process")]
STEP = "checkpoint-2/global_step2"
FSDP = "checkpoint-2/pytorch_model_fsdp_0"
MODEL_STATES = f"{STEP}/mp_rank_00_model_states.pt"
VARIANTS = {"zero3": ("zero", 3, "zero3-tied"), "zero1": ("zero", 2, "zero1-frozen"), "fsdp": ("fsdp", 3, "plain")}
Copied = Callable[[str], Path]


def file_of(rank: int, kind: str = "optim") -> str:
    return f"{STEP}/zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


@pytest.fixture
def copied(variant_of: Callable[[str, int, str], Path], tmp_path: Path) -> Copied:
    return lambda kind: Path(shutil.copytree(variant_of(*VARIANTS[kind]), tmp_path / kind))


def assert_fails(variant: Path, message: str) -> None:
    """Check that the merge fails with ``message`` and leaves no file behind."""
    out = variant.parent / "model"
    with pytest.raises(ShardmakeError, match=message):
        consolidate(variant / "checkpoint-2", out, base=variant / "base")
    assert not out.exists()
    assert not (out.parent / ".model.partial").exists()


def truncate(share: float) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file_of(1), int((folder / file_of(1)).stat().st_size * share))


def rewrite_step(path: Path, step: float) -> None:
    """Save the optimizer file again with another ``step``, and so with valid checksums."""
    state = torch.load(path, weights_only=False)
    for values in state["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        values["step"].fill_(step)
    torch.save(state, path)


def rewrite_all_steps(folder: Path) -> None:
    for path in (folder / STEP).glob("*_optim_states.pt"):
        rewrite_step(path, 4.0)


def rename_step(folder: Path) -> None:
    (folder / STEP).rename(folder / "checkpoint-2/global_step9")
    (folder / "checkpoint-2/latest").write_text("global_step9")


def flip_bit(ref: unpickle.TensorRef, byte: int) -> None:
    with ref.record.path.open("r+b") as file:
        file.seek(ref.record.offset + ref.offset + byte)
        value = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([value ^ 1]))


def flip_bit_of_fsdp(folder: Path) -> None:
    piece = read_checkpoint(folder).tensors["model.layers.0.mlp.up_proj.weight"].pieces[1]
    flip_bit(unpickle.TensorRef(unpickle.locate(piece.record, "F32"), 0, "F32", (1,), (1,)), 77)


def change_config(folder: Path) -> None:
    config = json.loads((folder / "base/config.json").read_text())
    (folder / "base/config.json").write_text(json.dumps({**config, "hidden_size": 32, "num_hidden_layers": 3}))


def add_experts(folder: Path) -> None:
    states = torch.load(folder / MODEL_STATES, weights_only=False)
    torch.save({**states, "ds_autoep_layers": {"layers.0": 4}}, folder / MODEL_STATES)


def swap_ranks(folder: Path, kind: str = "optim") -> None:
    """Swap the files of two ranks, whose sizes match."""
    first, second = (folder / file_of(rank, kind) for rank in (0, 1))
    first.rename(folder / "kept")
    second.rename(first)
    (folder / "kept").rename(second)


def add(name: str) -> Callable[[Path], Any]:
    return lambda folder: shutil.copy(folder / MODEL_STATES, folder / STEP / name)


UNSUPPORTED = {
    "layer_0_expert_1_mp_rank_00_model_states.pt": "mixture-of-experts",
    "expp_rank_0_mp_rank_00_optim_states.pt": "mixture-of-experts",
    "mp_rank_01_model_states.pt": "tensor or model parallelism",
    "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt": "tensor or model parallelism",
    "layer_03-model_00-model_states.pt": "pipeline parallelism",
}
DAMAGED = r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is damaged"
CASES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing rank": ("zero3", lambda folder: (folder / file_of(1)).unlink(), "lacks the files of rank 1"),
    "missing rank of the model": ("zero3", lambda folder: (folder / file_of(1, "model")).unlink(), "lacks the files of rank 1"),
    "missing last rank": ("zero3", lambda folder: (folder / file_of(2)).unlink(), "was written by 3 ranks, but .* holds the optimizer files of 2"),
    "additional rank": (
        "zero3", lambda folder: shutil.copy(folder / file_of(1), folder / file_of(3)), "was written by 3 ranks, but .* holds the optimizer files of 4",
    ),
    "truncated file": ("zero3", truncate(0), DAMAGED),
    "truncated file, half": ("zero3", truncate(0.5), DAMAGED),
    "truncated file, its end": ("zero3", truncate(0.999), DAMAGED),
    # A file of another save of the same training, which DeepSpeed's own tool silently merges.
    "files of two steps": (
        "zero3", lambda folder: rewrite_step(folder / file_of(1), 1.0),
        r"mixes files of different saves \(optimizer step of rank 0: 2.0, rank 1: 1.0, rank 2: 2.0\)",
    ),
    "folder name of another step": ("zero3", rename_step, "global_step9 holds files of step 2"),
    "latest names a missing folder": (
        "zero3", lambda folder: (folder / "checkpoint-2/latest").write_text("global_step4"), "latest names global_step4, which is not a complete checkpoint",
    ),
    # torch.load and zero_to_fp32 never check the checksum in the file.
    "flipped bit in a shard": (
        "zero3", lambda folder: flip_bit(unpickle.load(folder / file_of(1))["optimizer_state_dict"]["fp32_flat_groups"][0], 4001),
        rf"{DAMAGED}: the \d+ bytes from byte",
    ),
    "flipped bit in an FSDP shard": ("fsdp", flip_bit_of_fsdp, r"__1_0\.distcp is damaged: the \d+ bytes from byte"),
    "no metadata": ("fsdp", lambda folder: (folder / FSDP / ".metadata").unlink(), "has no .metadata. The checkpoint was not finished"),
    "no shard": ("fsdp", lambda folder: (folder / FSDP / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing"),
    "short shard": ("fsdp", lambda folder: os.truncate(folder / FSDP / "__1_0.distcp", 5000), r"__1_0\.distcp has 5000 bytes, but .metadata"),
    "short metadata": ("fsdp", lambda folder: os.truncate(folder / FSDP / ".metadata", 500), r"\.metadata cannot be read"),
    "another model": ("zero3", change_config, r"does not fit the model's config\.json(.|\n)*model\.layers\.2\.\S+ is missing"),
    "missing config": ("zero3", lambda folder: shutil.rmtree(folder / "base"), r"There is no config\.json in .*--base"),
    "experts of AutoEP": ("zero1", add_experts, "belongs to DeepSpeed's AutoEP"),
    # All sizes match, and DeepSpeed's own tool merges the files.
    "swapped ranks": ("zero3", swap_ranks, rf"{Path(file_of(0)).name} was written as {Path(file_of(1)).name}"),
    "swapped ranks of the model": (
        "zero3", lambda folder: swap_ranks(folder, "model"), rf"{Path(file_of(0, 'model')).name} was written as {Path(file_of(1, 'model')).name}",
    ),
    "optimizer of another save": ("zero3", rewrite_all_steps, r"holds a model of step 2 \(0 skipped\), but its optimizer counts 4 steps"),
    **{
        name: ("zero1", add(name), rf"{name}\. The file belongs to .*{feature}.*ds_to_universal")
        for name, feature in UNSUPPORTED.items()
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "damage", "message"), CASES.values(), ids=CASES)
def test_damage_is_reported_by_file(copied: Copied, kind: str, damage: Callable[[Path], Any], message: str) -> None:
    variant = copied(kind)
    damage(variant)
    assert_fails(variant, message)


def test_rank_of_another_run(copied: Copied, variant_of: Callable[[str, int, str], Path]) -> None:
    zero3 = copied("zero3")
    shutil.copy(variant_of("zero", 2, "zero3-lora") / file_of(1), zero3 / file_of(1))
    assert_fails(zero3, r"zero_pp_rank_1_mp_rank_00_optim_states\.pt was written by 2 ranks, but .* holds .* of 3")


def test_swapped_slices(copied: Copied) -> None:
    """The ZeRO-1 files of two ranks are swapped: the sizes match, but param_slice_mappings do not."""
    swap_ranks(zero1 := copied("zero1"))
    with pytest.raises(ShardmakeError, match=r"by param_slice_mappings\. The files do not belong together"):
        read_checkpoint(zero1, "bf16")


def test_older_checkpoint_of_a_run_is_used(copied: Copied, tmp_path: Path) -> None:
    zero3, checkpoints = copied("zero3"), tmp_path / "run/train/checkpoints"
    shutil.copytree(zero3 / "checkpoint-2", checkpoints / "checkpoint-2")
    shutil.copytree(zero3 / "checkpoint-2", checkpoints / "checkpoint-10")
    (checkpoints / "checkpoint-10" / Path(file_of(1)).relative_to("checkpoint-2")).unlink()
    found = read_checkpoint(tmp_path / "run")
    assert found.folder == checkpoints / STEP
    assert len(found.notes) == 1 and "lacks the files of rank 1" in found.notes[0]


def test_two_merges_into_one_folder(copied: Copied, tmp_path: Path) -> None:
    zero3, staging = copied("zero3"), tmp_path / ".model.partial"
    staging.mkdir()
    with (staging / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ShardmakeError, match="Another merge is writing"):
            consolidate(zero3, tmp_path / "model", base=zero3 / "base")


def test_failed_merge_keeps_the_existing_model(copied: Copied, tmp_path: Path) -> None:
    zero3 = copied("zero3")
    consolidate(zero3, tmp_path / "model", base=zero3 / "base")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    os.truncate(zero3 / file_of(1), 100)
    with pytest.raises(ShardmakeError, match="is damaged"):
        consolidate(zero3, tmp_path / "model", base=zero3 / "base")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before

"""Damaged checkpoints are reported by file, and a failed merge leaves no output behind."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.registry import read_checkpoint
from shardmake.consolidate.merge import consolidate
from shardmake.core.errors import ShardmakeError
from tests.workflow.consolidate_checkpoints import check_loading_in_process, trained

pytestmark = pytest.mark.training
STEP = "checkpoint-2/global_step2"
RANK1 = f"{STEP}/zero_pp_rank_1_mp_rank_00_optim_states.pt"
FSDP = "checkpoint-2/pytorch_model_fsdp_0"


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    check_loading_in_process(monkeypatch)


@pytest.fixture
def zero3(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = trained(tmp_path_factory.getbasetemp(), "zero", 3) / "zero3-tied"
    return Path(shutil.copytree(source, tmp_path / "zero3"))


@pytest.fixture
def zero1(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = trained(tmp_path_factory.getbasetemp(), "zero", 2) / "zero1-frozen"
    return Path(shutil.copytree(source, tmp_path / "zero1"))


@pytest.fixture
def fsdp(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = trained(tmp_path_factory.getbasetemp(), "fsdp", 3) / "plain"
    return Path(shutil.copytree(source, tmp_path / "fsdp"))


def assert_fails(variant: Path, message: str) -> None:
    """Check that the merge fails with ``message`` and leaves no file behind."""
    out = variant.parent / "model"
    with pytest.raises(ShardmakeError, match=message):
        consolidate(variant / "checkpoint-2", out, base=variant / "base")
    assert not out.exists()
    assert not (out.parent / ".model.partial").exists()


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_missing_rank(zero3: Path, kind: str) -> None:
    (zero3 / STEP / f"zero_pp_rank_1_mp_rank_00_{kind}_states.pt").unlink()
    assert_fails(zero3, "lacks the files of rank 1")


def test_missing_last_rank(zero3: Path) -> None:
    (zero3 / STEP / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    assert_fails(zero3, "was written by 3 ranks, but .* holds the optimizer files of 2")


def test_additional_rank(zero3: Path) -> None:
    shutil.copy(zero3 / RANK1, zero3 / STEP / "zero_pp_rank_3_mp_rank_00_optim_states.pt")
    assert_fails(zero3, "was written by 3 ranks, but .* holds the optimizer files of 4")


def test_rank_of_another_run(zero3: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = trained(tmp_path_factory.getbasetemp(), "zero", 2) / "zero3-lora" / RANK1
    shutil.copy(other, zero3 / RANK1)
    assert_fails(zero3, r"zero_pp_rank_1_mp_rank_00_optim_states\.pt was written by 2 ranks, but .* holds .* of 3")


@pytest.mark.parametrize("keep", [0, 0.5, 0.999])
def test_truncated_file(zero3: Path, keep: float) -> None:
    os.truncate(zero3 / RANK1, int((zero3 / RANK1).stat().st_size * keep))
    assert_fails(zero3, r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is damaged")


def test_files_of_two_steps(zero3: Path, tmp_path: Path) -> None:
    """A file of another save of the same training, which DeepSpeed's own tool silently merges."""
    from tests.workflow.consolidate_damage import rewrite_step

    rewrite_step(zero3 / RANK1, 1.0)
    assert_fails(zero3, r"mixes files of different saves \(optimizer step of rank 0: 2.0, rank 1: 1.0, rank 2: 2.0\)")


def test_folder_name_of_another_step(zero3: Path) -> None:
    (zero3 / STEP).rename(zero3 / "checkpoint-2" / "global_step9")
    (zero3 / "checkpoint-2" / "latest").write_text("global_step9")
    assert_fails(zero3, "global_step9 holds files of step 2")


def test_latest_names_a_missing_folder(zero3: Path) -> None:
    (zero3 / "checkpoint-2" / "latest").write_text("global_step4")
    assert_fails(zero3, "latest names global_step4, which is not a complete checkpoint")


def flip_bit(ref: unpickle.TensorRef, byte: int) -> None:
    with ref.record.path.open("r+b") as file:
        file.seek(ref.record.offset + ref.offset + byte)
        value = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([value ^ 1]))


def test_flipped_bit_in_a_shard(zero3: Path) -> None:
    """torch.load and zero_to_fp32 never check the checksum in the file."""
    flip_bit(unpickle.load(zero3 / RANK1)["optimizer_state_dict"]["fp32_flat_groups"][0], 4001)
    assert_fails(zero3, r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is damaged: the \d+ bytes from byte")


def test_flipped_bit_in_an_fsdp_shard(fsdp: Path) -> None:
    piece = read_checkpoint(fsdp).tensors["model.layers.0.mlp.up_proj.weight"].pieces[1]
    record = unpickle.locate(piece.record, "F32")
    flip_bit(unpickle.TensorRef(record, 0, "F32", (1,), (1,)), 77)
    assert_fails(fsdp, r"__1_0\.distcp is damaged: the \d+ bytes from byte")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / ".metadata").unlink(), "has no .metadata. The checkpoint was not finished"),
        (lambda folder: (folder / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing"),
        (lambda folder: os.truncate(folder / "__1_0.distcp", 5000), r"__1_0\.distcp has 5000 bytes, but .metadata"),
        (lambda folder: os.truncate(folder / ".metadata", 500), r"\.metadata cannot be read"),
    ],
)
def test_incomplete_fsdp_checkpoint(fsdp: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(fsdp / FSDP)
    assert_fails(fsdp, message)


def test_checkpoint_of_another_model(zero3: Path) -> None:
    config = json.loads((zero3 / "base" / "config.json").read_text())
    (zero3 / "base" / "config.json").write_text(json.dumps({**config, "hidden_size": 32, "num_hidden_layers": 3}))
    assert_fails(zero3, r"does not fit the model's config\.json(.|\n)*model\.layers\.2\.\S+ is missing")


def test_missing_config(zero3: Path) -> None:
    shutil.rmtree(zero3 / "base")
    assert_fails(zero3, r"There is no config\.json in .*--base")


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixture-of-experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mixture-of-experts"),
        ("mp_rank_01_model_states.pt", "tensor or model parallelism"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or model parallelism"),
        ("layer_03-model_00-model_states.pt", "pipeline parallelism"),
    ],
)
def test_unsupported_layout(zero1: Path, name: str, feature: str) -> None:
    shutil.copy(zero1 / STEP / "mp_rank_00_model_states.pt", zero1 / STEP / name)
    assert_fails(zero1, rf"{name}\. The file belongs to .*{feature}.*ds_to_universal")


def test_autoep_experts(zero1: Path) -> None:
    path = zero1 / STEP / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "ds_autoep_layers": {"layers.0": 4}}, path)
    assert_fails(zero1, "belongs to DeepSpeed's AutoEP")


def test_swapped_slices(zero1: Path) -> None:
    """The ZeRO-1 files of two ranks are swapped: the sizes match, but param_slice_mappings do not."""
    files = [zero1 / STEP / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    files[0].rename(zero1 / "kept")
    files[1].rename(files[0])
    (zero1 / "kept").rename(files[1])
    with pytest.raises(ShardmakeError, match=r"by param_slice_mappings\. The files do not belong together"):
        read_checkpoint(zero1, "bf16")


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_swapped_ranks_of_zero3(zero3: Path, kind: str) -> None:
    """All sizes match, and DeepSpeed's own tool merges the files."""
    files = [zero3 / STEP / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1)]
    files[0].rename(zero3 / "kept")
    files[1].rename(files[0])
    (zero3 / "kept").rename(files[1])
    assert_fails(zero3, rf"{files[0].name} was written as {files[1].name}")


def test_optimizer_files_of_another_save(zero3: Path) -> None:
    from tests.workflow.consolidate_damage import rewrite_step

    for path in (zero3 / STEP).glob("*_optim_states.pt"):
        rewrite_step(path, 4.0)
    assert_fails(zero3, r"holds a model of step 2 \(0 skipped\), but its optimizer counts 4 steps")


def test_older_checkpoint_of_a_run_is_used(zero3: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "train" / "checkpoints"
    shutil.copytree(zero3 / "checkpoint-2", checkpoints / "checkpoint-2")
    shutil.copytree(zero3 / "checkpoint-2", checkpoints / "checkpoint-10")
    (checkpoints / "checkpoint-10" / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    found = read_checkpoint(tmp_path / "run")
    assert found.folder == checkpoints / "checkpoint-2" / "global_step2"
    assert len(found.notes) == 1 and "lacks the files of rank 1" in found.notes[0]


def test_two_merges_into_one_folder(zero3: Path, tmp_path: Path) -> None:
    staging = tmp_path / ".model.partial"
    staging.mkdir()
    with (staging / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ShardmakeError, match="Another merge is writing"):
            consolidate(zero3, tmp_path / "model", base=zero3 / "base")


def test_failed_merge_keeps_the_existing_model(zero3: Path, tmp_path: Path) -> None:
    consolidate(zero3, tmp_path / "model", base=zero3 / "base")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    os.truncate(zero3 / RANK1, 100)
    with pytest.raises(ShardmakeError, match="is damaged"):
        consolidate(zero3, tmp_path / "model", base=zero3 / "base")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before

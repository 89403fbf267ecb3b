"""Merging checkpoints of real training: equal bit for bit to the ranks' weights, and adapters as PEFT merges them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import merge_fsdp_weights
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import LlamaConfig, LlamaForCausalLM

from shardmake.checkpoint.formats.dtypes import Target
from shardmake.checkpoint.formats.zero import MOMENTS, inner_folder, read_states
from shardmake.checkpoint.formats.zero_files import SWAP_FOLDER, write_swap_ids
from shardmake.checkpoint.reshard.states import read_tensor
from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.verify import verify
from shardmake.core.errors import ShardmakeError
from tests.workflow.consolidate_checkpoints import (
    FSDP,
    SHAPE,
    ZERO,
    assert_equal,
    expected_weights,
    load_weights,
    merged,
)

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("loading_in_process")]
VariantOf = Callable[[str, int, str], Path]
# A checkpoint without its frozen base is not a model; another test merges it into the base.
BY_DEEPSPEED = [("zero", world, name) for world, names in ZERO.items() for name in names if "nobase" not in name]
BY_FSDP = [("fsdp", world, name) for world, names in FSDP.items() for name in names]
OF_DCP = [case for case in BY_FSDP if not case[2].startswith(("perrank", "verl"))]


@pytest.fixture
def variant(request: pytest.FixtureRequest, variant_of: VariantOf) -> Path:
    return variant_of(*request.param)


def of_variants(cases: list[tuple[str, int, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("variant", cases, ids=lambda case: f"{case[2]}-{case[1]}ranks", indirect=True)


@pytest.mark.parametrize("target", ["keep", "bf16", "fp16", "fp32"])
@of_variants([*BY_DEEPSPEED, *BY_FSDP])
def test_merge_equals_the_ranks_weights(variant: Path, tmp_path: Path, target: str) -> None:
    ours = merged(variant / "checkpoint-2", tmp_path / "out", target)
    if "tied" in variant.name and variant.parent.name.startswith("fsdp"):  # FSDP2 stores both; `consolidate` drops one
        assert torch.equal(ours.pop("lm_head.weight"), ours["model.embed_tokens.weight"])
    assert_equal(ours, expected_weights(variant, target))


@of_variants(BY_DEEPSPEED)
def test_merge_equals_deepspeeds_own_tool_where_that_is_correct(variant: Path, tmp_path: Path) -> None:
    """zero_to_fp32 cannot read BF16_Optimizer's files, stores tied weights twice and loses ZeRO-1's frozen weights."""
    ours = merged(variant / "checkpoint-2", tmp_path / "out")
    if "accumfp32" in variant.name:
        with pytest.raises(ValueError, match="is not a zero checkpoint"):
            get_fp32_state_dict_from_zero_checkpoint(str(variant / "checkpoint-2"))
        return
    official = get_fp32_state_dict_from_zero_checkpoint(str(variant / "checkpoint-2"))
    lost = ours.keys() - official.keys()
    assert bool(lost) == variant.name.startswith("zero1-frozen")
    both = ours.keys() & official.keys()
    assert_equal({name: ours[name] for name in both}, {name: official[name] for name in both})


@of_variants([case for case in BY_DEEPSPEED if "universal" in case[2]])
def test_universal_checkpoint(variant: Path, tmp_path: Path) -> None:
    universal = Path(shutil.copytree(variant / "universal", tmp_path / "universal"))
    assert_equal(merged(universal, tmp_path / "out"), expected_weights(variant))
    shutil.rmtree(universal / "zero" / "model.norm.weight")
    with pytest.raises(ShardmakeError, match=r"model\.norm\.weight/fp32\.pt is missing"):
        merged(universal, tmp_path / "other")


@of_variants(OF_DCP)
def test_merge_equals_torchs_own_tool(variant: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(variant / "checkpoint-2" / "pytorch_model_fsdp_0", tmp_path / "official.pt")
    official = torch.load(tmp_path / "official.pt")
    assert_equal(merged(variant / "checkpoint-2", tmp_path / "out"), official.get("model", official))


def test_merge_equals_accelerates_own_tool(tmp_path: Path, variant_of: VariantOf) -> None:
    variant = variant_of("fsdp", 3, "plain")
    merge_fsdp_weights(str(variant / "checkpoint-2" / "pytorch_model_fsdp_0"), str(tmp_path / "accelerate"))
    assert_equal(merged(variant / "checkpoint-2", tmp_path / "out"), load_weights(tmp_path / "accelerate"))


def test_tied_weight_is_stored_once(variant_of: VariantOf, tmp_path: Path) -> None:
    variant = variant_of("fsdp", 2, "trainer-tied")
    receipt = consolidate(variant, tmp_path / "model", base=variant / "base")
    assert receipt.step == 2
    assert receipt.verification.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert_equal(load_weights(tmp_path / "model"), expected_weights(variant))


def test_tied_weights_with_different_values_are_an_error(variant_of: VariantOf, tmp_path: Path) -> None:
    variant = variant_of("fsdp", 2, "trainer-tied")
    state = {"model": expected_weights(variant)}
    state["model"]["lm_head.weight"] = state["model"]["model.embed_tokens.weight"] + 1
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    with pytest.raises(ShardmakeError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
        consolidate(tmp_path / "checkpoint", tmp_path / "model", base=variant / "base")
    assert not (tmp_path / "model").exists()


def test_scalars_integers_and_empty_tensors(tmp_path: Path) -> None:
    """torch's own consolidation to safetensors turns a 0-dim tensor into 0.0 and fails for integers."""
    state = {
        "scalar": torch.tensor(3.5), "count": torch.tensor(7), "empty": torch.empty(0, 4), "mask": torch.ones(3).bool(),
        "double": torch.rand(3, 2).double(), "small": torch.rand(4, 4).to(torch.float8_e4m3fn),
    }  # fmt: skip
    dcp.save({"model": state}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    ours = merged(tmp_path / "checkpoint", tmp_path / "out")
    assert {name: (t.dtype, t.shape) for name, t in ours.items()} == {n: (t.dtype, t.shape) for n, t in state.items()}
    assert all(torch.equal(ours[name].view(torch.uint8), state[name].view(torch.uint8)) for name in ("small", "double"))
    assert ours["scalar"] == 3.5 and ours["count"] == 7 and ours["mask"].all()


# --- ZeRO-3 with the optimizer on NVMe, swapped out as DeepSpeed does it; `make test-nvme` has DeepSpeed do it ----------

SWAPPED = [("zero", 4, "zero3-bf16-subgroups"), ("zero", 2, "zero3-subgroups-resnet"), ("zero", 3, "zero3-tied")]
ALIGNED = 4096


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


@of_variants(SWAPPED)
def test_a_merge_from_swap_files_is_unchanged(variant: Path, swapped: Path, tmp_path: Path) -> None:
    assert_equal(merged(swapped.parent, tmp_path / "out"), expected_weights(variant))


@of_variants(SWAPPED)
def test_states_for_resharding_are_unchanged(variant: Path, swapped: Path) -> None:
    def values(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for kind, tensors in read_states(folder).items():
            yield from ((f"{kind} {name}", read_tensor(tensor)) for name, tensor in tensors.items())

    assert_equal(dict(values(swapped)), dict(values(inner_folder(variant / "checkpoint-2"))))


@of_variants(SWAPPED)
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


def save_adapter(tmp_path: Path) -> tuple[Path, Path]:
    """Save a model in bf16 and an adapter for it with random factors; return their folders."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.rand_like(parameter, dtype=torch.float32) / 8
    adapted.save_pretrained(tmp_path / "checkpoint-7")
    return tmp_path / "base", tmp_path / "checkpoint-7"


@pytest.mark.parametrize(("dtype", "kind"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize(("world", "name"), [(1, "zero2-bf16-lora-nobase"), (2, "zero3-lora")])
def test_deepspeed_checkpoint_of_an_adapter(
    world: int, name: str, dtype: Target, kind: torch.dtype, tmp_path: Path,
    variant_of: Callable[[str, int, str], Path],
) -> None:  # fmt: skip
    """In each type, the factors are the fp32 weights of the optimizer."""
    variant = variant_of("zero", world, name)
    consolidate(variant / "checkpoint-2", tmp_path / "model", base=variant / "base", dtype=dtype)
    verify(tmp_path / "model", variant / "checkpoint-2", base=variant / "base")
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(variant / "base", dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"),
    )
    factors = {name: tensor for name, tensor in expected_weights(variant, "fp32").items() if ".lora_" in name}
    assert not adapted.load_state_dict(factors, strict=False).unexpected_keys
    assert_close(load_weights(tmp_path / "model"), adapted.merge_and_unload().state_dict(), kind)


def test_of_several_adapters_only_trls_reference_is_left_out(tmp_path: Path) -> None:
    """A state of the whole model, as `accelerator.save_state` writes it, has each adapter under its name."""
    base, adapter = save_adapter(tmp_path)
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    for number, name in enumerate(("ref", "other")):
        model.add_adapter(name, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
        state = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
        save_file(state, adapter / "model.safetensors")
        (adapter / "adapter_model.safetensors").unlink(missing_ok=True)
        if number == 0:
            consolidate(adapter, tmp_path / "model", base=base, dtype="fp32")
    with pytest.raises(ShardmakeError, match=r"It holds several adapters \(default, other\)"):
        consolidate(adapter, tmp_path / "again", base=base, dtype="fp32")
    assert_close(load_weights(tmp_path / "model"), model.merge_and_unload().state_dict(), torch.float32)


def test_adapter_of_another_model_is_an_error(tmp_path: Path) -> None:
    _, adapter = save_adapter(tmp_path)
    for name, size in (("hidden_size", 32), ("num_hidden_layers", 1)):
        LlamaForCausalLM(LlamaConfig(**SHAPE | {name: size})).save_pretrained(tmp_path / name)
        with pytest.raises(ShardmakeError, match="was trained on another model"):
            consolidate(adapter, tmp_path / "model", base=tmp_path / name)
    with pytest.raises(ShardmakeError, match="--base"):
        consolidate(adapter, tmp_path / "model")


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Compare up to the summation order of a matrix product and rounding to ``dtype``."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == dtype
        tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=tolerance, atol=1e-6)

"""Merging FSDP2 checkpoints of real training, saved by the Trainer and by torch itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import merge_fsdp_weights
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardmake.consolidate.merge import consolidate
from shardmake.core.errors import ShardmakeError
from tests.workflow.consolidate_checkpoints import FSDP, assert_equal, expected_weights, load_weights, merged
from tests.workflow.consolidate_train_fsdp import PER_RANK

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("loading_in_process")]
VARIANTS = [(world, variant) for world, variants in FSDP.items() for variant in variants]
VariantOf = Callable[[str, int, str], Path]


@pytest.fixture(params=VARIANTS, ids=lambda item: f"{item[1]}-{item[0]}ranks")
def variant(request: pytest.FixtureRequest, variant_of: VariantOf) -> Path:
    return variant_of("fsdp", *request.param)


@pytest.mark.parametrize("target", ["keep", "bf16", "fp16", "fp32"])
def test_merge_equals_the_ranks_weights(variant: Path, tmp_path: Path, target: str) -> None:
    ours = merged(variant / "checkpoint-2", tmp_path / "out", target)
    if "tied" in variant.name:  # FSDP2 stores both; `consolidate` drops one
        assert torch.equal(ours.pop("lm_head.weight"), ours["model.embed_tokens.weight"])
    assert_equal(ours, expected_weights(variant, target))


@pytest.mark.parametrize(("world", "name"), [item for item in VARIANTS if item[1].partition("-")[0] not in PER_RANK])
def test_merge_equals_torchs_own_tool(world: int, name: str, tmp_path: Path, variant_of: VariantOf) -> None:
    variant = variant_of("fsdp", world, name)
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

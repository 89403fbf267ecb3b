"""Merging DeepSpeed checkpoints of real training: equal bit for bit to the ranks' weights, at every world size."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from shardmake.core.errors import ShardmakeError
from tests.workflow.consolidate_checkpoints import ZERO, assert_equal, expected_weights, merged

pytestmark = pytest.mark.training
VariantOf = Callable[[str, int, str], Path]
# A checkpoint without its frozen base is not a model; test_consolidate_lora merges it into the base.
VARIANTS = [(world, name) for world, names in ZERO.items() for name in names if "nobase" not in name]


@pytest.fixture(params=VARIANTS, ids=lambda item: f"{item[1]}-{item[0]}ranks")
def variant(request: pytest.FixtureRequest, variant_of: VariantOf) -> Path:
    return variant_of("zero", *request.param)


@pytest.mark.parametrize("target", ["keep", "bf16", "fp16"])
def test_merge_equals_the_ranks_weights(variant: Path, tmp_path: Path, target: str) -> None:
    assert_equal(merged(variant / "checkpoint-2", tmp_path / "out", target), expected_weights(variant, target))


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


@pytest.mark.parametrize("name", [name for name in ZERO[2] if "universal" in name])
def test_universal_checkpoint(name: str, tmp_path: Path, variant_of: VariantOf) -> None:
    variant = variant_of("zero", 2, name)
    universal = Path(shutil.copytree(variant / "universal", tmp_path / "universal"))
    assert_equal(merged(universal, tmp_path / "out"), expected_weights(variant))
    shutil.rmtree(universal / "zero" / "model.norm.weight")
    with pytest.raises(ShardmakeError, match=r"model\.norm\.weight/fp32\.pt is missing"):
        merged(universal, tmp_path / "other")

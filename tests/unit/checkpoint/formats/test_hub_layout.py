"""Weights of a model folder as ranges of the parameters that a checkpoint holds."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM, conversion_mapping
from transformers import core_model_loading as loading
from transformers.core_model_loading import ConversionOps, WeightConverter

from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor, box_pieces
from shardmake.checkpoint.formats.hub_layout import HubWeight, Part, hub_weights, in_hub_layout
from shardmake.checkpoint.formats.lora import LoraUpdate
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.core.errors import CheckpointError, ModelError
from shardmake.memory.families import FAMILIES
from shardmake.run.adapter_settings import AdapterSettings

RECORD = ZipRecord(Path("file"), 0, 1 << 20, None)


def contents(*tensors: StoredTensor) -> Contents:
    return Contents("test", Path("checkpoint"), 1, 2, {tensor.name: tensor for tensor in tensors}, {"head": "experts"})


def stored_values(tensor: StoredTensor, file: np.ndarray) -> np.ndarray:
    """Return the tensor's elements from ``file``, an array of float32."""
    values = np.full(tensor.numel, np.nan, np.float32)
    for piece in tensor.pieces:
        for run in range(piece.runs):
            begin, at = piece.start // 4 + run * piece.count, piece.at + run * piece.stride
            values[at : at + piece.count] = file[begin : begin + piece.count]
    return values


@given(st.data())
def test_a_range_of_a_sharded_parameter_has_its_elements(data: st.DataObject) -> None:
    """The parameter [4, 6, 5] is stored in boxes that are cut along one of its dimensions, at any places."""
    shape = (4, 6, 5)
    dim = data.draw(st.integers(0, 2))
    cuts = sorted({0, shape[dim], *data.draw(st.lists(st.integers(0, shape[dim]), max_size=3))})
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    file, pieces = np.empty(0, np.float32), []
    for begin, end in itertools.pairwise(cuts):
        box = whole.take(range(begin, end), axis=dim)
        offsets = tuple(begin if index == dim else 0 for index in range(3))
        pieces += box_pieces(RECORD, 4 * file.size, 4, shape, (offsets, box.shape))
        file = np.concatenate([file, box.reshape(-1)])
    low = data.draw(st.integers(0, whole.size - 1))
    count = data.draw(st.integers(1, whole.size - low))
    weight = HubWeight("part", (count,), (Part("experts", low, count),))
    found = in_hub_layout(contents(StoredTensor("experts", "F32", shape, tuple(pieces))), [weight])
    assert list(found.tensors) == ["part"]
    assert np.array_equal(stored_values(found.tensors["part"], file), whole.reshape(-1)[low : low + count])


FACTORS = {"lora_A": StoredTensor("a", "F32", (1, 2), ()), "lora_B": StoredTensor("b", "F32", (2, 1), ())}
UPDATE = LoraUpdate("experts", FACTORS, AdapterSettings(r=1))
UPDATED = StoredTensor("experts", "F32", (2, 2), (Piece(RECORD, 8, 0, 4),), UPDATE)


def test_a_renamed_weight_keeps_its_pieces_its_update_and_its_ties() -> None:
    found = in_hub_layout(contents(UPDATED), [HubWeight("old.experts", (2, 2), (Part("experts", 0, 4),))])
    assert found.tensors == {"old.experts": StoredTensor("old.experts", "F32", (2, 2), UPDATED.pieces, UPDATE)}
    assert found.aliases == {"head": "old.experts"}


def test_an_update_of_rows_in_turn_is_refused_and_the_layout_of_the_folder_stays() -> None:
    with pytest.raises(CheckpointError, match=r"it updates experts, and the base model stores parts of it .* old\.0"):
        in_hub_layout(contents(UPDATED), [HubWeight("old.0", (2,), (Part("experts", 0, 1), Part("experts", 2, 1, 1)))])
    held = contents(StoredTensor("old.0", "F32", (2,), (Piece(RECORD, 0, 0, 2),)))
    assert in_hub_layout(held, [HubWeight("old.0", (2,), (Part("experts", 0, 2),))]) is held


class Doubled(ConversionOps):
    """Computes its result."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
        return {target_patterns[0]: 2 * next(iter(input_dict.values()))[0]}

    @property
    def reverse_op(self) -> "Doubled":
        return self


GATE_UP, GATE, UP = ("mlp.experts.gate_up_proj", "moe.gate.weight", "moe.up.weight")
CONVERSIONS = {
    "split in the second dimension": WeightConverter([GATE, UP], GATE_UP, operations=[loading.Concatenate(1)]),
    "rows of two parts in turn": WeightConverter("w13", GATE_UP, operations=[loading.Interleave(1)]),
    "stacked, then split": WeightConverter(
        ["moe.*.gate", "moe.*.up"], GATE_UP, operations=[loading.MergeModulelist(0), loading.Concatenate(1)]
    ),
    "transposed": WeightConverter("kernel", "self_attn.o_proj.weight", operations=[loading.Transpose(0, 1)]),
}
if hasattr(loading, "Split"):  # transformers 5.17 has no such conversion
    projections = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    CONVERSIONS["several parameters"] = WeightConverter("qkv", projections, operations=[loading.Split(0)])


def small_mixture(device: str) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "moe_intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 4, "num_experts": 3, "num_experts_per_tok": 1, "vocab_size": 32}
    config = Qwen3MoeConfig(**sizes)
    with torch.device(device):
        return Qwen3MoeForCausalLM(config)


def convert_by(monkeypatch: pytest.MonkeyPatch, converter: WeightConverter) -> None:
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [copy.deepcopy(converter)])


@pytest.mark.parametrize("converter", CONVERSIONS.values(), ids=CONVERSIONS)
def test_weights_are_those_that_transformers_saves(monkeypatch: pytest.MonkeyPatch, converter: WeightConverter) -> None:
    """The parameters are stored in two pieces that are cut anywhere, as ZeRO cuts them."""
    convert_by(monkeypatch, converter)
    model, at, pieces = small_mixture("cpu"), 0, {}
    for name, value in model.state_dict().items():
        cut = (value.numel() * 3) // 7
        parts = [Piece(RECORD, 4 * (at + low), low, high - low) for low, high in ((0, cut), (cut, value.numel()))]
        pieces[name] = StoredTensor(name, "F32", tuple(value.shape), tuple(part for part in parts if part.count))
        at += value.numel()
    file = torch.cat([value.flatten() for value in model.state_dict().values()]).numpy()
    found = in_hub_layout(contents(*pieces.values()), hub_weights(small_mixture("meta"), None)).tensors
    model._weight_conversions = None
    wanted = loading.revert_weight_conversion(model, model.state_dict())
    assert found.keys() == wanted.keys() != pieces.keys()
    for name, value in wanted.items():
        assert found[name].shape == tuple(value.shape)
        assert np.array_equal(stored_values(found[name], file), value.numpy().reshape(-1)), name


def test_a_weight_that_is_computed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_by(monkeypatch, WeightConverter("twice", "self_attn.o_proj.weight", operations=[Doubled()]))
    with pytest.raises(ModelError, match=r"its files hold model\.layers\.0\.twice, model\.layers\.1\.twice, which"):
        hub_weights(small_mixture("meta"), None)


def test_families_that_the_plan_does_not_build_need_no_conversion() -> None:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    dense = [name for name, family in FAMILIES.items() if not (family.experts or family.projections)]
    assert [name for name in dense if get_checkpoint_conversion_mapping(name)] == []

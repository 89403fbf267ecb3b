"""Weights of a model folder as ranges of the parameters that a checkpoint holds."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor, box_pieces
from shardmake.checkpoint.formats.hub_layout import HubWeight, hub_weights, in_hub_layout
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
        pieces += box_pieces(RECORD, 4 * file.size, 4, shape, offsets, box.shape)
        file = np.concatenate([file, box.reshape(-1)])
    low = data.draw(st.integers(0, whole.size - 1))
    count = data.draw(st.integers(1, whole.size - low))
    weight = HubWeight("part", (count,), "experts", low)
    found = in_hub_layout(contents(StoredTensor("experts", "F32", shape, tuple(pieces))), [weight])
    assert list(found.tensors) == ["part"]
    assert np.array_equal(stored_values(found.tensors["part"], file), whole.reshape(-1)[low : low + count])


FACTORS = {"lora_A": StoredTensor("a", "F32", (1, 2), ()), "lora_B": StoredTensor("b", "F32", (2, 1), ())}
UPDATE = LoraUpdate("experts", FACTORS, AdapterSettings(r=1))
UPDATED = StoredTensor("experts", "F32", (2, 2), (Piece(RECORD, 8, 0, 4),), UPDATE)


def test_a_renamed_weight_keeps_its_pieces_its_update_and_its_ties() -> None:
    found = in_hub_layout(contents(UPDATED), [HubWeight("old.experts", (2, 2), "experts", 0)])
    assert found.tensors == {"old.experts": StoredTensor("old.experts", "F32", (2, 2), UPDATED.pieces, UPDATE)}
    assert found.aliases == {"head": "old.experts"}


def test_an_update_of_a_part_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"it updates experts, and the base model stores parts of it .* old\.0"):
        in_hub_layout(contents(UPDATED), [HubWeight("old.0", (2,), "experts", 0)])


def test_a_checkpoint_in_the_layout_of_the_folder_stays_as_it_is() -> None:
    held = contents(StoredTensor("old.0", "F32", (2,), (Piece(RECORD, 0, 0, 2),)))
    assert in_hub_layout(held, [HubWeight("old.0", (2,), "experts", 0)]) is held


def test_a_layout_that_is_more_than_ranges_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that transformers transposes, or puts together from several parameters, is named."""
    from transformers import LlamaConfig, LlamaForCausalLM, conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    converters = [WeightConverter("gate_proj.kernel", "gate_proj.weight", operations=[Transpose(0, 1)])]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: list(converters))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32))
    with pytest.raises(
        ModelError, match=r"its files hold model\.layers\.0\.mlp\.gate_proj\.kernel, which transformers"
    ):
        hub_weights(model, None)
    assert hub_weights(model, ["model.layers.0.mlp.gate_proj.weight"]) == []


def test_families_that_the_plan_does_not_build_need_no_conversion() -> None:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    assert [name for name in FAMILIES if get_checkpoint_conversion_mapping(name)] == []

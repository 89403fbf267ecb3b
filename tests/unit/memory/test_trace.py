"""Traces of transformers' own code: any architecture, and a few layers unrolled to all."""

from dataclasses import replace
from typing import Any

import pytest

from shardmake.core.errors import ModelError
from shardmake.memory.buckets import Buckets
from shardmake.memory.closed_form import of_events
from shardmake.memory.decoder import micro_step
from shardmake.memory.estimate import gpu_memory
from shardmake.memory.model import split
from shardmake.memory.read_config import from_config
from shardmake.memory.trace import _prefix, _request, unrolled
from tests.unit.memory.test_decoder import SIZES, gradients, scenario
from tests.unit.memory.test_parameter_inventory import OTHERS


@pytest.mark.parametrize("config", [config for config, _ in OTHERS], ids=lambda config: config["model_type"])
def test_any_architecture_can_be_traced(config: dict[str, Any], tracer: Any) -> None:
    """Encoders, encoder-decoders, mixtures of experts: marks for each layer and a gradient for each weight."""
    model = from_config(config)
    case = scenario(model=model, split=split(model, "full"), sequence_length=32, attention="sdpa", masked=True)
    events = tracer.trace(_request(case))
    blocks = len(model.blocks)
    assert [event[1] for event in events if event[0] == "forward"] == list(range(blocks))
    assert gradients(events) >= {tensor.name for tensor in model.tensors if tensor.block is not None} - UNUSED
    assert gpu_memory(replace(case, strategy="zero3", ranks_per_node=2), Buckets(4096), events).allocated > 0


def test_an_error_of_the_models_code_is_reported_with_its_text(tracer: Any) -> None:
    model = from_config({**SIZES, "model_type": "deepseek_v2", "num_experts_per_tok": None})
    with pytest.raises(ModelError, match=r"deepseek_v2 model: .* Its code raised TypeError: .*Use the complete config"):
        tracer.answer({"requests": [_request(scenario(model=model, sequence_length=32, attention="sdpa"))]})


def test_sizes_that_follow_from_values_are_reported(tracer: Any) -> None:
    """JetMoE counts the tokens of each expert."""
    model = from_config({**SIZES, "model_type": "jetmoe", "kv_channels": 16})
    with pytest.raises(ModelError, match=r"takes sizes from the values of tensors .* cannot be estimated"):
        tracer.answer({"requests": [_request(scenario(model=model, sequence_length=32, attention="sdpa"))]})


def test_a_model_without_layers_of_attention_is_traced_without_a_cache(tracer: Any) -> None:
    """As in training: Bamba's cache asks for a layer of attention."""
    model = from_config({**SIZES, "model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 256})
    case = scenario(model=model, sequence_length=32, attention="sdpa")
    assert of_events(tracer.trace(_request(case)), 2).forward > 0


SEVEN = {
    "gpt2": {"n_embd": 64, "n_layer": 7, "n_head": 4},
    "mixtral": {**SIZES, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 7, "num_local_experts": 4},
}


@pytest.mark.parametrize(
    ("kind", "more"), [("gpt2", {"method": "lora"}), ("gpt2", {"checkpointing": True}), ("mixtral", {})], ids=str
)
def test_a_few_layers_unroll_to_the_full_trace(kind: str, more: dict[str, Any], tracer: Any) -> None:
    """Event for event, but for the order of those that fall together and the numbers."""
    model = from_config({"model_type": kind, "vocab_size": 320, **SEVEN[kind]})
    case = scenario(model=model, sequence_length=32, **more)
    grown = unrolled(tracer.trace(_request(case)), 7, _prefix(model))
    whole = tracer.trace({**_request(case), "layers": None})
    assert grown is not None
    assert sorted(map(plain, grown)) == sorted(map(plain, whole))
    assert of_events(grown, 7) == of_events(whole, 7)


def plain(event: Any) -> str:
    """An event without its storage's number."""
    return repr((event[0], *event[2:]) if event[0] in ("alloc", "free", "grad") else tuple(event))


def test_a_model_with_different_layers_is_not_unrolled() -> None:
    config = {**SIZES, "model_type": "llama", "num_hidden_layers": 8}
    events = micro_step(scenario(config))
    prefix = "model.layers."
    two = [list(event) for event in events if not (event[0] == "grad" and f"{prefix}2." in event[2])]
    assert unrolled(two, 8, prefix) is None


# T5's relative attention bias is an embedding that the stand-in for fused attention does not read.
UNUSED = {f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for side in ("encoder", "decoder")}

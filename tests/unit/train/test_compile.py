"""Models that Accelerate compiles layer by layer."""

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from accelerate.utils.other import compile_regions_fsdp2
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from shardmake.data.dataset import Collator, check_isolation
from shardmake.train.trainer import compile_layers

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="sdpa",
)


def test_layers_compiled_in_place_keep_names_hooks_and_static_shapes(one_rank: None) -> None:
    graphs: list[list[torch.SymInt]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        if len(inputs) > 3:  # a layer; torch 2.14 compiles embedding and head as one function, the head for any length
            graphs.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return graph.forward

    torch.compiler.reset()
    plain, model = (AutoModelForCausalLM.from_config(CONFIG) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    compile_regions_fsdp2(model, backend=record)
    for part in (*model.model.layers, model):
        fully_shard(part)
    collator = Collator(64, 0, packing=True, flat=False)
    check_isolation(model, collator, torch.device("cpu"))
    assert graphs == []
    ids = torch.arange(64) % 60
    batch = collator([{"input_ids": ids, "labels": ids, "position_ids": torch.arange(64)}])
    losses = [one(**batch).loss for one in (plain, model)]
    losses[1].backward()
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)
    assert graphs == [[]], "one graph for all layers"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_trainer_asks_accelerate_for_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "false")
    compile_layers()
    assert TorchDynamoPlugin(backend="inductor").use_regional_compilation

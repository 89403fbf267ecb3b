"""Models that keep packed examples apart pass; models that do not are refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, MistralConfig, Qwen3Config

from shardmake.core.errors import ShardmakeError
from shardmake.data.dataset import Collator, check_isolation

SIZE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {**SIZE, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CPU = torch.device("cpu")


def make_model(config: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("flat", [False, True], ids=["rows", "flat"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "config", [LlamaConfig(**ATTENTION), Qwen3Config(**ATTENTION), MistralConfig(**ATTENTION, sliding_window=4)],
    ids=["llama", "qwen3", "mistral"],
)  # fmt: skip
def test_models_that_keep_examples_apart_pass(config: LlamaConfig, attention: str, flat: bool) -> None:
    config._attn_implementation = attention
    model = make_model(config).train()
    check_isolation(model, Collator(256, 0, packing=True, flat=flat), CPU)
    assert model.training


@pytest.mark.parametrize("config", [MambaConfig(**SIZE)], ids=["mamba"])
def test_models_that_do_not_are_refused(config: MambaConfig) -> None:
    model = make_model(config)
    with pytest.raises(ShardmakeError) as error:
        check_isolation(model, Collator(256, 0, packing=True, flat=False), CPU)
    assert str(error.value) == (
        "Packing is not possible: this model mixes packed examples with this attention kernel. "
        "Set packing: false, or try another `attention`."
    )
    check_isolation(model, Collator(256, 0, packing=False, flat=False), CPU)


def test_the_check_of_a_compiled_model_leaves_the_training_graph_static() -> None:
    """Compiled by the check, the graph would have symbols for batch and length after the first training batch."""
    graphs: list[list[torch.SymInt]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        graphs.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return graph.forward

    torch.compiler.reset()
    collator = Collator(64, 0, packing=True, flat=False)
    model = torch.compile(make_model(LlamaConfig(**ATTENTION)), backend=record)
    check_isolation(model, collator, CPU)
    assert graphs == []
    ids = torch.arange(64) % 60
    batch = collator([{"input_ids": ids, "labels": ids, "position_ids": torch.arange(64)}])
    model(**batch).loss.backward()
    assert graphs and not any(graphs)

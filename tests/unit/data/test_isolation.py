"""Models that keep packed examples apart pass; models that do not are refused."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, MistralConfig, Qwen3Config
from transformers.modeling_outputs import CausalLMOutput

from shardmake.core.errors import ShardmakeError
from shardmake.data.dataset import Collator, check_isolation

SIZE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {**SIZE, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS = [LlamaConfig(**ATTENTION), Qwen3Config(**ATTENTION), MistralConfig(**ATTENTION, sliding_window=4)]
CPU = torch.device("cpu")


def make_model(config: object, **options: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("flat", [False, True], ids=["rows", "flat"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_models_that_keep_examples_apart_pass(config: LlamaConfig, attention: str, flat: bool) -> None:
    config._attn_implementation = attention
    model = make_model(config).train()
    check_isolation(model, Collator(256, 0, packing=True, flat=flat), CPU)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_does_not_is_refused(dtype: torch.dtype) -> None:
    model = make_model(MambaConfig(**SIZE)).to(dtype)
    with pytest.raises(ShardmakeError) as error:
        check_isolation(model, Collator(256, 0, packing=True, flat=False), CPU, dtype)
    assert str(error.value) == (
        "Packing is not possible: this model mixes packed examples with this attention kernel. "
        "Set packing: false, or try another `attention`."
    )
    check_isolation(model, Collator(256, 0, packing=False, flat=False), CPU)


class Influenced(torch.nn.Module):
    """Logits of about 1; the first token of a sequence changes all of them by ``influence``."""

    def __init__(self, influence: float) -> None:
        super().__init__()
        self.influence = influence

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> CausalLMOutput:
        first = input_ids.flatten()[0].float()
        return CausalLMOutput(logits=torch.ones(*input_ids.shape, 4) + self.influence * first)


@pytest.mark.parametrize(
    ("influence", "dtype", "passes"),
    [
        (1e-6, torch.float32, True),
        (0.01, torch.float32, False),
        (0.01, torch.bfloat16, True),
        (0.1, torch.bfloat16, False),
        (0.01, torch.float16, False),
    ],
)
def test_experts_may_round_otherwise_in_16_bits(influence: float, dtype: torch.dtype, passes: bool) -> None:
    with nullcontext() if passes else pytest.raises(ShardmakeError, match="mixes packed examples"):
        check_isolation(Influenced(influence), Collator(256, 0, packing=True, flat=False), CPU, dtype)


def test_the_check_of_a_compiled_model_leaves_the_training_graph_static() -> None:
    """Compiled by the check, the graph would have symbols for batch and length after the first training batch."""
    graphs: list[list[torch.SymInt]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        graphs.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return graph.forward

    torch.compiler.reset()
    collator = Collator(64, 0, packing=True, flat=False)
    model: Any = torch.compile(make_model(LlamaConfig(**ATTENTION)), backend=record)
    check_isolation(model, collator, CPU)
    assert graphs == []
    ids = torch.arange(64) % 60
    batch = collator([{"input_ids": ids, "labels": ids, "position_ids": torch.arange(64)}])
    model(**batch).loss.backward()
    assert graphs and not any(graphs)

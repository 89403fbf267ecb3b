"""Llama 3 8B on one node of eight GPUs, for tests of the memory model."""

from typing import Any

from shardmake.memory.buckets import Buckets
from shardmake.memory.model import Model, split
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import Scenario

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip

MODEL = from_config(LLAMA_8B)

P = MODEL.parameters

BUCKETS = Buckets(4096**2, int(0.9 * 4096**2), 40960)


def scenario(model: Model = MODEL, **more: Any) -> Scenario:
    values: dict[str, Any] = {
        "split": split(model, more.get("method", "full"), 16, more.get("lora_targets", "all-linear")),
        "strategy": "zero3", "nodes": 1, "ranks_per_node": 8, "micro_batch": 1, "sequence_length": 2048,
        "checkpointing": True,
    }  # fmt: skip
    return Scenario(model, **{**values, **more})

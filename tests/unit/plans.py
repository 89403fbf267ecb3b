"""Plans, runs and a model for tests that need no file and no library."""

from typing import Any

from shardmake.config.models import Cluster, Data, Run, Strategy
from shardmake.memory.model import Model
from shardmake.memory.read_config import from_config
from shardmake.render.training_file import training_settings
from shardmake.run.model_class import ModelClass
from shardmake.run.plan import Choice, Plan, Resources, Workload
from shardmake.run.training_settings import TrainingSettings

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 128,
}  # fmt: skip


def make_model(**changes: Any) -> Model:
    return from_config(LLAMA | changes)


def make_cluster(**changes: Any) -> Cluster:
    values: dict[str, Any] = {
        "executor": "local", "processes_per_node": 2, "cpus_per_node": 4, "memory_gib_per_node": 8.0,
        "nvme_path": "/scratch/nvme", "scratch": "/tmp",
    }  # fmt: skip
    return Cluster(**values | changes)


def make_run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "model": "base", "data": Data(train="train.jsonl"), "sequence_length": 32, "global_batch_size": 16,
        "max_steps": 10, "learning_rate": 1e-3,
    }  # fmt: skip
    return Run(**values | changes)


def make_plan(strategy: Strategy, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "strategy": strategy, "gradient_checkpointing": False, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
        "nodes": 2, "processes_per_node": 2, "precision": "bf16",
    }  # fmt: skip
    workload = Workload(
        model="base", model_class=ModelClass(name="LlamaForCausalLM"), sequence_length=32, packing=True,
        objective="sft", method="full", optimizer="adamw", attention="sdpa", loss="plain",
    )  # fmt: skip
    return Plan(
        run="docs-chat", choice=Choice(**values | changes), workload=workload, reason="asked for", rejected={},
        fallbacks=[], host_memory=6 << 30, resources={"train": Resources(memory_gib=8, cpus=4)},
    )  # fmt: skip


def make_training_settings(strategy: Strategy = "zero2", **run: Any) -> TrainingSettings:
    """Return the rendered settings of `make_run` with the changes ``run``."""
    return training_settings(make_plan(strategy), make_run(**run), make_cluster(), make_model())

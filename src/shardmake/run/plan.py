"""The plan as it is written to ``plan/plan.json`` and read by every later stage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shardmake.config.models import Attention, Loss, Method, Optimizer, Precision, Strategy
from shardmake.config.strategies import STRATEGY_SPECS, StrategySpec
from shardmake.core.atomic import read_json


class Frozen(BaseModel):
    """A value that is written as JSON and read back equal."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Choice(Frozen):
    """One way to run the training: what the strategy search varies."""

    strategy: Strategy = Field(description="How states are sharded.")
    gradient_checkpointing: bool = Field(description="Recompute activations in the backward pass.")
    micro_batch_size: int = Field(gt=0, description="Sequences per rank and forward pass.")
    gradient_accumulation_steps: int = Field(gt=0, description="Forward passes per optimizer step.")
    nodes: int = Field(gt=0, description="Nodes of the training job.")
    processes_per_node: int = Field(gt=0, description="Ranks per node.")
    precision: Precision = Field(description="Compute data type.")
    tensor_parallel: int = Field(1, gt=0, description="Ranks that share each layer's matrices and see the same data.")

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of them under tensor parallelism, that see data of their own."""
        return self.world_size // self.tensor_parallel

    @property
    def readers(self) -> str:
        """Who sees data of their own, for people."""
        groups = f"{self.data_parallel} groups of {self.tensor_parallel} ranks"
        return groups if self.tensor_parallel > 1 else f"{self.world_size} ranks"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.processes_per_node

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.data_parallel * self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def spec(self) -> StrategySpec:
        """Return the strategy's row of the table."""
        return STRATEGY_SPECS[self.strategy]

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed runs it."""
        return self.spec.is_deepspeed

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP runs it."""
        return self.spec.is_fsdp

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage, 0 for other engines."""
        return self.spec.zero_stage


class Workload(Frozen):
    """What is trained, the same for every candidate."""

    model: str = Field(description="Folder, config.json or hub id of the base model.")
    sequence_length: int = Field(gt=0, description="Tokens per sequence.")
    packing: bool = Field(description="Whether sequences are packed.")
    method: Method = Field(description="full, lora or qlora.")
    optimizer: Optimizer = Field(description="Optimizer.")
    attention: Attention = Field(description="Attention kernel.")
    loss: Loss = Field(description="Cross entropy: plain or fused.")


class Resources(Frozen):
    """What one stage asks of Slurm, per node."""

    memory_gib: int = Field(gt=0, description="Host RAM per node, GiB (--mem).")
    cpus: int = Field(gt=0, description="Cores per node.")


class Fallback(Frozen):
    """A choice further down the fallbacks, and its host RAM, which may be more than that of the choice above."""

    choice: Choice = Field(description="What training takes next.")
    host_memory: int = Field(gt=0, description="Host RAM per node that it needs, bytes.")
    memory_gib: int = Field(gt=0, description="Host RAM per node that it asks of Slurm, GiB (--mem).")


class Plan(Frozen):
    """The choice, why, and what follows an out-of-memory."""

    run: str = Field(description="Name of the run.")
    choice: Choice = Field(description="What training starts with.")
    workload: Workload = Field(description="What is trained.")
    reason: str = Field(description="One sentence: why this choice.")
    rejected: dict[str, str] = Field(description="Each candidate not taken, with the reason.")
    fallbacks: list[Fallback] = Field(description="What training takes next after each out-of-memory, in order.")
    host_memory: int = Field(gt=0, description="Host RAM per node that the choice needs, bytes.")
    resources: dict[str, Resources] = Field(description="By stage: train, consolidate, evaluate, data.")

    def at(self, fallback: int) -> "Plan":
        """The plan of an attempt on that fallback, from 1 on; 0 is the choice."""
        if fallback == 0:
            return self
        below = self.fallbacks[fallback - 1]
        changed = self.model_copy(update={"choice": below.choice, "host_memory": below.host_memory})
        return changed.asking(below.memory_gib)

    def asking(self, memory_gib: int) -> "Plan":
        """The same, but for the host RAM per node that training asks of Slurm."""
        train = self.resources["train"].model_copy(update={"memory_gib": memory_gib})
        return self.model_copy(update={"resources": {**self.resources, "train": train}})

    def fallbacks_below(self, fallback: int, *, host: bool) -> Iterator[int]:
        """The fallbacks that may follow ``fallback`` after an out-of-memory of the GPU or, with ``host``, of the node.

        A fallback that needs less GPU memory because it offloads needs more of the node's.
        """
        needs = self.at(fallback).host_memory
        below = range(fallback + 1, len(self.fallbacks) + 1)
        return (number for number in below if not host or self.fallbacks[number - 1].host_memory < needs)


def read_plan(path: Path) -> Plan:
    """The plan at ``path``; a `ShardmakeError` if it is not there yet."""
    return Plan.model_validate(read_json(path, "shardmake plan NAME"))


def plan_json(value: Frozen) -> Any:
    """``value`` as JSON data, keys in the order of the fields."""
    return value.model_dump(mode="json")

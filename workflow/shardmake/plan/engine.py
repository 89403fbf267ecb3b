"""What each strategy means, in one table: the source from which every file is rendered and every rank is checked."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from shardmake.config import Strategy
from shardmake.plan.plan import Choice

Device = Literal["cpu", "nvme"]


@dataclass(frozen=True)
class Engine:
    """One strategy: the library that shards, what it shards and what it moves off the GPU."""

    name: Literal["ddp", "deepspeed", "fsdp"]
    zero_stage: int = 0
    offload_optimizer: Device | None = None
    offload_param: Device | None = None
    reshard_after_forward: bool = True
    """FSDP: free a block's weights again after its forward pass."""
    hybrid: bool = False
    """FSDP: shard within a node, replicate between nodes."""

    @property
    def distributed_type(self) -> str:
        """Accelerate's name for it. MULTI_GPU starts the ranks through torchrun, on CPU as well."""
        return {"ddp": "MULTI_GPU", "deepspeed": "DEEPSPEED", "fsdp": "FSDP"}[self.name]

    @property
    def fsdp1_strategy(self) -> str:
        """The name FSDP1 has for it."""
        if self.hybrid:
            return "HYBRID_SHARD"
        return "FULL_SHARD" if self.reshard_after_forward else "SHARD_GRAD_OP"


ENGINES: Final[dict[Strategy, Engine]] = {
    "ddp": Engine("ddp"),
    "zero1": Engine("deepspeed", 1),
    "zero2": Engine("deepspeed", 2),
    "zero2-offload": Engine("deepspeed", 2, offload_optimizer="cpu"),
    "zero3": Engine("deepspeed", 3),
    "zero3-offload-optimizer": Engine("deepspeed", 3, offload_optimizer="cpu"),
    "zero3-offload": Engine("deepspeed", 3, offload_optimizer="cpu", offload_param="cpu"),
    "zero3-nvme": Engine("deepspeed", 3, offload_optimizer="nvme", offload_param="nvme"),
    "fsdp": Engine("fsdp"),
    "fsdp-grad-op": Engine("fsdp", reshard_after_forward=False),
    "fsdp-hybrid": Engine("fsdp", hybrid=True),
    "fsdp-offload": Engine("fsdp", offload_optimizer="cpu", offload_param="cpu"),
}


def engine_of(choice: Choice) -> Engine:
    """The engine behind a choice's strategy."""
    return ENGINES[choice.strategy]


def expected_engine(choice: Choice, fsdp_version: int) -> dict[str, Any]:
    """What the ranks compare with the engine that came up, and refuse to train otherwise."""
    engine = engine_of(choice)
    values = {
        "engine": engine.name,
        "zero_stage": engine.zero_stage,
        "world_size": choice.world_size,
        "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[choice.precision],
        "offload_optimizer": engine.offload_optimizer,
        "offload_param": engine.offload_param,
    }
    if engine.name == "deepspeed":
        values["tensor_parallel"] = choice.tensor_parallel
    if engine.name == "fsdp":
        values |= {
            "fsdp_version": fsdp_version,
            "reshard_after_forward": engine.reshard_after_forward,
            "replicas": choice.nodes if engine.hybrid else 1,
        }
    return values

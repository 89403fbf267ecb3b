"""What each strategy means, in one table: the source from which every file is rendered and every rank is checked."""

from dataclasses import dataclass
from typing import Final, Literal

from shardmake.config.models import Strategy

Device = Literal["cpu", "nvme"]


@dataclass(frozen=True)
class StrategySpec:
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


STRATEGY_SPECS: Final[dict[Strategy, StrategySpec]] = {
    "ddp": StrategySpec("ddp"),
    "zero1": StrategySpec("deepspeed", 1),
    "zero2": StrategySpec("deepspeed", 2),
    "zero2-offload": StrategySpec("deepspeed", 2, offload_optimizer="cpu"),
    "zero3": StrategySpec("deepspeed", 3),
    "zero3-offload-optimizer": StrategySpec("deepspeed", 3, offload_optimizer="cpu"),
    "zero3-offload": StrategySpec("deepspeed", 3, offload_optimizer="cpu", offload_param="cpu"),
    "zero3-nvme": StrategySpec("deepspeed", 3, offload_optimizer="nvme", offload_param="nvme"),
    "fsdp": StrategySpec("fsdp"),
    "fsdp-grad-op": StrategySpec("fsdp", reshard_after_forward=False),
    "fsdp-hybrid": StrategySpec("fsdp", hybrid=True),
    "fsdp-offload": StrategySpec("fsdp", offload_optimizer="cpu", offload_param="cpu"),
}

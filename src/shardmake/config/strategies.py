"""The table of strategies: one row each.

Every other file asks for an attribute of a row and never tests a strategy's name. A new strategy is one row here and
one golden file in ``tests/unit/render/golden``.
"""

from dataclasses import dataclass
from typing import Final, Literal

Device = Literal["cpu", "nvme"]
Library = Literal["ddp", "deepspeed", "fsdp"]
DDP: Final[Library] = "ddp"
DEEPSPEED: Final[Library] = "deepspeed"
FSDP: Final[Library] = "fsdp"


@dataclass(frozen=True)
class StrategySpec:
    """One strategy: the library that shards, what it shards and what it moves off the GPU."""

    library: Library
    zero_stage: int = 0
    """DeepSpeed's ZeRO stage, 0 for other libraries."""
    offload_optimizer: Device | None = None
    offload_param: Device | None = None
    reshard_after_forward: bool = True
    """FSDP: free a block's weights again after its forward pass."""
    hybrid: bool = False
    """FSDP: shard within a node, replicate between nodes."""
    hpz: bool = False
    """ZeRO++ hpZ: each node keeps a second shard of the weights, from which the backward pass gathers within the node.

    Its losses equal those of ZeRO-3 on CPU ranks. It has not run on GPUs, so `strategy: auto` leaves it out.
    """
    fallback_order: int = 0
    """Position among the fallbacks, from the fastest to the least memory; steps of ten leave room for new rows.

    FSDP has an order of its own, because a run never falls back from one of the two orders to the other.
    """
    cpu: bool = False
    """`strategy: auto` considers it on a cluster without GPUs."""
    four_bits: bool = False
    """`strategy: auto` considers it for quantized weights."""
    tensor_parallel: bool = False
    """It combines with tensor parallelism: ZeRO with DeepSpeed's AutoTP, FSDP with Accelerate's ParallelismConfig.

    AutoTP is not proven to train under ZeRO-3 and with offload.
    """

    @property
    def is_ddp(self) -> bool:
        """Return whether every rank holds everything."""
        return self.library == DDP

    @property
    def is_deepspeed(self) -> bool:
        """Return whether DeepSpeed runs it."""
        return self.library == DEEPSPEED

    @property
    def is_fsdp(self) -> bool:
        """Return whether FSDP runs it."""
        return self.library == FSDP

    @property
    def sequence_parallel(self) -> bool:
        """Return whether it combines with sequence parallelism: losses and resumption are compared with DDP's."""
        return not (self.is_ddp or self.hybrid or self.hpz or self.uses_nvme)

    @property
    def expert_parallel(self) -> bool:
        """Return whether the experts of a mixture can be spread under it: transformers shards over all ranks."""
        return self.is_fsdp and self.reshard_after_forward and not (self.hybrid or self.offload_param)

    @property
    def gathers_parameters(self) -> bool:
        """Return whether a rank holds only its part of the weights between uses."""
        return self.zero_stage == 3 or self.is_fsdp

    @property
    def accumulates_in_fp32(self) -> bool:
        """Return whether it can accumulate and reduce the gradients of 16-bit weights in fp32.

        DeepSpeed would take another optimizer for ZeRO-1 in bf16, which keeps whole fp32 gradients on every rank and
        does not read the checkpoints of its ZeRO-1 optimizer.
        """
        return self.zero_stage != 1

    @property
    def uses_nvme(self) -> bool:
        """Return whether states are swapped to the node's NVMe."""
        return "nvme" in (self.offload_optimizer, self.offload_param)

    @property
    def checkpoint_family(self) -> str:
        """Return the name of the checkpoint format; strategies of one family read each other's checkpoints."""
        if not self.is_deepspeed:
            return self.library
        return f"zero{self.zero_stage}" + ("-nvme" if self.uses_nvme else "")

    @property
    def distributed_type(self) -> str:
        """Return Accelerate's name of the library. MULTI_GPU starts the ranks through torchrun, on CPU as well."""
        return {DDP: "MULTI_GPU", DEEPSPEED: "DEEPSPEED", FSDP: "FSDP"}[self.library]


STRATEGY_SPECS: Final[dict[str, StrategySpec]] = {
    "ddp": StrategySpec(DDP, fallback_order=10, cpu=True, four_bits=True),
    "zero1": StrategySpec(DEEPSPEED, 1, fallback_order=20, cpu=True, four_bits=True, tensor_parallel=True),
    "zero1-offload": StrategySpec(DEEPSPEED, 1, "cpu", fallback_order=35, cpu=True),
    "zero2": StrategySpec(DEEPSPEED, 2, fallback_order=30, cpu=True, four_bits=True, tensor_parallel=True),
    "zero2-offload": StrategySpec(DEEPSPEED, 2, "cpu", fallback_order=40, cpu=True),
    "zero3": StrategySpec(DEEPSPEED, 3, fallback_order=50, cpu=True),
    "zero3-hpz": StrategySpec(DEEPSPEED, 3, hpz=True, fallback_order=45),
    "zero3-offload-optimizer": StrategySpec(DEEPSPEED, 3, "cpu", fallback_order=60, cpu=True),
    "zero3-offload": StrategySpec(DEEPSPEED, 3, "cpu", "cpu", fallback_order=70, cpu=True),
    "zero3-nvme": StrategySpec(DEEPSPEED, 3, "nvme", "nvme", fallback_order=80),
    "fsdp": StrategySpec(FSDP, fallback_order=30, four_bits=True, tensor_parallel=True),
    "fsdp-grad-op": StrategySpec(FSDP, reshard_after_forward=False, fallback_order=10, tensor_parallel=True),
    "fsdp-hybrid": StrategySpec(FSDP, hybrid=True, fallback_order=20),
    "fsdp-offload": StrategySpec(FSDP, 0, "cpu", "cpu", fallback_order=40),
}

SHARDING: Final = ("ddp", "zero2", "zero3", "fsdp")
"""One strategy for each way in which a library shards, for checks of nodes."""

PROBED: Final = "fsdp"
"""The strategy whose step `shardmake estimate --probe` measures."""

PARTITIONED_INFERENCE: Final[dict[str, Device | None]] = {
    name: spec.offload_param
    for name, spec in STRATEGY_SPECS.items()
    if spec.zero_stage == 3 and spec.offload_param == spec.offload_optimizer and not spec.hpz
}
"""Strategies that also partition a model which is only evaluated, and where its parameters lie then."""

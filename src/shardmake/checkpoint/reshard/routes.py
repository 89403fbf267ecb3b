"""The routes from one strategy's checkpoint to another strategy and number of ranks."""

from enum import Enum

from shardmake.config.strategies import STRATEGY_SPECS


class Route(Enum):
    """How a checkpoint is made readable."""

    NATIVE = "read without conversion"
    UNIVERSAL = "DeepSpeed's universal checkpoint"
    DISTRIBUTED = "torch's distributed checkpoint"


def route(wrote: str, wrote_ranks: int, reads: str, ranks: int) -> Route | str:
    """Return the route from ``wrote`` on ``wrote_ranks`` ranks to ``reads`` on ``ranks`` ranks, or why there is none.

    Without a universal checkpoint, DeepSpeed resumes only the ZeRO stage and world size that wrote the checkpoint, and
    with NVMe only checkpoints of NVMe. torch's distributed checkpoints fit any world size. Under DDP every rank reads
    everything.
    """
    source, target = STRATEGY_SPECS[wrote], STRATEGY_SPECS[reads]
    is_same_family = source.checkpoint_family == target.checkpoint_family
    if is_same_family and (wrote_ranks == ranks or not target.is_deepspeed):
        return Route.NATIVE
    if source.is_ddp:
        return f"checkpoints of {wrote} cannot be converted, only those of ZeRO and FSDP"
    if target.is_deepspeed:
        return Route.UNIVERSAL
    if target.is_fsdp:
        return Route.DISTRIBUTED
    return f"checkpoints of {wrote} cannot be converted for {reads}"

"""Which checkpoints can go on as what: a pure function of who wrote one and who is to read it."""

from enum import Enum

from shardmake.config.strategies import STRATEGY_SPECS


class Route(Enum):
    """How a checkpoint comes to be read."""

    NATIVE = "the engine reads it as it is"
    UNIVERSAL = "DeepSpeed's universal checkpoint"
    DISTRIBUTED = "torch's distributed checkpoint"


def route(wrote: str, wrote_ranks: int, reads: str, ranks: int) -> Route | str:
    """How ``reads`` on ``ranks`` ranks goes on from a checkpoint of ``wrote`` on ``wrote_ranks``; or why it cannot.

    DeepSpeed reads its own ZeRO stage at its own world size only, and with NVMe only what was written so, unless it is
    universal; torch's distributed checkpoints fit any world size, and under DDP every rank reads everything.
    """
    source, target = STRATEGY_SPECS[wrote], STRATEGY_SPECS[reads]
    is_same_family = source.checkpoint_family == target.checkpoint_family
    if is_same_family and (wrote_ranks == ranks or not target.is_deepspeed):
        return Route.NATIVE
    if source.is_ddp:
        return f"checkpoints of {wrote} are not converted, only those of ZeRO and FSDP"
    if target.is_deepspeed:
        return Route.UNIVERSAL
    if target.is_fsdp:
        return Route.DISTRIBUTED
    return f"what {wrote} wrote is not converted for {reads}"

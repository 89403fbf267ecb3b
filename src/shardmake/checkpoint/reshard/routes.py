"""Which checkpoints can go on as what: a pure function of who wrote one and who is to read it."""

from enum import Enum

SWAPPED = "zero3-nvme"


class Route(Enum):
    """How a checkpoint comes to be read."""

    NATIVE = "the engine reads it as it is"
    UNIVERSAL = "DeepSpeed's universal checkpoint"
    DISTRIBUTED = "torch's distributed checkpoint"


def engine(strategy: str) -> str:
    """What a strategy's checkpoints are written by: zero1, zero2, zero3, fsdp or ddp."""
    return strategy.partition("-")[0]


def route(wrote: str, wrote_ranks: int, reads: str, ranks: int) -> Route | str:
    """How ``reads`` on ``ranks`` ranks goes on from a checkpoint of ``wrote`` on ``wrote_ranks``; or why it cannot.

    DeepSpeed reads its own ZeRO stage at its own world size only, and with NVMe only what was written so, unless it is
    universal; torch's distributed checkpoints fit any world size, and under DDP every rank reads everything.
    """
    same_engine = engine(wrote) == engine(reads) and (wrote == SWAPPED) == (reads == SWAPPED)
    if same_engine and (wrote_ranks == ranks or engine(reads) in ("fsdp", "ddp")):
        return Route.NATIVE
    if engine(wrote) == "ddp":
        return f"checkpoints of {wrote} are not converted, only those of ZeRO and FSDP"
    if reads.startswith("zero"):
        return Route.UNIVERSAL
    if engine(reads) == "fsdp":
        return Route.DISTRIBUTED
    return f"what {wrote} wrote is not converted for {reads}"

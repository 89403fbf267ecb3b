"""Routes between strategies: which checkpoints can be resumed, with or without conversion."""

from pathlib import Path

import pytest

from shardmake.checkpoint.reshard.convert import Route, find_route, route
from shardmake.config.models import STRATEGIES, Strategy
from shardmake.core.errors import CheckpointError
from tests.checkpoint_record import make_record

NATIVE, UNIVERSAL, DISTRIBUTED = Route


@pytest.mark.parametrize(
    ("wrote", "ranks", "reads", "new_ranks", "expected"),
    [
        ("zero3", 4, "zero3", 4, NATIVE),
        ("zero3", 4, "zero3-offload", 4, NATIVE),
        ("zero3", 4, "zero3", 2, UNIVERSAL),
        ("zero2", 4, "zero3", 4, UNIVERSAL),
        ("zero3-offload", 2, "zero1", 3, UNIVERSAL),
        ("zero2-offload", 2, "fsdp", 2, DISTRIBUTED),
        ("fsdp", 4, "fsdp-offload", 2, NATIVE),
        ("fsdp-offload", 4, "zero3", 4, UNIVERSAL),
        ("fsdp-hybrid", 4, "fsdp", 3, NATIVE),
        ("ddp", 2, "ddp", 4, NATIVE),
        ("zero3-nvme", 4, "zero3-nvme", 4, NATIVE),
        ("zero3-nvme", 4, "zero3-nvme", 2, UNIVERSAL),
        ("zero3-nvme", 4, "zero3-offload", 4, UNIVERSAL),
        ("zero3", 4, "zero3-nvme", 4, UNIVERSAL),
        ("fsdp", 4, "zero3-nvme", 2, UNIVERSAL),
        ("zero3-nvme", 4, "fsdp", 2, DISTRIBUTED),
    ],
)
def test_route(wrote: str, ranks: int, reads: Strategy, new_ranks: int, expected: Route) -> None:
    assert route(wrote, ranks, reads, new_ranks) is expected


@pytest.mark.parametrize(
    ("wrote", "ranks", "reads", "new_ranks", "reason"),
    [
        ("ddp", 4, "zero1", 4, "checkpoints of ddp cannot be converted"),
        ("fsdp", 4, "ddp", 4, "checkpoints of fsdp cannot be converted for ddp"),
        ("zero3", 4, "ddp", 4, "cannot be converted for ddp"),
    ],
)
def test_missing_route_is_an_error(wrote: str, ranks: int, reads: Strategy, new_ranks: int, reason: str) -> None:
    record = make_record(Path("none"), 4, world_size=ranks, strategy=wrote)
    with pytest.raises(
        CheckpointError, match=rf"written by {wrote} on {ranks} ranks .* {reads} on {new_ranks}: .*{reason}"
    ):
        find_route(record, Path("runs/demo/train/checkpoints/checkpoint-4"), reads, new_ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unchanged_strategy_needs_no_conversion(strategy: Strategy) -> None:
    assert route(strategy, 4, strategy, 4) is NATIVE

"""What the driver refuses before it submits."""

from pathlib import Path

import pytest

from shardmake.config import Strategy
from shardmake.errors import UserError
from shardmake.launch.driver import check_resumable
from shardmake.plan.plan import Choice
from shardmake.train.ledger import CheckpointRecord


def choice(strategy: Strategy, nodes: int) -> Choice:
    return Choice(
        strategy=strategy, gradient_checkpointing=False, micro_batch_size=1, gradient_accumulation_steps=1,
        nodes=nodes, processes_per_node=2, precision="fp32",
    )  # fmt: skip


def record(strategy: str, world_size: int) -> CheckpointRecord:
    return CheckpointRecord(
        step=4, tokens=4, world_size=world_size, strategy=strategy, attempt=1, recipe="r", saved_at=0, save_seconds=0,
        versions={}, files={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrote", "ranks", "reads", "nodes", "can"),
    [
        ("zero3", 4, "zero3", 2, True),
        ("zero3", 4, "zero3-offload", 2, True),
        ("zero3", 4, "zero3", 1, False),
        ("zero2", 4, "zero3", 2, False),
        ("fsdp", 4, "fsdp-offload", 1, True),
        ("ddp", 2, "ddp", 2, True),
        ("ddp", 4, "zero1", 2, False),
    ],
)
def test_only_a_checkpoint_that_the_engine_reads_is_resumed(
    wrote: str, ranks: int, reads: Strategy, nodes: int, can: bool
) -> None:
    checkpoint = Path("runs/demo/train/checkpoints/checkpoint-4")
    if can:
        check_resumable(record(wrote, ranks), checkpoint, choice(reads, nodes))
    else:
        with pytest.raises(UserError, match=rf"written by {wrote} on {ranks} ranks .* {reads} on {2 * nodes}"):
            check_resumable(record(wrote, ranks), checkpoint, choice(reads, nodes))

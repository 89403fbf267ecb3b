"""Resharding: the routes between strategies, the files that it keeps and the conversions that it reuses.

The conversion itself is a stub.
"""

from pathlib import Path

import pytest
import torch

from shardmake.checkpoint import store
from shardmake.checkpoint.record import CheckpointRecord, find_problems, read_record
from shardmake.checkpoint.reshard import convert
from shardmake.checkpoint.reshard.convert import Route, find_route, route
from shardmake.config.models import STRATEGIES, Strategy
from shardmake.core.errors import CheckpointError
from tests.checkpoint_record import make_record


@pytest.fixture(autouse=True)
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the conversion by one that writes a single file, and return the list of target strategies."""
    made: list[str] = []

    def converted(checkpoint: Path, record: CheckpointRecord, target: Path, strategy: str) -> None:
        made.append(strategy)
        (target / "weights").write_bytes(b"w")

    monkeypatch.setattr(convert, "_convert", converted)
    return made


def write(folder: Path, strategy: str, ranks: int) -> Path:
    checkpoint = folder / "checkpoint-4"
    checkpoint.mkdir()
    names = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    for name in names:
        torch.save(name, checkpoint / name)
    store.commit_in_place(checkpoint, make_record(checkpoint, 4, world_size=ranks, strategy=strategy))
    return checkpoint


def random_states(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("rng_state*")}


@pytest.mark.parametrize(("wrote", "reads", "expected"), [
    (2, 3, {"rng_state_0.pth", "rng_state_1.pth"}), (2, 1, {"rng_state.pth", "rng_state_1.pth"}),
    (1, 2, {"rng_state_0.pth"}), (1, 1, {"rng_state.pth"}),
])  # fmt: skip
def test_random_states_have_the_name_for_their_rank(tmp_path: Path, wrote: int, reads: int, expected: set[str]) -> None:
    convert.reshard(write(tmp_path, "zero3", wrote), tmp_path / "out", "zero2", reads)
    assert random_states(tmp_path / "out") == expected


def test_conversion_is_reused_for_other_numbers_of_ranks(tmp_path: Path, conversions: list[str]) -> None:
    checkpoint, out = write(tmp_path, "zero3", 2), tmp_path / "out"
    for strategy, ranks, times in (("zero2", 3, 1), ("zero1", 4, 1), ("zero1", 1, 2), ("zero2", 1, 2), ("zero2", 4, 3)):
        record = convert.reshard(checkpoint, out, strategy, ranks)
        assert len(conversions) == times and (record.strategy, record.world_size) == (strategy, ranks)
        assert read_record(out) == record and find_problems(out) == []
        assert ("rng_state.pth" in random_states(out)) == (ranks == 1)


NATIVE, UNIVERSAL, DISTRIBUTED = Route


@pytest.mark.parametrize(("wrote", "ranks", "reads", "new_ranks", "expected"), [
    *((name, 4, name, 4, NATIVE) for name in STRATEGIES), ("zero3", 4, "zero3-offload", 4, NATIVE),
    ("zero3", 4, "zero3", 2, UNIVERSAL),
    ("zero2", 4, "zero3", 4, UNIVERSAL), ("zero3-offload", 2, "zero1", 3, UNIVERSAL),
    ("zero2-offload", 2, "fsdp", 2, DISTRIBUTED), ("fsdp", 4, "fsdp-offload", 2, NATIVE),
    ("fsdp-offload", 4, "zero3", 4, UNIVERSAL), ("fsdp-hybrid", 4, "fsdp", 3, NATIVE), ("ddp", 2, "ddp", 4, NATIVE),
    ("zero3-nvme", 4, "zero3-nvme", 2, UNIVERSAL),
    ("zero3-nvme", 4, "zero3-offload", 4, UNIVERSAL), ("zero3", 4, "zero3-nvme", 4, UNIVERSAL),
    ("fsdp", 4, "zero3-nvme", 2, UNIVERSAL), ("zero3-nvme", 4, "fsdp", 2, DISTRIBUTED),
])  # fmt: skip
def test_route(wrote: str, ranks: int, reads: Strategy, new_ranks: int, expected: Route) -> None:
    assert route(wrote, ranks, reads, new_ranks) is expected


@pytest.mark.parametrize(("wrote", "ranks", "reads", "new_ranks", "reason"), [
    ("ddp", 4, "zero1", 4, "checkpoints of ddp cannot be converted"),
    ("fsdp", 4, "ddp", 4, "checkpoints of fsdp cannot be converted for ddp"),
    ("zero3", 4, "ddp", 4, "cannot be converted for ddp"),
])  # fmt: skip
def test_missing_route_is_an_error(wrote: str, ranks: int, reads: Strategy, new_ranks: int, reason: str) -> None:
    record = make_record(Path("none"), 4, world_size=ranks, strategy=wrote)
    words = rf"written by {wrote} on {ranks} ranks .* {reads} on {new_ranks}: .*{reason}"
    with pytest.raises(CheckpointError, match=words):
        find_route(record, Path("runs/demo/train/checkpoints/checkpoint-4"), reads, new_ranks)

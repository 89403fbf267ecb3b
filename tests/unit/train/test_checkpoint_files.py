"""The plain loop's checkpoints on simulated GPUs: Adam's states, and those of random number generators."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.training_args import ParallelMode

from shardmake.train import checkpoint_files


class Gpus:
    """A replacement of `torch.cuda` with one state per GPU of the node; GPU ``own`` belongs to this rank."""

    def __init__(self, states: list[int], own: int) -> None:
        self.states = [torch.tensor(state) for state in states]
        self.own = own

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.own

    def get_rng_state(self) -> torch.Tensor:
        return self.states[self.own]

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return list(self.states)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.states[self.own] = state


def loop(mode: ParallelMode) -> Any:
    return SimpleNamespace(arguments=SimpleNamespace(parallel_mode=mode))


@pytest.mark.parametrize(
    ("mode", "wrote", "reads", "expected"),
    [
        (ParallelMode.DISTRIBUTED, Gpus([1, 2], 1), Gpus([7, 8], 1), [7, 2]),
        (ParallelMode.DISTRIBUTED, Gpus([1, 2, 3, 4], 1), Gpus([7, 8], 1), [7, 2]),
        (ParallelMode.DISTRIBUTED, Gpus([1, 2], 1), Gpus([6, 7, 8, 9], 3), [6, 7, 8, 9]),
        (ParallelMode.NOT_PARALLEL, Gpus([1], 0), Gpus([7], 0), [1]),
        (ParallelMode.NOT_PARALLEL, Gpus([1], 0), Gpus([7, 8], 1), [7, 1]),
    ],
)
def test_rank_restores_the_state_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: ParallelMode, wrote: Gpus, reads: Gpus, expected: list[int]
) -> None:
    monkeypatch.setattr(torch, "cuda", wrote)
    states = checkpoint_files._random_states(loop(mode))
    assert isinstance(states["cuda"], torch.Tensor) == (mode is ParallelMode.NOT_PARALLEL)
    path = tmp_path / "rng_state_0.pth"
    torch.save(states, path)
    monkeypatch.setattr(torch, "cuda", reads)
    checkpoint_files._set_random_states(path)
    assert [int(state) for state in reads.states] == expected


def test_checkpoint_without_gpu_states_loads_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(checkpoint_files._random_states(loop(ParallelMode.DISTRIBUTED)), path := tmp_path / "rng_state.pth")
    monkeypatch.setattr(torch, "cuda", gpus := Gpus([7], 0))
    checkpoint_files._set_random_states(path)
    assert [int(state) for state in gpus.states] == [7]


def test_every_rank_reads_into_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 wrote tensors of its GPU; the device "meta" stands for it."""
    torch.save({"state": torch.zeros(3)}, path := tmp_path / "optimizer.pt")
    monkeypatch.setattr(torch.serialization, "_get_restore_location", restore := Restore())
    checkpoint_files._read(path)
    assert restore.location == "cpu"


class Restore:
    """Records the location that `torch.load` is asked for."""

    location: Any = "nothing was loaded"

    def __call__(self, location: Any) -> Any:
        self.location = location
        return lambda storage, _: storage

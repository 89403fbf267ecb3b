"""ZeRO-3 with parameters and optimizer on NVMe: its checkpoints hold all of it, and every way leads on from them.

DeepSpeed compiles its asynchronous I/O first, for several minutes: ``make test-nvme``.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config import Strategy
from shardmake.reshard.stage import reshard
from shardmake.train import ledger
from shardmake.train.ledger import CheckpointRecord
from tests.workflow.by_hand import launch_by_hand, train_by_hand
from tests.workflow.checkout import Checkout

pytestmark = [pytest.mark.training, pytest.mark.nvme, pytest.mark.timeout(1800)]
Saves = dict[int, tuple[CheckpointRecord, Path]]
SAVES = {"every_steps": 1, "keep": 9, "asynchronous": True}
SUB_GROUPS = {"sub_group_size": 300_000}
"""Two that are swapped out; the weights of the norms are a third, too small for that."""


@pytest.fixture
def losses(lab: Checkout) -> dict[int, float]:
    """Of a training that saved in the background after every step."""
    return train_by_hand(lab, "zero3-nvme", checkpoints=SAVES, zero=SUB_GROUPS)


@pytest.fixture
def saves(lab: Checkout, losses: dict[int, float]) -> Saves:
    """Its checkpoints, by step."""
    return {record.step: (record, path) for record, path in ledger.sealed(lab.run / "train/checkpoints")}


def forget_after(lab: Checkout, saves: Saves, step: int) -> None:
    """Put the training back to where it was then."""
    for record, path in saves.values():
        if record.step > step:
            ledger.remove(path)
    (lab.run / "train/receipt.json").unlink()


def test_it_computes_what_ddp_computes_and_swaps_to_files(
    losses: dict[int, float], reference: dict[int, float], saves: Saves
) -> None:
    assert losses == pytest.approx(reference, abs=2e-4)
    waited = {step: record.blocked_seconds is None for step, (record, _) in saves.items()}
    assert waited == {1: False, 2: False, 3: False, 4: True}
    record, _ = saves[3]
    swapped = [entry.size for name, entry in record.files.items() if name.endswith(".swp")]
    assert len(swapped) == 2 * 2 * 3 and min(swapped) >= 1 << 20, "ranks, sub-groups, weights and moments"


@pytest.mark.parametrize("engine", ["trainer", "loop"])
def test_it_goes_on_as_if_it_had_not_been_away(
    lab: Checkout, losses: dict[int, float], saves: Saves, engine: str
) -> None:
    forget_after(lab, saves, 2)
    launch_by_hand(lab, "zero3-nvme", resume_from=saves[2][1], engine=engine, checkpoints=SAVES, zero=SUB_GROUPS)
    assert lab.losses() == (losses if engine == "trainer" else pytest.approx(losses, abs=2e-4))
    lab("shardmake", "consolidate", "demo")


@pytest.mark.usefixtures("reference")
def test_it_is_merged(lab: Checkout, saves: Saves) -> None:
    lab("shardmake", "consolidate", "demo")
    merged, expected = load_file(lab.run / "model/model.safetensors"), load_file(lab.root / "reference.safetensors")
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("strategy", ["zero3-offload", "fsdp"])
def test_it_goes_on_under_another_strategy(
    lab: Checkout, losses: dict[int, float], saves: Saves, strategy: Strategy
) -> None:
    forget_after(lab, saves, 2)
    out = lab.run / "train/resharded"
    reshard(saves[2][1], out, strategy, 2, print)
    launch_by_hand(lab, strategy, resume_from=out, checkpoints=SAVES)
    assert lab.losses() == pytest.approx(losses, abs=2e-4)

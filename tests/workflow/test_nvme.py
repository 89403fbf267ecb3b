"""ZeRO-3 with parameters and optimizer on NVMe: its checkpoints hold all of it, and every way leads on from them.

DeepSpeed compiles its asynchronous I/O first, for several minutes: ``make test-nvme``.
"""

import pytest
import torch
from safetensors.torch import load_file

from shardmake.checkpoint import store
from shardmake.checkpoint.reshard.convert import reshard
from shardmake.config.models import Strategy
from tests.workflow.by_hand import forget_after, launch_by_hand, train_by_hand
from tests.workflow.checkout import Checkout

pytestmark = [pytest.mark.training, pytest.mark.nvme, pytest.mark.timeout(1800)]
SAVES = {"every_steps": 1, "keep": 9, "asynchronous": True}
SUB_GROUPS = {"sub_group_size": 300_000}
"""Two that are swapped out; the weights of the norms are a third, too small for that."""


@pytest.fixture
def losses(lab: Checkout) -> dict[int, float]:
    """Of a training that saved in the background after every step."""
    return train_by_hand(lab, "zero3-nvme", checkpoints=SAVES, zero=SUB_GROUPS)


def test_it_computes_what_ddp_computes_and_swaps_to_files(
    lab: Checkout, losses: dict[int, float], reference: dict[int, float]
) -> None:
    assert losses == pytest.approx(reference, abs=2e-4)
    records = {record.step: record for record, _ in store.committed(lab.run / "train/checkpoints")}
    waited = {step: record.blocked_seconds is None for step, record in records.items()}
    assert waited == {1: False, 2: False, 3: False, 4: True}
    swapped = [entry.size for name, entry in records[3].files.items() if name.endswith(".swp")]
    assert len(swapped) == 2 * 2 * 3 and min(swapped) >= 1 << 20, "ranks, sub-groups, weights and moments"


@pytest.mark.parametrize("engine", ["trainer", "loop"])
def test_it_goes_on_as_if_it_had_not_been_away(lab: Checkout, losses: dict[int, float], engine: str) -> None:
    checkpoint = forget_after(lab, 2)
    launch_by_hand(lab, "zero3-nvme", resume_from=checkpoint, engine=engine, checkpoints=SAVES, zero=SUB_GROUPS)
    assert lab.losses() == (losses if engine == "trainer" else pytest.approx(losses, abs=2e-4))
    lab("shardmake", "consolidate", "demo")


@pytest.mark.usefixtures("reference", "losses")
def test_it_is_merged(lab: Checkout) -> None:
    lab("shardmake", "consolidate", "demo")
    merged, expected = load_file(lab.run / "model/model.safetensors"), load_file(lab.root / "reference.safetensors")
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("strategy", ["zero3-offload", "fsdp"])
def test_it_goes_on_under_another_strategy(lab: Checkout, losses: dict[int, float], strategy: Strategy) -> None:
    out = lab.run / "train/resharded"
    reshard(forget_after(lab, 2), out, strategy, 2, print)
    launch_by_hand(lab, strategy, resume_from=out, checkpoints=SAVES)
    assert lab.losses() == pytest.approx(losses, abs=2e-4)


def test_it_goes_on_with_other_ranks(lab: Checkout, losses: dict[int, float]) -> None:
    out = lab.run / "train/resharded"
    reshard(forget_after(lab, 2), out, "zero3-nvme", 4, print)
    launch_by_hand(lab, "zero3-nvme", nodes=2, resume_from=out, checkpoints=SAVES, zero=SUB_GROUPS)
    assert lab.losses() == pytest.approx(losses, abs=2e-4)


@pytest.mark.parametrize(("strategy", "engine"), [("zero3-offload", "trainer"), ("zero2", "loop"), ("fsdp", "loop")])
def test_another_strategy_goes_on_with_it(lab: Checkout, strategy: Strategy, engine: str) -> None:
    expected = train_by_hand(lab, strategy, checkpoints=SAVES)
    out = lab.run / "train/resharded"
    reshard(forget_after(lab, 2), out, "zero3-nvme", 2, print)
    launch_by_hand(lab, "zero3-nvme", resume_from=out, engine=engine, checkpoints=SAVES, zero=SUB_GROUPS)
    assert lab.losses() == pytest.approx(expected, abs=2e-4)
    swapped = forget_after(lab, 3)
    launch_by_hand(lab, "zero3-nvme", resume_from=swapped, engine=engine, checkpoints=SAVES, zero=SUB_GROUPS)
    assert lab.losses() == pytest.approx(expected, abs=2e-4)

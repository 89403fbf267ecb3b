"""Checkpoints of ZeRO-3 with parameters and optimizer on NVMe are complete and can be resumed in every way.

DeepSpeed first compiles its asynchronous I/O for several minutes: ``make test-nvme``.
"""

from typing import Any

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.reshard.convert import reshard
from shardmake.config.models import Strategy
from tests.workflow.by_hand import assert_merges_as_ddp, launch_by_hand, rewind_to, train_by_hand
from tests.workflow.checkout import Checkout

pytestmark = [pytest.mark.training, pytest.mark.nvme, pytest.mark.timeout(1800)]
SAVES = {"every_steps": 1, "keep": 9, "asynchronous": True}
SUB_GROUPS = {"sub_group_size": 300_000}
"""Two sub-groups are swapped out; the third, the weights of the norms, is too small."""


@pytest.fixture
def losses(shared_checkout: Checkout) -> dict[int, float]:
    return train_by_hand(shared_checkout, "zero3-nvme", checkpoints=SAVES, zero=SUB_GROUPS)


def test_nvme_computes_the_same_as_ddp_and_swaps_to_files(
    shared_checkout: Checkout, losses: dict[int, float], reference: dict[int, float]
) -> None:
    assert losses == pytest.approx(reference, abs=2e-4)
    records = {record.step: record for record, _ in store.committed(shared_checkout.run / "train/checkpoints")}
    blocked = {step: record.blocked_seconds is None for step, record in records.items()}
    assert blocked == {1: False, 2: False, 3: False, 4: True}
    swapped = [entry.size for name, entry in records[3].files.items() if name.endswith(".swp")]
    assert len(swapped) == 2 * 2 * 3 and min(swapped) >= 1 << 20, "ranks, sub-groups, weights and moments"


def test_nvme_resumes_with_the_same_losses(shared_checkout: Checkout, losses: dict[int, float]) -> None:
    checkpoint = rewind_to(shared_checkout, 2)
    launch_by_hand(shared_checkout, "zero3-nvme", resume_from=checkpoint, checkpoints=SAVES, zero=SUB_GROUPS)
    assert shared_checkout.losses() == losses
    shared_checkout("shardmake", "consolidate", "demo")


@pytest.mark.usefixtures("reference", "losses")
def test_nvme_checkpoint_is_merged(shared_checkout: Checkout) -> None:
    assert_merges_as_ddp(shared_checkout)


@pytest.mark.parametrize(
    ("strategy", "nodes", "zero"), [("zero3-offload", 1, None), ("fsdp", 1, None), ("zero3-nvme", 2, SUB_GROUPS)]
)
def test_nvme_checkpoint_resumes_under_another_strategy(
    shared_checkout: Checkout, losses: dict[int, float], strategy: Strategy, nodes: int, zero: dict[str, Any] | None
) -> None:
    """Or on twice as many ranks."""
    out = shared_checkout.run / "train/resharded"
    reshard(rewind_to(shared_checkout, 2), out, strategy, 2 * nodes)
    launch_by_hand(shared_checkout, strategy, nodes=nodes, resume_from=out, checkpoints=SAVES, zero=zero)
    assert shared_checkout.losses() == pytest.approx(losses, abs=2e-4)


@pytest.mark.parametrize("strategy", ["zero3-offload", "zero2", "fsdp"])
def test_nvme_resumes_from_another_strategy(shared_checkout: Checkout, strategy: Strategy) -> None:
    expected = train_by_hand(shared_checkout, strategy, checkpoints=SAVES)
    out = shared_checkout.run / "train/resharded"
    reshard(rewind_to(shared_checkout, 2), out, "zero3-nvme", 2)
    launch_by_hand(shared_checkout, "zero3-nvme", resume_from=out, checkpoints=SAVES, zero=SUB_GROUPS)
    assert shared_checkout.losses() == pytest.approx(expected, abs=2e-4)
    swapped = rewind_to(shared_checkout, 3)
    launch_by_hand(shared_checkout, "zero3-nvme", resume_from=swapped, checkpoints=SAVES, zero=SUB_GROUPS)
    assert shared_checkout.losses() == pytest.approx(expected, abs=2e-4)

"""ZeRO-3 with parameters and optimizer on NVMe, and DeepSpeed's Adam on the host: saves are resumed in every way.

DeepSpeed first compiles its asynchronous I/O for several minutes, and its Adam for one or two: ``make test-nvme``.
"""

from typing import Any

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.reshard.convert import Route, find_route, reshard
from shardmake.config.models import Cluster, Run, Strategy
from shardmake.render import training_file
from shardmake.run.plan import Choice
from shardmake.run.training_settings import TrainingSettings
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


EVERY_TWO = {"every_steps": 2, "keep": 9}


@pytest.fixture
def rendered_as_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render as for GPUs; ranks without a GPU would otherwise keep torch's Adam."""
    render = training_file.replaced_optimizer

    def with_gpu(choice: Choice, run: Run, cluster: Cluster) -> Any:
        return render(choice, run, cluster.model_copy(update={"accelerator": "a100-80gb"}))

    monkeypatch.setattr(training_file, "replaced_optimizer", with_gpu)


@pytest.mark.usefixtures("rendered_as_with_gpus")
@pytest.mark.parametrize(("wrote", "reads"), [
    ("zero3", "zero3-offload-optimizer"), ("zero2", "zero2-offload"), ("zero2", "zero3-offload"),
    ("zero2-offload", "zero3"), ("zero3-offload", "zero3"),
])  # fmt: skip
def test_each_adam_resumes_from_the_other(
    shared_checkout: Checkout, reference: dict[int, float], wrote: Strategy, reads: Strategy
) -> None:
    assert train_by_hand(shared_checkout, wrote, checkpoints=EVERY_TWO) == pytest.approx(reference, abs=2e-4)
    (last, path), (record, checkpoint) = list(store.committed(shared_checkout.run / "train/checkpoints"))
    assert last.step == 4
    store.remove(path)
    (shared_checkout.run / "train/receipt.json").unlink()
    if find_route(record, checkpoint, reads, 2) is not Route.NATIVE:
        reshard(checkpoint, shared_checkout.run / "train/resharded", reads, 2)
        checkpoint = shared_checkout.run / "train/resharded"
    _, folder = launch_by_hand(shared_checkout, reads, resume_from=checkpoint, checkpoints=EVERY_TWO)
    assert (TrainingSettings.read(folder.training).optimizer is not None) == ("offload" in reads)
    assert shared_checkout.losses() == pytest.approx(reference, abs=2e-4)

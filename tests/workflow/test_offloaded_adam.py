"""A fallback replaces torch's Adam with DeepSpeed's Adam on the host; each resumes from the other's states.

DeepSpeed first compiles its Adam for a minute or two: ``make test-nvme``.
"""

from pathlib import Path
from typing import Any

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.record import CheckpointRecord
from shardmake.checkpoint.reshard.convert import Route, find_route, reshard
from shardmake.config.models import Cluster, Run, Strategy
from shardmake.render import training_file
from shardmake.run.plan import Choice
from shardmake.run.training_settings import TrainingSettings
from tests.workflow.by_hand import launch_by_hand, train_by_hand
from tests.workflow.checkout import Checkout

pytestmark = [pytest.mark.training, pytest.mark.nvme, pytest.mark.timeout(1800)]
SAVES = {"every_steps": 2, "keep": 9}


@pytest.fixture(autouse=True)
def rendered_as_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render as for GPUs; ranks without a GPU would otherwise keep torch's Adam."""
    render = training_file.replaced_optimizer

    def with_gpu(choice: Choice, run: Run, cluster: Cluster) -> Any:
        return render(choice, run, cluster.model_copy(update={"accelerator": "a100-80gb"}))

    monkeypatch.setattr(training_file, "replaced_optimizer", with_gpu)


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ("zero3", "zero3-offload-optimizer"),
        ("zero2", "zero2-offload"),
        ("zero2", "zero3-offload"),
        ("zero2-offload", "zero3"),
        ("zero3-offload", "zero3"),
    ],
)
def test_each_adam_resumes_from_the_other(
    shared_checkout: Checkout, reference: dict[int, float], wrote: Strategy, reads: Strategy
) -> None:
    assert train_by_hand(shared_checkout, wrote, checkpoints=SAVES) == pytest.approx(reference, abs=2e-4)
    (last, path), found = list(store.committed(shared_checkout.run / "train/checkpoints"))
    assert last.step == 4
    store.remove(path)
    (shared_checkout.run / "train/receipt.json").unlink()
    _, folder = launch_by_hand(
        shared_checkout, reads, resume_from=_reshard_if_needed(shared_checkout, *found, reads), checkpoints=SAVES
    )
    assert (TrainingSettings.read(folder.training).optimizer is not None) == ("offload" in reads)
    assert shared_checkout.losses() == pytest.approx(reference, abs=2e-4)


def _reshard_if_needed(
    shared_checkout: Checkout, record: CheckpointRecord, checkpoint: Path, strategy: Strategy
) -> Path:
    if find_route(record, checkpoint, strategy, 2) is Route.NATIVE:
        return checkpoint
    out = shared_checkout.run / "train/resharded"
    reshard(checkpoint, out, strategy, 2)
    return out

"""A fallback replaces torch's Adam with DeepSpeed's Adam on the host; each resumes from the other's states.

DeepSpeed first compiles its Adam for a minute or two: ``make test-nvme``.
"""

from typing import Any

import pytest

from shardmake.checkpoint import store
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


@pytest.mark.parametrize(("wrote", "reads"), [
    ("zero3", "zero3-offload-optimizer"), ("zero2", "zero2-offload"), ("zero2", "zero3-offload"),
    ("zero2-offload", "zero3"), ("zero3-offload", "zero3"),
])  # fmt: skip
def test_each_adam_resumes_from_the_other(
    shared_checkout: Checkout, reference: dict[int, float], wrote: Strategy, reads: Strategy
) -> None:
    assert train_by_hand(shared_checkout, wrote, checkpoints=SAVES) == pytest.approx(reference, abs=2e-4)
    (last, path), (record, checkpoint) = list(store.committed(shared_checkout.run / "train/checkpoints"))
    assert last.step == 4
    store.remove(path)
    (shared_checkout.run / "train/receipt.json").unlink()
    if find_route(record, checkpoint, reads, 2) is not Route.NATIVE:
        reshard(checkpoint, shared_checkout.run / "train/resharded", reads, 2)
        checkpoint = shared_checkout.run / "train/resharded"
    _, folder = launch_by_hand(shared_checkout, reads, resume_from=checkpoint, checkpoints=SAVES)
    assert (TrainingSettings.read(folder.training).optimizer is not None) == ("offload" in reads)
    assert shared_checkout.losses() == pytest.approx(reference, abs=2e-4)

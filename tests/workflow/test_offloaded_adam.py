"""A fallback down the fallbacks puts DeepSpeed's Adam, which works on the host, in the place of torch's; and back again.

DeepSpeed compiles it first, for a minute or two: ``make test-nvme``.
"""

from pathlib import Path
from typing import Any

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.record import CheckpointRecord
from shardmake.checkpoint.reshard.convert import find_route, reshard
from shardmake.checkpoint.reshard.routes import Route
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
    """Ranks without a GPU keep torch's Adam otherwise."""
    render = training_file.cpu_optimizer

    def with_gpu(choice: Choice, run: Run, cluster: Cluster) -> Any:
        return render(choice, run, cluster.model_copy(update={"accelerator": "a100-80gb"}))

    monkeypatch.setattr(training_file, "cpu_optimizer", with_gpu)


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
def test_either_adam_goes_on_from_the_other(
    lab: Checkout, reference: dict[int, float], wrote: Strategy, reads: Strategy
) -> None:
    assert train_by_hand(lab, wrote, checkpoints=SAVES) == pytest.approx(reference, abs=2e-4)
    (last, path), found = list(store.committed(lab.run / "train/checkpoints"))
    assert last.step == 4
    store.remove(path)
    (lab.run / "train/receipt.json").unlink()
    _, folder = launch_by_hand(lab, reads, resume_from=_as_read_by(lab, *found, reads), checkpoints=SAVES)
    assert (TrainingSettings.read(folder.training).optimizer is not None) == ("offload" in reads)
    assert lab.losses() == pytest.approx(reference, abs=2e-4)


def _as_read_by(lab: Checkout, record: CheckpointRecord, checkpoint: Path, strategy: Strategy) -> Path:
    if find_route(record, checkpoint, strategy, 2) is Route.NATIVE:
        return checkpoint
    out = lab.run / "train/resharded"
    reshard(checkpoint, out, strategy, 2, print)
    return out

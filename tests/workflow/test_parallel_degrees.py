"""Data and tensor parallelism together train as data parallelism alone, on 4 and on 8 ranks."""

from pathlib import Path

import pytest

from shardmake.config.models import Strategy
from shardmake.run.paths import RunDir
from tests.mixtures import save_llama
from tests.workflow.forked import Forked, log, losses

pytestmark = pytest.mark.training
DEGREES: tuple[tuple[Strategy, int, int], ...] = (("zero2", 2, 2), ("zero1", 2, 4), ("zero2", 4, 2))
"""A strategy, the ranks per tensor-parallel group, and the groups."""


def test_data_and_tensor_degrees_together(forked: Forked, tmp_path: Path) -> None:
    """The first one also resumes from its own checkpoint."""
    base = save_llama(forked.checkout.root / "resources/demo/base", tmp_path / "base")
    changes = {"model": str(base), "global_batch_size": 8, "checkpoints": {"every_steps": 2}, "learning_rate": 2e-3}
    reference = RunDir(tmp_path / "ddp")
    planned = forked.plan("ddp", 2, **changes | {"micro_batch_size": 4})
    assert forked.train(reference, planned) == [0, 0], log(reference)
    for strategy, tensor, data in DEGREES:
        rundir, ranks = RunDir(tmp_path / f"{strategy}-{tensor}x{data}"), tensor * data
        planned = forked.plan(strategy, ranks, tensor_parallel=tensor, **changes | {"micro_batch_size": 8 // data})
        assert forked.train(rundir, planned) == [0] * ranks, log(rundir)
        assert losses(rundir) == pytest.approx(losses(reference), abs=2e-4)
        if (strategy, tensor, data) == DEGREES[0]:
            forked.assert_repeats(rundir, planned)

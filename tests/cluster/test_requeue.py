"""One training that Slurm restarts; `test_requeue_faults.py` has every strategy and moment."""

import pytest

from tests.cluster.baseline import BaselineRuns
from tests.cluster.fault_run import FaultRun
from tests.cluster.test_requeue_faults import REQUEUE, assert_continues_in_one_job, between_checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.training]


@pytest.mark.proves("slurm", strategy="zero2")
def test_a_restarted_job_ends_with_losses_and_weights_of_an_undisturbed_one(
    run: FaultRun, baseline_run: BaselineRuns
) -> None:
    settings = REQUEUE | {"max_steps": 40}
    assert_continues_in_one_job(run, baseline_run, "zero2", between_checkpoints, settings)

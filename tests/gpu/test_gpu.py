"""The checks of ``make gpu-check``. docs/gpu.md says what each one means and how a result is judged."""

from statistics import median

import pytest

from shardmake.config.accelerators import ACCELERATORS
from shardmake.config.attention import FLASH_CAPABILITY
from shardmake.config.models import STRATEGIES
from tests.gpu.checks import BASELINE, CHECKPOINT_STEPS, KILLED_STEP, KILLED_STRATEGY, Kit

pytestmark = pytest.mark.gpu
LOSS = 0.02
"""Largest difference of a step's loss of about 8: bf16 rounds activations elsewhere in each library."""
MEMORY_MEDIAN, MEMORY_WORST = 0.10, 0.25
"""Largest relative errors of the planned memory of tensors, over the strategies."""
ENDS_OF_KILL = ("a process was killed", "communication failure")
ATTENTION = 2.0
"""Largest error of varlen in units of that of eager attention in 16 bits."""


def test_node(kit: Kit) -> None:
    assert kit.check_node() == []
    if kit.machine.ranks > 1:
        assert kit.report.all_reduce_gbps, "doctor measured no all-reduce"


def test_attention(kit: Kit) -> None:
    if not kit.machine.is_cpu and ACCELERATORS[kit.machine.accelerator].capability < FLASH_CAPABILITY:
        pytest.skip("variable-length attention needs a GPU from Ampere on")
    errors = kit.compare_attention()
    assert errors.varlen <= ATTENTION * errors.eager


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy(kit: Kit, strategy: str) -> None:
    if reason := kit.machine.why_not(strategy):
        pytest.skip(reason)
    under_ddp, trained = kit.trained(BASELINE), kit.trained(strategy)
    assert list(trained.losses) == list(range(1, kit.workload.steps + 1))
    assert min(trained.losses.values()) < trained.losses[1], "the training does not learn"
    assert trained.loss_difference(under_ddp) <= LOSS


def test_kill_and_resume(kit: Kit) -> None:
    expected = kit.trained(KILLED_STRATEGY)
    attempts, whole = kit.kill_and_resume()
    # Another rank may report its lost connection before the launcher reports the kill.
    assert [attempt.end in ENDS_OF_KILL for attempt in attempts] == [True, False] and attempts[-1].end == "finished"
    assert attempts[0].checkpoint_step == KILLED_STEP // CHECKPOINT_STEPS * CHECKPOINT_STEPS
    assert whole.loss_difference(expected) <= LOSS


def test_out_of_memory_fallback(kit: Kit) -> None:
    *failed, last = kit.run_out_of_memory()
    assert failed and {attempt.end for attempt in failed} == {"GPU out of memory"}
    assert last.end == "finished" and last.fallback > 0


def test_memory(kit: Kit) -> None:
    errors = {one.strategy: one.memory_error for one in kit.report.trained}
    measured = [abs(error) for error in errors.values() if error is not None]
    assert errors and len(measured) == len(errors), f"no training, or one without a measured peak: {errors}"
    assert median(measured) <= MEMORY_MEDIAN and max(measured) <= MEMORY_WORST, errors


def test_step_time(kit: Kit) -> None:
    """The ratio to the model is reported and not judged: so small a model waits for the CPU that launches kernels."""
    ratios = {one.strategy: one.step_ratio for one in kit.report.trained}
    print(ratios)
    assert ratios and all(ratio > 0 for ratio in ratios.values())

"""The simulated training against what Young's formula says of it, and against chances that it cannot ignore."""

import pytest

from benchmarks.goodput import GPUS_PER_NODE, RATES, Costs, operation_seconds, simulate
from shardmake.checkpoint.interval import interval_seconds, lost_share

LLAMA, _ = RATES
SAVES_ALONE = Costs(drag=0, notice=0, hang=0, start=0, preflight=0, still_broken=0, validate=0, operations=False)


@pytest.mark.parametrize("gpus", [1024, 4096])
def test_where_only_saves_and_lost_steps_cost_time_the_loss_is_youngs(gpus: int) -> None:
    row = simulate(gpus, LLAMA, SAVES_ALONE, days=54, repeats=10, seed=1)
    mtbf = 86400 / (LLAMA.per_node_day * gpus / GPUS_PER_NODE)
    for saving, waits in (("synchronous", SAVES_ALONE.save), ("asynchronous", SAVES_ALONE.local)):
        lost = lost_share(waits, interval_seconds(waits, mtbf), mtbf)
        late = SAVES_ALONE.save / mtbf if saving == "asynchronous" else 0  # what was still on its way is lost, too
        found = row[saving]
        assert 1 - found["ratio"] == pytest.approx(lost + late, abs=4 * found["standard_error"] + lost**2)


def test_file_operations_grow_with_the_job() -> None:
    assert operation_seconds(4096, "save", "resume") == pytest.approx(4 * operation_seconds(1024, "save", "resume"))
    assert operation_seconds(1024, "save") < operation_seconds(1024, "save", "validate")


def test_more_gpus_train_for_less_of_their_time_and_asynchronous_saves_for_more() -> None:
    small, large = (simulate(gpus, LLAMA, Costs(), days=54, repeats=3, seed=1) for gpus in (1024, 16384))
    assert large["synchronous"]["ratio"] < small["synchronous"]["ratio"] < small["asynchronous"]["ratio"] < 1
    assert large["synchronous"]["ratio"] < large["asynchronous"]["ratio"]
    assert large["synchronous"]["failures"] > 10 * small["synchronous"]["failures"]

"""Faults during saves, damaged checkpoints and changed numbers of ranks, on the three-node Slurm."""

import json
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardmake.checkpoint import store
from shardmake.core.errors import STOPPED
from shardmake.run.paths import RunDir
from tests.cluster.baseline import STRATEGIES, BaselineRuns, Ends, assert_equals_baseline, recover_from
from tests.cluster.fault_run import FaultRun, cut_short, flip_a_bit, make_fault_run
from tests.cluster.harness import STATE, Cluster
from tests.cluster.test_faults import kill_node

pytestmark = [pytest.mark.cluster, pytest.mark.training, pytest.mark.faults, pytest.mark.timeout(1800)]
CHANCE = random.Random(11)
KILLED: Ends = [{"a process was killed", "communication failure"}]
PHASES = {
    "before": (1, r"^(open|torch\.save) /\.saving"),
    "between-files": (1, r"^torch\.save .*/rng_state_1"),
    "before-the-record": (0, r"^open .*/\.shardmake\.json"),
    "after": (0, r"^os\.rmdir /\.saving$"),
}
"""The rank that is killed, and the write before which it is killed; see `tests.kill_at_write`."""
SHARDS = ("model_states.pt", "optim_states.pt", ".distcp")


def checkpoints(run: FaultRun) -> Path:
    return RunDir(run.checkout.run).checkpoints


def order_killer(run: FaultRun, rank: int, pattern: str, mode: str) -> None:
    """Order a rank to kill itself, or to fill the disk, at the next matching write of a save."""
    log = str(run.checkout.root / "writes.log")
    order = {"folder": str(checkpoints(run)), "log": log, "at": pattern, "mode": mode}
    run.order(f"killer-{rank}", json.dumps(order))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_is_killed_in_a_save(run: FaultRun, baseline_run: BaselineRuns, strategy: str, phase: str) -> None:
    """Training resumes from the newest committed checkpoint."""
    run.repair()
    baseline = baseline_run(strategy)
    writes = run.checkout.root / "writes.log"
    writes.unlink(missing_ok=True)

    def kill_in_save(run: FaultRun, attempts: int) -> Ends:
        run.wait_for_steps(CHANCE.randint(2, 15), attempts)
        order_killer(run, *PHASES[phase], "before")
        return KILLED

    recover_from(run, [kill_in_save], baseline)
    written = writes.read_text().splitlines()
    step = int(written[-1].partition("checkpoint-")[2].partition("/")[0] or _step_of_rename(written))
    assert run.history()[0]["checkpoint_step"] == (step if phase == "after" else step - run.every)


def _step_of_rename(lines: list[str]) -> int:
    return int(next(line for line in reversed(lines) if line.startswith("os.rename")).rpartition("-")[2])


@pytest.mark.parametrize("harm", [flip_a_bit, cut_short])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_with_a_damaged_shard_resumes_from_the_checkpoint_before(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str, harm: Callable[[Path, random.Random], None]
) -> None:
    run.repair()
    baseline = baseline_run(strategy)
    steps: list[int] = []

    def damage(run: FaultRun, attempts: int) -> Ends:
        """Damage the newest checkpoint of a training that is stopped, so that it stays the newest."""
        run.cluster.wait_until(lambda: len(list(store.committed(checkpoints(run)))) > 1, "two checkpoints", timeout=240)
        beat = run.wait_for_steps(2, attempts)
        run.send("STOP", beat.pid, beat.host)
        run.cluster.run(["sleep", "1"])  # the other rank finishes its part of a save
        (newest, path), (before, _) = list(store.committed(checkpoints(run)))[:2]
        steps.extend([newest.step, before.step])
        harm(path / CHANCE.choice([name for name in newest.files if name.endswith(SHARDS)]), CHANCE)
        run.send("KILL", beat.pid, beat.host)
        return [*KILLED, {"damaged checkpoint"}] if harm is flip_a_bit else KILLED

    recover_from(run, [damage], baseline)
    newest_step, step_before = steps
    found = " is damaged and was set aside" if harm is flip_a_bit else ": "
    assert re.search(rf"checkpoint-{newest_step}{found}", run.log())
    assert f"resuming from checkpoint-{step_before}" in run.log()
    assert len(store.damaged(checkpoints(run))) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_node_fails_while_checkpoints_are_saved_asynchronously(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str
) -> None:
    """Checkpoints that only its scratch had are lost; training resumes from the shared folder."""
    run.repair()
    baseline = baseline_run(strategy)
    run.configure(strategy, checkpoints={"every_steps": run.every, "asynchronous": True})
    recover_from(run, [kill_node], baseline)
    records = [record for record, _ in store.committed(checkpoints(run))]
    assert any(record.blocked_seconds is not None for record in records), "only the last save waits"


@pytest.fixture(scope="module")
def run_on_a_small_disk(inputs: Path) -> Iterator[FaultRun]:
    """Create a run on a second cluster, whose nodes share a file system that a test may fill."""
    disk = STATE.with_name(f"{STATE.name}-disk")
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", disk], check=True)
    try:
        with Cluster(STATE.with_name(f"{STATE.name}-second")) as cluster:
            yield make_fault_run(cluster, disk / "faults", inputs)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
        disk.rmdir()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_disk_fills_up_during_a_save(
    run_on_a_small_disk: FaultRun, baseline_run: BaselineRuns, strategy: str
) -> None:
    """The attempt ends with its earlier checkpoints, and the driver resumes once there is space."""
    baseline, run = baseline_run(strategy), run_on_a_small_disk
    run.configure(strategy)
    run.remove_training()
    run.start()
    run.cluster.wait_until(lambda: any(store.committed(checkpoints(run))), "a checkpoint", timeout=240)
    order_killer(run, 1, r"^(open|torch\.save) /\.saving", "fill")
    run.cluster.wait_until(lambda: "The driver waits up to" in run.log(), "the wait", timeout=240)
    newest = store.newest_valid(checkpoints(run))
    assert newest is not None

    (checkpoints(run).parent / "filler").unlink()
    assert run.wait() == 0, run.log()
    assert f"resuming from {newest[1].name}" in run.log()
    assert run.ends() == ["disk full", "finished"], run.log()
    assert_equals_baseline(run, baseline)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_resumes_from_4_ranks_on_2_and_then_on_3(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str
) -> None:
    """The batches stay the same, in another order of summation."""
    run.repair()
    settings = {"global_batch_size": 12, "micro_batch_size": 1, "max_steps": 30}
    baseline = baseline_run(strategy, **settings)
    ranks = []
    for nodes, ranks_per_node in ((2, 2), (2, 1), (3, 1)):
        run.configure(strategy, ranks_per_node=ranks_per_node, nodes=nodes, **settings)
        run.start()
        if nodes < 3:
            run.wait_for_steps(CHANCE.randint(2, 10), len(ranks) + 1)
            (run.checkout.run / "train/STOP").touch()
        assert run.wait() == (STOPPED if nodes < 3 else 0), run.log()
        ranks.append(run.attempts()[-1].read().world_size)
    assert ranks == [4, 2, 3]
    assert run.ends() == ["stop requested", "stop requested", "finished"], run.log()
    steps = [record["checkpoint_step"] for record in run.history()]
    assert 0 < steps[0] < steps[1] < steps[2] == 30
    assert_equals_baseline(run, baseline, tolerance=1e-3)

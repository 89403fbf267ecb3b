"""Faults while a checkpoint is saved, and what happens to checkpoints afterwards, on the three-node Slurm."""

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.faults import cut_short, flip_a_bit
from shardmake.checkpoint import store
from shardmake.run.paths import RunDir
from tests.cluster.harness import STATE, Cluster
from tests.cluster.lab import FaultLab, make_lab
from tests.cluster.peace import STRATEGIES, Ends, Peace, assert_as_in_peace, survive
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
"""The rank that dies, and the write that it does not live to do; see `tests.kill_at_write`."""
SHARDS = ("model_states.pt", "optim_states.pt", ".distcp")


def checkpoints(lab: FaultLab) -> Path:
    return RunDir(lab.checkout.run).checkpoints


def order_killer(lab: FaultLab, rank: int, pattern: str, mode: str) -> None:
    """Have a rank die, or fill the disk, at the next write of a save that matches."""
    log = str(lab.checkout.root / "writes.log")
    order = {"folder": str(checkpoints(lab)), "log": log, "at": pattern, "mode": mode}
    lab.order(f"killer-{rank}", json.dumps(order))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_is_killed_in_a_save(lab: FaultLab, in_peace: Peace, strategy: str, phase: str) -> None:
    """What was sealed counts, and only that: training goes on from the save before, or from this one."""
    lab.repair()
    calm = in_peace(strategy)
    writes = lab.checkout.root / "writes.log"
    writes.unlink(missing_ok=True)

    def die(lab: FaultLab, attempts: int) -> Ends:
        lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
        order_killer(lab, *PHASES[phase], "before")
        return KILLED

    survive(lab, [die], calm)
    dying = writes.read_text().splitlines()
    step = int(dying[-1].partition("checkpoint-")[2].partition("/")[0] or _step_of_rename(dying))
    assert lab.history()[0]["checkpoint_step"] == (step if phase == "after" else step - lab.every)


def _step_of_rename(lines: list[str]) -> int:
    return int(next(line for line in reversed(lines) if line.startswith("os.rename")).rpartition("-")[2])


@pytest.mark.parametrize("harm", [flip_a_bit, cut_short])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_damaged_shard_sends_the_resume_one_checkpoint_back(
    lab: FaultLab, in_peace: Peace, strategy: str, harm: Callable[[Path, random.Random], None]
) -> None:
    lab.repair()
    calm = in_peace(strategy)
    steps: list[int] = []

    def damage(lab: FaultLab, attempts: int) -> Ends:
        """In the newest checkpoint, of a training that is held so that it stays the newest."""
        lab.cluster.wait_until(lambda: len(list(store.committed(checkpoints(lab)))) > 1, "two checkpoints", timeout=240)
        beat = lab.wait_for_steps(2, attempts)
        lab.send("STOP", beat.pid, beat.host)
        lab.cluster.run(["sleep", "1"])  # what the other rank still has to do for a save, it does
        (newest, path), (before, _) = list(store.committed(checkpoints(lab)))[:2]
        steps.extend([newest.step, before.step])
        harm(path / CHANCE.choice([name for name in newest.files if name.endswith(SHARDS)]), CHANCE)
        lab.send("KILL", beat.pid, beat.host)
        return KILLED

    survive(lab, [damage], calm)
    newest_step, step_before = steps
    assert f"Skipped checkpoint-{newest_step}" in lab.log()
    assert f"resuming from checkpoint-{step_before}" in lab.log()
    assert len(store.damaged(checkpoints(lab))) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_node_dies_while_checkpoints_are_saved_asynchronously(lab: FaultLab, in_peace: Peace, strategy: str) -> None:
    """What only its scratch held is gone; training goes on from what had reached the shared folder."""
    lab.repair()
    calm = in_peace(strategy)
    lab.configure(strategy, checkpoints={"every_steps": lab.every, "asynchronous": True})
    survive(lab, [kill_node], calm)
    records = [record for record, _ in store.committed(checkpoints(lab))]
    assert any(record.blocked_seconds is not None for record in records), "the last save alone waits"


@pytest.fixture(scope="module")
def lab_on_a_small_disk(inputs: Path) -> Iterator[FaultLab]:
    """A cluster of its own, whose nodes share a file system that a test may fill."""
    disk = STATE.with_name(f"{STATE.name}-disk")
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", disk], check=True)
    try:
        with Cluster(STATE.with_name(f"{STATE.name}-second")) as cluster:
            yield make_lab(cluster, disk / "faults", inputs)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
        disk.rmdir()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_disk_is_full_in_the_middle_of_a_save(
    lab_on_a_small_disk: FaultLab, in_peace: Peace, strategy: str
) -> None:
    """Training ends with what to do; what was sealed stays, and the same command goes on once there is room."""
    calm, lab = in_peace(strategy), lab_on_a_small_disk
    lab.configure(strategy)
    lab.forget()
    lab.start()
    lab.cluster.wait_until(lambda: any(store.committed(checkpoints(lab))), "a checkpoint", timeout=240)
    order_killer(lab, 1, r"^(open|torch\.save) /\.saving", "fill")
    assert lab.wait() == 2, lab.log()
    filler = checkpoints(lab).parent / "filler"
    assert filler.exists() and lab.ends() == ["error in the training"], lab.log()
    assert "The disk filled up while checkpoint-" in lab.log()
    newest = store.newest_valid(checkpoints(lab))
    assert newest is not None

    filler.unlink()
    lab.start()
    assert lab.wait() == 0, lab.log()
    assert f"resuming from {newest[1].name}" in lab.log()
    assert_as_in_peace(lab, calm)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_goes_on_from_4_ranks_on_2_and_then_on_3(lab: FaultLab, in_peace: Peace, strategy: str) -> None:
    """The same batches, in another order of summation."""
    lab.repair()
    settings = {"global_batch_size": 12, "micro_batch_size": 1, "max_steps": 30}
    calm = in_peace(strategy, **settings)
    ranks = []
    for nodes, ranks_per_node in ((2, 2), (2, 1), (3, 1)):
        lab.configure(strategy, ranks_per_node=ranks_per_node, nodes=nodes, **settings)
        lab.start()
        if nodes < 3:
            lab.wait_for_steps(CHANCE.randint(2, 10), len(ranks) + 1)
            (lab.checkout.run / "train/STOP").touch()
        assert lab.wait() == (2 if nodes < 3 else 0), lab.log()
        ranks.append(lab.attempts()[-1].read().world_size)
    assert ranks == [4, 2, 3]
    assert lab.ends() == ["stop requested", "stop requested", "finished"], lab.log()
    steps = [record["checkpoint_step"] for record in lab.history()]
    assert 0 < steps[0] < steps[1] < steps[2] == 30
    assert_as_in_peace(lab, calm, tolerance=1e-3)

"""Faults during saves, damaged checkpoints and changed numbers of ranks, on the three-node Slurm."""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.record import RECORD_NAME, read_record
from shardmake.core.atomic import sealed, unsealed
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


def flip_a_shard(newest: Path) -> None:
    flip_a_bit(a_shard(newest), CHANCE)


def cut_a_shard(newest: Path) -> None:
    cut_short(a_shard(newest), CHANCE)


def flip_the_record(newest: Path) -> None:
    flip_a_bit(newest / RECORD_NAME, CHANCE)


def swap_a_shard_for_a_link(newest: Path) -> None:
    """To somebody's file with the same content, which is read and must stay when retention removes the checkpoint."""
    shard = a_shard(newest)
    shard.rename(private := newest.parents[2] / "private")
    shard.symlink_to(private)


def put_a_foreign_checkpoint_beside(newest: Path) -> None:
    foreign = newest.with_name("checkpoint-1000")
    shutil.copytree(newest, foreign)
    record = unsealed(json.loads((foreign / RECORD_NAME).read_text()))
    (foreign / RECORD_NAME).write_text(json.dumps(sealed(record | {"step": 1000, "settings_digest": "another run"})))


def a_shard(checkpoint: Path) -> Path:
    record = read_record(checkpoint)
    assert record
    return checkpoint / CHANCE.choice([name for name in record.files if name.endswith(SHARDS)])


HARMS: dict[Callable[[Path], None], tuple[str, bool]] = {
    flip_a_shard: ("Skipped checkpoint-{}: .*its checksum differs", True),
    cut_a_shard: ("Skipped checkpoint-{}: ", True),
    flip_the_record: ("Skipped checkpoint-{}: .*is damaged or cannot be read", True),
    swap_a_shard_for_a_link: ("resuming from checkpoint-{}", False),
    put_a_foreign_checkpoint_beside: ("checkpoint-1000 has other settings than this run and is not used", False),
}
"""Changes of the newest checkpoint by somebody, the driver's line about each, and if an older one is resumed."""


@pytest.mark.parametrize(("harm", "reader"), [*((harm, "driver") for harm in HARMS), (flip_a_shard, "job")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_whose_checkpoints_somebody_changed_resumes_from_the_newest_intact_one(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str, harm: Callable[[Path], None], reader: str
) -> None:
    """The nodes of a job read a checkpoint that is too large for the driver, and the job keeps its nodes."""
    run.repair()
    baseline = baseline_run(strategy)
    steps: list[int] = []

    def change(run: FaultRun, attempts: int) -> Ends:
        """Change the newest checkpoint of a training that is stopped, so that it stays the newest."""
        run.cluster.wait_until(lambda: len(list(store.committed(checkpoints(run)))) > 1, "two checkpoints", timeout=240)
        beat = run.wait_for_steps(2, attempts)
        run.send("STOP", beat.pid, beat.host)
        run.cluster.run(["sleep", "1"])  # the other rank finishes its part of a save
        (newest, path), (before, _) = list(store.committed(checkpoints(run)))[:2]
        steps.extend([newest.step, before.step])
        harm(path)
        run.send("KILL", beat.pid, beat.host)
        return [KILLED[0] | {"hang"}]  # on a busy machine it was stopped for too long

    in_job = reader == "job"
    recover_from(run, [change], baseline, **({"READ_IN_JOB": "1"} if in_job else {}))
    line, is_lost = HARMS[harm]
    if in_job:
        line = "checkpoint-{} is damaged and was set aside.* The job starts its ranks again"
    assert re.search(line.format(steps[0]), run.log()), run.log()
    last = run.attempts()[-1].read()
    assert last.again == in_job and Path(last.resume_from or "").name == f"checkpoint-{steps[is_lost]}"
    assert len(store.damaged(checkpoints(run))) == is_lost
    is_foreign, is_link = harm is put_a_foreign_checkpoint_beside, harm is swap_a_shard_for_a_link
    assert len(list(checkpoints(run).glob("foreign-checkpoint-1000-*"))) == is_foreign
    private = run.checkout.run / "private"
    assert private.exists() == is_link
    private.unlink(missing_ok=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_node_that_thaws_in_the_next_attempt_commits_nothing(
    run: FaultRun, baseline_run: BaselineRuns, strategy: str
) -> None:
    """It froze before the rename that commits a checkpoint, and Slurm took it for down."""
    commits = re.compile(r"^os\.rename /\.saving/001/checkpoint-(\d+)$", re.MULTILINE)
    run.repair()
    baseline = baseline_run(strategy)
    writes = run.checkout.root / "writes.log"
    writes.unlink(missing_ok=True)

    def freeze(run: FaultRun, attempts: int) -> Ends:
        run.wait_for_steps(CHANCE.randint(2, 15), attempts)
        first = run.beat(0)
        assert first
        order_killer(run, 0, commits.pattern, "freeze")
        run.cluster.wait_until(lambda: writes.exists() and commits.search(writes.read_text()), "the save", timeout=240)
        run.cluster.run("kill -s STOP -- -1", node=first.host)
        run.cluster.declare_down(first.host)
        run.wait_for_steps(run.every // 2, attempts + 1)
        run.cluster.run("kill -s CONT -- -1", node=first.host)
        run.cluster.run(["scontrol", "update", f"nodename={first.host}", "state=resume"], check=False)  # it may be up
        return [{"node failure"}]

    recover_from(run, [freeze], baseline)
    committed = commits.search(writes.read_text())
    assert committed
    step = int(committed[1])
    written = {record.step: record.attempt for record, _ in store.committed(checkpoints(run))}
    assert written.get(step, 2) == 2 and not store.damaged(checkpoints(run))


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

"""Faults of trainings on the three-node Slurm, by real means; each returns the possible ends of its attempts.

A driver gives up after three attempts without a new checkpoint, so each fault waits for one.
"""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.consolidate_limits import cgroup
from shardmake.checkpoint import store
from shardmake.checkpoint.record import RECORD_NAME, read_record
from shardmake.core.atomic import sealed, unsealed
from shardmake.core.errors import STOPPED
from shardmake.run.plan import Plan
from tests.cluster.baseline import Ends, Fault
from tests.cluster.fault_run import FaultRun

CHANCE = random.Random(7)
KILLED = {"a process was killed", "communication failure"}
SHARDS = ("model_states.pt", "optim_states.pt", ".distcp", "optimizer.pt")


def kill_rank(run: FaultRun, attempts: int) -> Ends:
    beat = run.wait_for_checkpoint(attempts)
    run.send("KILL", beat.pid, beat.host)
    return [KILLED]


def kill_worker(run: FaultRun, attempts: int) -> Ends:
    beat = run.wait_for_checkpoint(attempts)
    run.send("KILL", run.parent(beat, 2), beat.host)
    return [KILLED | {"unknown"}]


def stop_rank(run: FaultRun, attempts: int) -> Ends:
    beat = run.wait_for_checkpoint(attempts)
    run.send("STOP", beat.pid, beat.host)
    run.expect(rf"rank 1 on {beat.host} does not answer \(its process is stopped\)")
    return [{"hang"}]


def rank_sleeps(run: FaultRun, attempts: int) -> Ends:
    run.wait_for_checkpoint(attempts)
    run.order("sleep")
    return [{"hang"}]


def kill_node(run: FaultRun, attempts: int) -> Ends:
    _lose(run, run.wait_for_checkpoint(attempts).host)
    return [{"node failure"}]


def _lose(run: FaultRun, node: str) -> None:
    run.cluster.kill_node(node)
    run.cluster.declare_down(node)


def cut_link(run: FaultRun, attempts: int) -> Ends:
    beat = run.wait_for_checkpoint(attempts)
    run.cluster.cut(beat.host)
    return [{"node failure", "hang", "communication failure"}]


def freeze_and_thaw_node(run: FaultRun, attempts: int) -> Ends:
    """Freeze a node before the rename that commits a checkpoint; it thaws in the next attempt and commits nothing."""
    commits = re.compile(rf"^os\.rename /\.saving/{attempts:03}/checkpoint-(\d+)$", re.MULTILINE)
    run.wait_for_checkpoint(attempts)
    first = run.beat(0)
    assert first
    run.order_killer(0, commits.pattern, "freeze")
    run.cluster.wait_until(lambda: bool(commits.search(run.writes())), "the save", timeout=600)
    run.cluster.run("kill -s STOP -- -1", node=first.host)
    run.cluster.declare_down(first.host)
    run.wait_for_steps(run.every // 2, attempts + 1)
    run.cluster.run("kill -s CONT -- -1", node=first.host)
    run.cluster.run(["scontrol", "update", f"nodename={first.host}", "state=resume"], check=False)  # it may be up
    run.wait_for_checkpoint(attempts + 1)
    frozen = commits.search(run.writes())
    assert frozen
    written = {record.step: record.attempt for record, _ in store.committed(run.checkpoints)}
    assert written.get(int(frozen[1]), attempts + 1) == attempts + 1
    return [{"node failure"}]


def fill_scratch(run: FaultRun, attempts: int) -> Ends:
    """Fill the scratch folder of the first node; the next attempt detects that and excludes the node."""
    beat, first, known = run.wait_for_checkpoint(attempts), run.beat(0), len(run.history())
    assert first
    run.cluster.run(["mount", "-o", "remount,size=64m", "/tmp"], node=first.host)
    run.send("KILL", beat.pid, beat.host)
    run.wait_for_ends(known + 2, "both attempts")
    run.cluster.wait_until(lambda: run.history()[-1]["excluded"], "the decision", timeout=60)
    failing = run.history()[known + 1]
    assert (failing["host"], failing["excluded"]) == (first.host, first.host) and "scratch" in failing["message"]
    return [KILLED, {"preflight failure"}]


def exceed_memory(run: FaultRun, attempts: int) -> Ends:
    """The kernel kills a rank in a cgroup of ours, because the Slurm of the tests makes none; the job gets more."""
    beat = run.wait_for_checkpoint(attempts)
    known = len(run.history())
    with cgroup() as group:
        for pid in (run.parent(beat, 2), run.parent(beat, 1), beat.pid):
            run.cluster.run(["sh", "-c", f"echo {pid} > {group.processes}"], node=beat.host)
        run.order("eat")
        run.wait_for_ends(known + 1, "the attempt")
        run.wait_for_steps(1, attempts + 1)
    starved, next_one = (Plan.read(attempt.plan).resources["train"].memory_gib for attempt in run.attempts()[-2:])
    assert starved < next_one
    run.expect("-> request all of a node's memory")
    return [{"host out of memory"}]


# ---- Slurm: limits, preemption, restarts -------------------------------------------------------------------------


def signals_before_the_limit(run: FaultRun, attempts: int) -> Ends:
    """USR2 as Slurm sends it, twice, and on one node SIGTERM as well, a moment later."""
    beat = run.wait_for_checkpoint(attempts)
    worker = run.parent(beat, 2)
    for _ in range(2):
        run.cluster.run(["scancel", "--signal=USR2", run.job()])
    run.cluster.run(["sh", "-c", f"sleep 0.3; kill -TERM {worker} || true"], node=beat.host)
    return [{"time limit"}]


def end_of_time(run: FaultRun, attempts: int) -> Ends:
    """The limit itself, moved to now. Slurm looks at limits twice a minute, and the training must not end before."""
    run.wait_for_checkpoint(attempts)
    run.slow(3)
    run.cluster.run(["scontrol", "update", f"jobid={run.job()}", "endtime=now"])
    return [{"time limit"}]


def preempt(run: FaultRun, attempts: int) -> Ends:
    """If Slurm may restart the job, it does so unless the ranks save and end within the grace time."""
    run.wait_for_checkpoint(attempts)
    attempt, known = run.attempt(), len(run.history())
    assert attempt
    restarted = attempt.root / f"start-{run.starts()}"
    options = f"--parsable --partition=urgent --nodes=3 --exclusive --output={run.checkout.root}/urgent.out"
    urgent = run.cluster.run(f"sbatch {options} --wrap 'sleep 5'").stdout.strip()
    run.cluster.wait_job(urgent, "COMPLETED", timeout=400)
    run.cluster.wait_until(lambda: len(run.history()) > known or restarted.exists(), "the preemption", timeout=400)
    return [] if restarted.exists() else [{"preempted", "stopped by SIGTERM"}]


@contextmanager
def a_restart(run: FaultRun) -> Iterator[str]:
    """Let Slurm restart the run's job, as ``slurm.extra: {requeue: true}`` does, and wait until it did; yield its id.

    Slurm would otherwise also restart the job after a later fault.
    """
    attempt, job = run.attempt(), run.job()
    assert attempt
    archive = attempt.root / f"start-{run.starts()}"
    run.cluster.run(["scontrol", "update", f"jobid={job}", "requeue=1"])
    yield job
    run.cluster.wait_until(archive.exists, f"the restart of job {job}", timeout=400)
    run.cluster.run(["scontrol", "update", f"jobid={job}", "requeue=0"])


def restart(run: FaultRun) -> Ends:
    """An administrator restarts the job: the same attempt continues, without the driver."""
    with a_restart(run) as job:
        run.cluster.run(["scontrol", "requeue", job])
    return []


def restart_before_the_first_checkpoint(run: FaultRun, attempts: int) -> Ends:
    run.slow(3)
    run.wait_for_steps(2, attempts)
    assert not list(run.checkpoints.glob("checkpoint-*")), "a later step than this fault is about"
    return restart(run)


def restart_between_checkpoints(run: FaultRun, attempts: int) -> Ends:
    run.wait_for_checkpoint(attempts)
    return restart(run)


def restart_in_a_save(run: FaultRun, attempts: int) -> Ends:
    """Rank 1 waits before it writes its state of the random numbers; the other rank has written its part."""
    run.wait_for_checkpoint(attempts)
    run.order_killer(1, r"^torch\.save .*/rng_state_1", "hold")
    run.cluster.wait_until(lambda: "rng_state_1" in run.writes(), "the save", timeout=600)
    return restart(run)


def restart_twice_in_a_row(run: FaultRun, attempts: int) -> Ends:
    """The second time before the restarted ranks have done a step."""
    run.wait_for_checkpoint(attempts)
    return restart(run) + restart(run)


def kill_node_and_restart(run: FaultRun, attempts: int) -> Ends:
    beat = run.wait_for_checkpoint(attempts)
    with a_restart(run):
        _lose(run, beat.host)
    return []


def restart_controller(run: FaultRun, attempts: int) -> Ends:
    run.wait_for_checkpoint(attempts)
    run.cluster.stop_controller()
    run.wait_for_steps(run.every, attempts)
    run.cluster.run(["slurmctld"])
    return []


# ---- the driver and its submissions ------------------------------------------------------------------------------


def kill_driver(run: FaultRun, attempts: int) -> Ends:
    run.wait_for_checkpoint(attempts)
    kill(run)
    with adoption(run):
        run.start()
    return []


def kill_snakemake(run: FaultRun, attempts: int) -> Ends:
    """kill -9 leaves the driver without anybody who reads its end."""
    run.wait_for_checkpoint(attempts)
    run.slow(3)
    kill(run)
    with adoption(run):
        snakemake = run.start_snakemake()
    snakemake.kill()
    snakemake.wait()
    with adoption(run):
        run.start()
    run.expect("The Snakemake of this driver was killed: the driver exits")
    return []


def kill(run: FaultRun) -> None:
    assert run.driver
    run.driver.kill()
    run.driver.wait()


@contextmanager
def adoption(run: FaultRun) -> Iterator[None]:
    """Wait until a driver has adopted the job."""
    known = run.log().count("Adopting job")
    yield
    run.cluster.wait_until(lambda: run.log().count("Adopting job") > known, "adoption", timeout=400)


def _at_the_next_submission(run: FaultRun, attempts: int, order: str, jobs: int = 1) -> Ends:
    """Give ``order`` and let the attempt end; Slurm then accepts ``jobs`` jobs, of which one trains."""
    beat, before = run.wait_for_checkpoint(attempts), run.job_ids()
    kind, _, seconds = order.partition(":")
    run.order(kind, seconds or "now")
    run.send("KILL", beat.pid, beat.host)
    if kind == "kill-before-record":
        assert run.wait() == -9, run.log()
        run.start()
        run.expect("which an earlier driver submitted")
    run.wait_for_steps(1, attempts + 1)
    run.cluster.wait_until(lambda: len(run.job_ids() - before) >= jobs, f"{jobs} jobs", timeout=200)
    assert len(run.job_ids() - before) == jobs
    return [KILLED]


def kill_driver_after_submission(run: FaultRun, attempts: int) -> Ends:
    return _at_the_next_submission(run, attempts, "kill-before-record")


def kill_sbatch_after_submission(run: FaultRun, attempts: int) -> Ends:
    return _at_the_next_submission(run, attempts, "kill-sbatch")


def accept_job_after_sbatch_failed(run: FaultRun, attempts: int) -> Ends:
    """The job is found and adopted before sbatch is repeated."""
    run.expect("Slurm does not take the job at present. The driver looks for it in 5 s.")
    return _at_the_next_submission(run, attempts, "late-sbatch:1")


def accept_job_after_sbatch_was_repeated(run: FaultRun, attempts: int) -> Ends:
    """The late job ends at once beside the other."""
    ends = _at_the_next_submission(run, attempts, "late-sbatch:15", jobs=2)
    words = "because the sbatch of this one had failed"
    logs = run.attempts()[-1].root / "slurm"
    run.cluster.wait_until(lambda: any(words in log.read_text() for log in logs.glob("*.out")), words, timeout=400)
    return ends


def kill_driver_before_submission_and_stop_slurmd(run: FaultRun, attempts: int) -> Ends:
    """Slurm cannot start the worker of the next attempt, as on a node that is too busy to answer in time."""
    beat, known = run.wait_for_checkpoint(attempts), len(run.history())
    run.order("kill-before-submit")
    run.send("KILL", beat.pid, beat.host)
    assert run.wait() == -9, run.log()
    (slurmd,) = run.cluster.run(["pgrep", "-x", "slurmd"], node=beat.host).stdout.split()
    run.send("STOP", slurmd, beat.host)
    try:
        run.start()
        run.wait_for_ends(known + 2, "both attempts")
    finally:
        run.send("CONT", slurmd, beat.host)
    assert run.history()[-1]["message"].startswith(f"Slurm could not start the worker on {beat.host}: ")
    return [KILLED, {"node failure"}]


# ---- ends that stop the driver; the same command resumes ---------------------------------------------------------


def _stop(run: FaultRun, attempts: int, stop: Callable[[], object], status: int = STOPPED) -> None:
    run.wait_for_checkpoint(attempts)
    before = run.job_ids()
    stop()
    assert run.wait() == status, run.log()
    assert run.job_ids() <= before, "no job was submitted again"
    run.start()


def cancel(run: FaultRun, attempts: int) -> Ends:
    _stop(run, attempts, lambda: run.cluster.run(["scancel", run.job()]))
    return [{"cancelled by a person"}]


def raise_in_rank(run: FaultRun, attempts: int) -> Ends:
    _stop(run, attempts, lambda: run.order("raise"), status=2)
    run.expect("the test ordered this error")
    return [{"error in the training"}]


def touch_stop_file(run: FaultRun, attempts: int) -> Ends:
    _stop(run, attempts, (run.checkout.run / "train/STOP").touch)
    return [{"stop requested"}]


# ---- saves and checkpoints ---------------------------------------------------------------------------------------


def _kill_in_save(run: FaultRun, attempts: int, rank: int, pattern: str, *, is_committed: bool = False) -> Ends:
    run.wait_for_checkpoint(attempts)
    known = len(run.history())
    run.order_killer(rank, pattern, "before")
    run.wait_for_ends(known + 1, "the attempt")
    step = int(re.findall(r"/\.saving/.*checkpoint-(\d+)", run.writes())[-1])
    assert run.history()[-1]["checkpoint_step"] == (step if is_committed else step - run.every)
    return [KILLED]


def kill_rank_before_a_save(run: FaultRun, attempts: int) -> Ends:
    return _kill_in_save(run, attempts, 1, r"^(open|torch\.save) /\.saving")


def kill_rank_between_files_of_a_save(run: FaultRun, attempts: int) -> Ends:
    return _kill_in_save(run, attempts, 1, r"^torch\.save .*/rng_state_1")


def kill_rank_before_the_record_of_a_save(run: FaultRun, attempts: int) -> Ends:
    return _kill_in_save(run, attempts, 0, r"^open .*/\.shardmake\.json")


def kill_rank_after_a_save(run: FaultRun, attempts: int) -> Ends:
    return _kill_in_save(run, attempts, 0, r"^os\.rmdir /\.saving$", is_committed=True)


def a_change(line: str, *, damages: bool) -> Callable[[Callable[[Path], None]], Fault]:
    """Turn a change of the newest checkpoint by somebody into a fault, with the driver's ``line`` about it.

    A damaged one is set aside and the older one is resumed, by the driver or, if the checkpoint is too large for it, by
    the job, which keeps its nodes.
    """

    def decorate(change: Callable[[Path], None]) -> Fault:
        def fault(run: FaultRun, attempts: int) -> Ends:
            """Change it while the training is stopped, so that it stays the newest."""
            run.wait_for_checkpoint(attempts)
            run.cluster.wait_until(lambda: len(list(store.committed(run.checkpoints))) > 1, "two", timeout=600)
            beat = run.wait_for_steps(1, attempts)
            known = len(run.history())
            run.send("STOP", beat.pid, beat.host)
            run.cluster.run(["sleep", "1"])  # the other rank finishes its part of a save
            committed = list(store.committed(run.checkpoints))
            (newest, path), (before, _) = committed[:2]
            change(path)
            run.send("KILL", beat.pid, beat.host)
            run.wait_for_ends(known + 1, "the attempt")
            run.wait_for_steps(1, attempts + 1)
            in_job = damages and run.reads_in_job
            found = "checkpoint-{} is damaged and was set aside.* The job starts its ranks again" if in_job else line
            run.expect(found.format(newest.step))
            attempt = run.attempts()[-1].read()
            step = before.step if damages else newest.step
            assert attempt.again == in_job and Path(attempt.resume_from or "").name == f"checkpoint-{step}"
            return [KILLED | {"hang"}]  # on a busy machine it was stopped for too long

        fault.__name__ = change.__name__
        return fault

    return decorate


@a_change("Skipped checkpoint-{}: .*its checksum differs", damages=True)
def flip_a_shard(newest: Path) -> None:
    flip_a_bit(a_shard(newest))


@a_change("Skipped checkpoint-{}: ", damages=True)
def cut_a_shard(newest: Path) -> None:
    shard = a_shard(newest)
    shard.write_bytes(shard.read_bytes()[: CHANCE.randrange(shard.stat().st_size)])


@a_change("Skipped checkpoint-{}: .*is damaged or cannot be read", damages=True)
def flip_the_record(newest: Path) -> None:
    flip_a_bit(newest / RECORD_NAME)


@a_change("resuming from checkpoint-{}", damages=False)
def swap_a_shard_for_a_link(newest: Path) -> None:
    """To somebody's file with the same content, which is read and must stay when retention removes the checkpoint."""
    shard = a_shard(newest)
    shard.rename(private := newest.parents[2] / "private")
    shard.symlink_to(private)


@a_change("checkpoint-1000 has other settings than this run and is not used", damages=False)
def put_a_foreign_checkpoint_beside(newest: Path) -> None:
    foreign = newest.with_name("checkpoint-1000")
    shutil.copytree(newest, foreign)
    record = unsealed(json.loads((foreign / RECORD_NAME).read_text()))
    (foreign / RECORD_NAME).write_text(json.dumps(sealed(record | {"step": 1000, "settings_digest": "another run"})))


def a_shard(checkpoint: Path) -> Path:
    record = read_record(checkpoint)
    assert record
    return checkpoint / CHANCE.choice([name for name in record.files if name.endswith(SHARDS)])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[CHANCE.randrange(len(content))] ^= 1 << CHANCE.randrange(8)
    file.write_bytes(content)

"""Trainings on the three-node Slurm that something is done to; each must end as the one that was left in peace."""

import random
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmake.train import ledger
from tests.cluster.harness import STATE, Cluster
from tests.cluster.lab import ClusterCheckout, FaultLab

pytestmark = [pytest.mark.cluster, pytest.mark.training, pytest.mark.timeout(1800)]
CHANCE = random.Random(7)
Weights = dict[str, Any]


@pytest.fixture(scope="module")
def lab(cluster: Cluster, inputs: Path) -> Iterator[FaultLab]:
    """A checkout on the folder that all nodes share; tokenized data are shared by all trainings."""
    cluster.reset()
    lab = make_lab(cluster, inputs)
    yield lab
    lab.repair()


def make_lab(cluster: Cluster, inputs: Path) -> FaultLab:
    checkout = ClusterCheckout.create(cluster.shared / "faults", inputs)
    assert isinstance(checkout, ClusterCheckout)
    checkout.cluster = cluster
    return FaultLab(checkout)


@pytest.fixture(scope="module")
def in_peace(lab: FaultLab) -> Callable[..., tuple[dict[int, float], Weights]]:
    """Losses and final weights of an undisturbed training, by strategy and length of the sequences."""
    known: dict[tuple[str, int], tuple[dict[int, float], Weights]] = {}

    def train(strategy: str, sequence_length: int = 64) -> tuple[dict[int, float], Weights]:
        lab.configure(strategy, sequence_length=sequence_length)
        if (strategy, sequence_length) not in known:
            lab.forget()
            lab.start()
            assert lab.wait() == 0, lab.log()
            known[strategy, sequence_length] = lab.result(), lab.weights()
        lab.forget()
        return known[strategy, sequence_length]

    return train


def assert_as_in_peace(lab: FaultLab, calm: tuple[dict[int, float], Weights], tolerance: float = 1e-6) -> None:
    losses, weights = calm
    assert lab.result() == pytest.approx(losses, abs=tolerance)
    found = lab.weights()
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(found[name], tensor, atol=tolerance), name


# ---- faults: each is done to a training under way, and names the ends it may lead to, attempt by attempt -------------


Ends = list[set[str]]


def kill_rank(lab: FaultLab, attempts: int) -> Ends:
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    lab.send("KILL", beat.pid, beat.host)
    return [{"a process was killed", "communication failure"}]


def kill_worker(lab: FaultLab, attempts: int) -> Ends:
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    lab.send("KILL", lab.parent(beat, 2), beat.host)
    return [{"a process was killed", "communication failure", "lost without a trace"}]


def stop_rank(lab: FaultLab, attempts: int) -> Ends:
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    lab.send("STOP", beat.pid, beat.host)
    return [{"hang"}]


def rank_sleeps(lab: FaultLab, attempts: int) -> Ends:
    lab.wait_for_steps(2, attempts)
    lab.order("sleep")
    return [{"hang"}]


def kill_node(lab: FaultLab, attempts: int) -> Ends:
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    lab.cluster.kill_node(beat.host)
    lab.cluster.declare_down(beat.host)
    return [{"node failure"}]


def cut_link(lab: FaultLab, attempts: int) -> Ends:
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    lab.cluster.cut(beat.host)
    return [{"node failure", "hang", "communication failure"}]


def signals_before_the_limit(lab: FaultLab, attempts: int) -> Ends:
    """USR2 as Slurm sends it, twice, and on one node SIGTERM as well, a moment later."""
    beat = lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    (job,) = [job.id for job in lab.checkout.training_jobs() if job.state == "RUNNING"]
    worker = lab.parent(beat, 2)
    for _ in range(2):
        lab.cluster.run(["scancel", "--signal=USR2", job])
    lab.cluster.run(["sh", "-c", f"sleep 0.3; kill -TERM {worker} || true"], node=beat.host)
    return [{"time limit"}]


def end_of_time(lab: FaultLab, attempts: int) -> Ends:
    """The limit itself, moved to now."""
    lab.wait_for_steps(CHANCE.randint(2, 15), attempts)
    (job,) = [job.id for job in lab.checkout.training_jobs() if job.state == "RUNNING"]
    lab.cluster.run(["scontrol", "update", f"jobid={job}", "endtime=now"])
    return [{"time limit"}]


def preempt(lab: FaultLab, attempts: int) -> Ends:
    lab.wait_for_steps(2, attempts)
    out = lab.checkout.root / "urgent.out"
    urgent = lab.cluster.run(
        f"sbatch --parsable --partition=urgent --nodes=3 --exclusive --output={out} --wrap 'sleep 600'"
    ).stdout.strip()
    lab.cluster.wait_job(urgent, "RUNNING", timeout=90)
    lab.cluster.run(["scancel", urgent])
    return [{"preempted"}]


def restart_controller(lab: FaultLab, attempts: int) -> Ends:
    lab.wait_for_steps(2, attempts)
    lab.cluster.stop_controller()
    lab.wait_for_steps(15, attempts)
    lab.cluster.run(["slurmctld"])
    return []


def kill_waiting_driver(lab: FaultLab, attempts: int) -> Ends:
    lab.wait_for_steps(2, attempts)
    kill_driver(lab)
    lab.start()
    lab.cluster.wait_until(lambda: "Adopting job" in lab.log(), "adoption")
    return []


def kill_driver(lab: FaultLab) -> None:
    assert lab.driver
    lab.driver.kill()
    lab.driver.wait()


def unfit_node(lab: FaultLab, attempts: int) -> Ends:
    """A node whose scratch folder has no room any more; the next attempt finds that out and goes elsewhere."""
    lab.wait_for_steps(2, attempts)
    node = lab.beat(0)
    assert node
    lab.cluster.run(["mount", "-o", "remount,size=64m", "/tmp"], node=node.host)
    return [*kill_rank(lab, attempts), {"preflight failure"}]


Fault = Callable[[FaultLab, int], Ends]
SURVIVED: list[Fault] = [
    kill_rank, kill_worker, stop_rank, rank_sleeps, kill_node, cut_link, signals_before_the_limit, end_of_time, preempt,
    restart_controller, kill_waiting_driver, unfit_node,
]  # fmt: skip
STRATEGIES = ("zero2", "zero3", "fsdp")


def survive(
    lab: FaultLab, faults: list[Fault], calm: tuple[dict[int, float], Weights], spare: Collection[str] = ()
) -> None:
    """One training, one fault after the other, no person needed; ends in ``spare`` may come in between."""
    expected: Ends = []
    lab.start()
    for fault in faults:
        expected += fault(lab, len(expected) + 1)
        lab.wait_for_ends(len(expected), fault.__name__)
    assert lab.wait() == 0, lab.log()
    ends = [end for end in lab.ends() if end not in spare]
    assert len(ends) == len(expected) + 1 and ends[-1] == "finished", lab.log()
    assert all(seen in allowed for seen, allowed in zip(ends, expected, strict=False)), lab.log()
    assert_as_in_peace(lab, calm)


def job_ids(lab: FaultLab) -> set[str]:
    """The run's jobs; Slurm forgets old ones meanwhile."""
    return {job.id for job in lab.checkout.training_jobs()}


def come_back(lab: FaultLab, attempts: int) -> Ends:
    """The node that was killed is repaired."""
    for node in ("c1", "c2", "c3"):
        if lab.cluster.node_states()[node].startswith("down"):
            lab.cluster.start_node(node)
    return []


@pytest.mark.faults
def test_a_killed_driver_a_killed_rank_an_unfit_node_and_a_hang(lab: FaultLab, in_peace: Any) -> None:
    """One training through all of them."""
    lab.repair()
    calm = in_peace("zero3")
    before = job_ids(lab)
    lab.order("die-before-record")
    lab.start()
    lab.wait()
    assert len(job_ids(lab) - before) == 1
    survive(lab, [unfit_node, stop_rank], calm)
    assert "which an earlier driver submitted" in lab.log()
    killed, unfit, hung, finished = lab.story()
    assert (unfit["host"], unfit["excluded"]) == ("c1", "c1") and "scratch" in unfit["sentence"]
    assert "rank 1 on c3 does not answer (its process is stopped)" in hung["sentence"]
    assert killed["attempt"] == 1 and finished["attempt"] == 4


@pytest.mark.faults
def test_signals_a_dead_controller_and_a_dead_node_that_comes_back(lab: FaultLab, in_peace: Any) -> None:
    """A node that comes back sometimes takes the step that was just started with it."""
    lab.repair()
    calm = in_peace("zero3")
    survive(
        lab, [signals_before_the_limit, restart_controller, kill_node, come_back], calm, spare={"lost without a trace"}
    )
    told, *_, finished = lab.story()
    assert told["checkpoint_step"] > 0, "saved when it was told to"
    assert finished["end"] == "finished"


@pytest.mark.faults
@pytest.mark.parametrize("fault", SURVIVED, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_fault_is_survived(lab: FaultLab, in_peace: Any, strategy: str, fault: Fault) -> None:
    lab.repair()
    survive(lab, [fault], in_peace(strategy))


@pytest.mark.faults
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_node_dies_while_checkpoints_are_saved_asynchronously(lab: FaultLab, in_peace: Any, strategy: str) -> None:
    """What only its scratch held is gone; training goes on from what had reached the shared folder."""
    lab.repair()
    calm = in_peace(strategy)
    lab.configure(strategy, sequence_length=64, checkpoints={"every_steps": lab.every, "asynchronous": True})
    survive(lab, [kill_node], calm)
    records = [record for record, _ in ledger.sealed(lab.checkout.run / "train/checkpoints")]
    assert any(record.blocked_seconds is not None for record in records), "the last save alone waits"


# ---- what stops the driver, with the one error that matters; the same command goes on -------------------------------


def cancel(lab: FaultLab) -> str:
    lab.wait_for_steps(2)
    (job,) = [job.id for job in lab.checkout.training_jobs() if job.state == "RUNNING"]
    lab.cluster.run(["scancel", job])
    return "cancelled by a person"


def raise_in_rank(lab: FaultLab) -> str:
    lab.wait_for_steps(2)
    lab.order("raise")
    return "error in the training"


def touch_stop_file(lab: FaultLab) -> str:
    lab.wait_for_steps(2)
    (lab.checkout.run / "train/STOP").touch()
    return "stop requested"


@pytest.mark.faults
@pytest.mark.parametrize("stop", [cancel, raise_in_rank, touch_stop_file])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_must_stop_stops_and_goes_on_when_told(
    lab: FaultLab, in_peace: Any, strategy: str, stop: Callable[[FaultLab], str]
) -> None:
    lab.repair()
    calm = in_peace(strategy)
    before = job_ids(lab)
    lab.start()
    end = stop(lab)
    assert lab.wait() == 2, lab.log()
    assert lab.ends() == [end]
    assert len(job_ids(lab) - before) == 1, "nothing was submitted again"
    assert (stop is raise_in_rank) == ("the test ordered this error" in lab.log())
    lab.start()
    assert lab.wait() == 0
    assert lab.ends() == [end, "finished"]
    assert_as_in_peace(lab, calm)


@pytest.mark.faults
@pytest.mark.parametrize("moment", ["die-before-submit", "die-before-record"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_driver_killed_at_its_submission(lab: FaultLab, in_peace: Any, strategy: str, moment: str) -> None:
    lab.repair()
    calm = in_peace(strategy)
    before = job_ids(lab)
    lab.order(moment)
    lab.start()
    assert lab.wait() == -9
    lab.start()
    assert lab.wait() == 0, lab.log()
    assert len(job_ids(lab) - before) == 1, "one submission in all"
    assert lab.ends() == ["finished"]
    assert_as_in_peace(lab, calm)


@pytest.mark.faults
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_out_of_memory_goes_down_two_rungs(lab: FaultLab, in_peace: Any, strategy: str) -> None:
    """To a smaller micro batch, then to recomputation, which is a rung only where sequences are long enough."""
    lab.repair()
    calm = in_peace(strategy, sequence_length=128)
    lab.configure(strategy, sequence_length=128, micro_batch_size="auto")
    lab.order("out-of-memory")
    lab.start()
    lab.wait_for_ends(1, "the first attempt")
    lab.order("out-of-memory")
    assert lab.wait() == 0, lab.log()
    assert lab.ends() == ["GPU out of memory", "GPU out of memory", "finished"]
    assert_as_in_peace(lab, calm, tolerance=1e-3)


@pytest.mark.faults
def test_slurmdbd_down(inputs: Path) -> None:
    """The job is submitted, watched and seen to its end without accounting's answers."""
    with Cluster(STATE.with_name(f"{STATE.name}-second"), accounting=True) as cluster:
        lab = make_lab(cluster, inputs)
        lab.configure("zero2")
        lab.start()
        beat = lab.wait_for_steps(2)
        cluster.run(["kill", (cluster.state / "slurmdbd.pid").read_text().strip()])
        lab.send("KILL", beat.pid, beat.host)
        assert lab.wait() == 0, lab.log()
        assert lab.ends()[-1] == "finished" and len(lab.ends()) == 2
        assert max(lab.result()) == lab.steps

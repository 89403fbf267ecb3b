"""Snakemake and the drivers in a driver job on the three-node Slurm: it continues itself, and may die at any time."""

import json
import shutil
import time
from typing import Any

import pytest
import yaml

from shardmake.launch.slurm_states import JobState, parse_state
from shardmake.run.driver_job import DriverDir
from tests.cluster.baseline import assert_equal, caused
from tests.cluster.fault_run import ClusterCheckout, FaultRun, weights_of
from tools.fault_matrix import EXACT

pytestmark = [pytest.mark.cluster, pytest.mark.training, pytest.mark.timeout(3600)]
STEPS = 40
LONG = 150


class DriverJobs:
    def __init__(self, checkout: ClusterCheckout) -> None:
        self.checkout = checkout
        self.cluster = checkout.cluster
        self.run = FaultRun(checkout)

    def submit(self, *targets: str) -> str:
        """Run `shardmake submit` on the login node, and return the id of the driver job."""
        output = self.checkout.on_login_node("shardmake", "submit", *targets, env=self.run.environment)
        return output.partition("Submitted driver job ")[2].split()[0]

    @property
    def folder(self) -> DriverDir:
        """Return the folder of the last workflow that was submitted."""
        return DriverDir(max((self.checkout.root / "runs/.driver").glob("[0-9]*")))

    def state(self) -> dict[str, Any]:
        return json.loads(self.folder.state.read_text())

    def log(self) -> str:
        return self.folder.log.read_text() if self.folder.log.exists() else ""

    def wait_for_steps(self, steps: int) -> None:
        self.cluster.wait_until(lambda: len(self.checkout.metrics()) >= steps, f"steps; {self.log()}", timeout=400)

    def wait_for_log(self, words: str, times: int = 1) -> None:
        """Wait until the output has ``words`` so many times."""
        self.cluster.wait_until(lambda: self.log().count(words) >= times, f"{words!r} in {self.log()}", timeout=400)

    def wait_for_end(self, end: str, timeout: float = 600) -> None:
        """Wait until no driver job is queued or running, and compare the recorded end."""
        self.cluster.wait_until(lambda: not self.active(), f"the end of the driver jobs; {self.log()}", timeout=timeout)
        assert self.state()["end"] == end, self.log()

    def active(self) -> list[str]:
        jobs = [job for job in self.cluster.jobs() if job.name.startswith("driver-") and "_" not in job.name]
        return [job.id for job in jobs if parse_state(job.state)[0] is not JobState.ENDED]


def configure(checkout: ClusterCheckout, steps: int, nodes: int = 2, **slurm: object) -> None:
    """Configure the run on a site that forbids long processes on the login node."""
    settings = {"max_steps": steps, "nodes": nodes, "checkpoints": {"every_steps": 10}}
    checkout.configure_cluster(slurm={"driver": "job", **slurm}, **settings)


@pytest.fixture
def driver(checkout: ClusterCheckout) -> DriverJobs:
    configure(checkout, STEPS)
    return DriverJobs(checkout)


def assert_trained_once(driver: DriverJobs, steps: int) -> None:
    """Check that one job trained to the last step, and logged no step twice."""
    assert [job.state for job in driver.checkout.training_jobs()] == ["COMPLETED"], driver.log()
    logged = [line["step"] for line in driver.checkout.metrics() if "loss" in line]
    assert logged == sorted(set(logged)) and logged[-1] == steps


def test_a_driver_job_continues_in_the_next_one_and_trains_once(driver: DriverJobs) -> None:
    of_others = {job.id for job in driver.cluster.jobs()}
    refused = driver.checkout.on_login_node("snakemake", "--profile", "slurm", check=False)
    assert "Run `shardmake submit` with the same arguments" in refused
    assert {job.id for job in driver.cluster.jobs()} <= of_others

    first = driver.submit("train")
    driver.wait_for_steps(3)
    (printed,) = json.loads(driver.checkout.on_login_node("shardmake", "status", "--json"))
    assert printed["driver_job"] == {
        "job": first, "state": "running", "nodes": "c1", "log": "runs/.driver/001/driver.log",
    }  # fmt: skip
    driver.cluster.run(["scancel", "--signal=USR1", "--batch", first])  # as Slurm does before the limit
    driver.wait_for_end("done")
    print(driver.log())
    assert driver.state()["jobs"][0] == first and len(driver.state()["jobs"]) == 2
    assert "Adopting job" in driver.log() and "Error in rule" not in driver.log()
    assert_trained_once(driver, STEPS)


@pytest.mark.faults
def test_slurm_itself_asks_for_the_next_job_in_which_a_stopped_training_stays_stopped(driver: DriverJobs) -> None:
    """The limit is two minutes, of which the job uses a half to three quarters; the other run has every stage."""
    configure(driver.checkout, 120, nodes=1, driver_time_limit="00:02:00")
    config = yaml.safe_load((driver.checkout.root / "config/config.yaml").read_text())
    driver.checkout.write_config(config | {"runs": config["runs"] | {"other": config["runs"]["demo"]}})
    driver.submit()
    driver.wait_for_steps(3)
    driver.checkout.on_login_node("shardmake", "stop", "demo")
    driver.wait_for_end("failed", timeout=900)
    print(driver.log())
    assert len(driver.state()["jobs"]) >= 2 and "The time limit is near" in driver.log()
    states = [job.state for job in driver.cluster.jobs() if job.id in driver.state()["jobs"]]
    assert {*states[:-1]} == {"COMPLETED"} and states[-1] == "FAILED", "no job ran into its limit"
    assert "demo stays stopped." in driver.log()
    assert len(driver.checkout.training_jobs()) == 1, "it was not started again"
    other = driver.checkout.root / "runs/other"
    assert (other / "report.html").exists() and (other / "push/receipt.json").exists()


def kill_in_a_stage(driver: DriverJobs) -> None:
    """SIGKILL, as from the kernel, while the job of data is queued: nothing is recorded, and no second writer starts.

    It waits for the cores of the only node of its partition, one of which the driver job has.
    """
    driver.cluster.run(["scontrol", "update", "partitionname=cpu", "nodes=c1"])
    try:
        first = driver.submit("train")
        driver.wait_for_log("has been submitted with SLURM jobid")
        driver.cluster.run(["scancel", "--signal=KILL", "--batch", first])
        driver.cluster.wait_until(lambda: not driver.active(), "the end of the driver job")
        assert driver.state()["snakemake_started"]
        assert "was killed or cancelled" in driver.checkout.on_login_node("shardmake", "status")
        driver.submit("train")
    finally:
        driver.cluster.run(["scontrol", "update", "partitionname=cpu", "nodes=c[1-3]"])


def cancel(driver: DriverJobs) -> None:
    (first,) = driver.state()["jobs"]
    again = driver.checkout.on_login_node("shardmake", "submit", "train", check=False)
    assert f"Driver job {first} of root (running) works on demo already." in again
    status = driver.checkout.on_login_node("shardmake", "status", "demo")
    assert f"Driver of demo: job {first} is running on c1. Output: runs/.driver/002/driver.log" in status
    assert "Adopting" not in driver.checkout.on_login_node("shardmake", "logs", "demo", "--driver")
    cancelled = driver.checkout.on_login_node("shardmake", "cancel", "demo", "--driver")
    assert f"Cancelled driver job {first} of demo. Trainings keep running." in cancelled
    driver.wait_for_end("cancelled")
    assert "was cancelled; trainings keep running" in driver.checkout.on_login_node("shardmake", "status", "demo")
    driver.submit("train")


def requeue(driver: DriverJobs) -> None:
    driver.cluster.run(["scontrol", "requeue", driver.state()["jobs"][-1]])


def preempt_and_requeue(driver: DriverJobs) -> None:
    """After the grace time, Slurm queues the job again."""
    node = driver.cluster.job(driver.state()["jobs"][-1]).nodes
    options = f"--parsable --partition=urgent --nodelist={node} --exclusive --output={driver.checkout.root}/urgent"
    urgent = driver.cluster.run(f"sbatch {options} --wrap 'sleep 5'").stdout.strip()
    driver.cluster.wait_job(urgent, "COMPLETED", timeout=120)


def preempt_and_cancel(driver: DriverJobs) -> None:
    """After the grace time, Slurm cancels the job, which has submitted itself."""
    driver.cluster.run(["scontrol", "update", "partitionname=cpu", "preemptmode=CANCEL"])
    try:
        preempt_and_requeue(driver)
    finally:
        driver.cluster.run(["scontrol", "update", "partitionname=cpu", "preemptmode=REQUEUE"])


def kill_the_node(driver: DriverJobs) -> None:
    node = driver.cluster.job(driver.state()["jobs"][-1]).nodes
    driver.cluster.kill_node(node)
    driver.cluster.declare_down(node)


@pytest.mark.faults
def test_a_training_continues_through_every_end_of_its_driver_job(driver: DriverJobs) -> None:
    """The same job trains throughout."""
    configure(driver.checkout, LONG, nodes=1)
    driver.run.slow(5, rank=0)  # it still runs when Slurm has started the driver job for the last time
    started = time.monotonic()
    kill_in_a_stage(driver)
    caused["driver job: kill in a stage"] = time.monotonic() - started
    driver.wait_for_steps(1)
    for fault in (cancel, requeue, preempt_and_requeue, preempt_and_cancel, kill_the_node):
        started, known = time.monotonic(), 0 if fault is cancel else driver.log().count("Adopting job")
        fault(driver)
        driver.wait_for_log("Adopting job", known + 1)
        caused[f"driver job: {fault.__name__}"] = time.monotonic() - started
    driver.run.slow(0, rank=0)
    driver.wait_for_end("done")
    print(driver.log())
    assert len(driver.state()["jobs"]) == 2, "Slurm restarted the others"
    assert_trained_once(driver, LONG)
    found = driver.checkout.losses(), weights_of(driver.checkout)
    shutil.rmtree(driver.checkout.run / "train")
    driver.submit("train")
    driver.wait_for_end("done")
    assert_equal(found, (driver.checkout.losses(), weights_of(driver.checkout)), EXACT)

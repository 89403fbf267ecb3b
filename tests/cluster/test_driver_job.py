"""Snakemake and the drivers in a driver job on the three-node Slurm: it continues itself, and may die at any time."""

import json
import shutil
from typing import Any

import pytest
import yaml

from shardmake.launch.slurm_states import JobState, parse_state
from shardmake.run.driver_job import DriverDir
from tests.cluster.fault_run import ClusterCheckout

pytestmark = [pytest.mark.cluster, pytest.mark.training, pytest.mark.timeout(1800)]
STEPS = 40
LONG = 150
"""Steps of a training that still runs when Slurm has started the driver job again, for which a node is left.

Every third step is logged, so the last one is.
"""


class DriverJobs:
    """The driver jobs of a checkout."""

    def __init__(self, checkout: ClusterCheckout) -> None:
        self.checkout = checkout
        self.cluster = checkout.cluster

    def submit(self, *targets: str) -> str:
        """Run `shardmake submit` on the login node, and return the id of the driver job."""
        output = self.checkout.on_login_node("shardmake", "submit", *targets)
        return output.partition("Submitted driver job ")[2].split()[0]

    @property
    def folder(self) -> DriverDir:
        """Return the folder of the last workflow that was submitted."""
        return DriverDir(max((self.checkout.root / "runs/.driver").glob("[0-9]*")))

    def state(self) -> dict[str, Any]:
        """Return the recorded state."""
        return json.loads(self.folder.state.read_text())

    def log(self) -> str:
        """Return the output of all driver jobs of the workflow."""
        return self.folder.log.read_text() if self.folder.log.exists() else ""

    def wait_for_steps(self, steps: int) -> None:
        """Wait until the training has done ``steps``."""
        self.cluster.wait_until(
            lambda: len(self.checkout.metrics()) >= steps, f"{steps} steps; {self.log()}", timeout=400
        )

    def wait_for_log(self, words: str, times: int = 1) -> None:
        """Wait until the output has ``words`` so many times."""
        self.cluster.wait_until(lambda: self.log().count(words) >= times, f"{words!r} in {self.log()}", timeout=200)

    def wait_for_end(self, end: str, timeout: float = 600) -> None:
        """Wait until no driver job is queued or running, and compare the recorded end."""
        self.cluster.wait_until(lambda: not self.active(), f"the end of the driver jobs; {self.log()}", timeout=timeout)
        assert self.state()["end"] == end, self.log()

    def active(self) -> list[str]:
        """Return the ids of the driver jobs in the queue."""
        jobs = [job for job in self.cluster.jobs() if job.name.startswith("driver-") and "_" not in job.name]
        return [job.id for job in jobs if parse_state(job.state)[0] is not JobState.ENDED]


def configure(checkout: ClusterCheckout, steps: int, nodes: int = 2, **slurm: object) -> None:
    """Configure the run on a site that forbids long processes on the login node."""
    settings = {"max_steps": steps, "nodes": nodes, "checkpoints": {"every_steps": 10}}
    checkout.configure_cluster(slurm={"driver": "job", **slurm}, **settings)


@pytest.fixture
def driver(checkout: ClusterCheckout) -> DriverJobs:
    """Driver jobs of a checkout."""
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
        "job": first,
        "state": "running",
        "nodes": "c1",
        "log": "runs/.driver/001/driver.log",
    }
    driver.cluster.run(["scancel", "--signal=USR1", "--batch", first])  # as Slurm does before the limit
    driver.wait_for_end("done")
    print(driver.log())
    assert driver.state()["jobs"][0] == first and len(driver.state()["jobs"]) == 2
    assert "Adopting job" in driver.log() and "Error in rule" not in driver.log()
    assert_trained_once(driver, STEPS)


@pytest.mark.faults
def test_slurm_itself_asks_for_the_next_job_and_every_stage_runs(driver: DriverJobs) -> None:
    """The limit is two minutes, of which the job uses a half to three quarters."""
    configure(driver.checkout, 120, driver_time_limit="00:02:00")
    driver.submit()
    driver.wait_for_end("done", timeout=900)
    print(driver.log())
    assert len(driver.state()["jobs"]) >= 2 and "The time limit is near" in driver.log()
    states = [job.state for job in driver.cluster.jobs() if job.id in driver.state()["jobs"]]
    assert set(states) == {"COMPLETED"}, "no job ran into its limit"
    assert_trained_once(driver, 120)
    assert (driver.checkout.run / "report.html").exists() and driver.checkout.read("push/receipt.json")


@pytest.mark.faults
def test_a_cancelled_driver_job_is_submitted_again_and_the_result_is_equal(driver: DriverJobs) -> None:
    configure(driver.checkout, 120)
    first = driver.submit("train")
    driver.wait_for_steps(3)
    again = driver.checkout.on_login_node("shardmake", "submit", "train", check=False)
    assert f"Driver job {first} of root (running) works on demo already." in again
    status = driver.checkout.on_login_node("shardmake", "status", "demo")
    assert f"Driver of demo: job {first} is running on c1. Output: runs/.driver/001/driver.log" in status
    assert "Adopting" not in driver.checkout.on_login_node("shardmake", "logs", "demo", "--driver")
    cancelled = driver.checkout.on_login_node("shardmake", "cancel", "demo", "--driver")
    assert f"Cancelled driver job {first} of demo. Trainings keep running." in cancelled
    driver.wait_for_end("cancelled")
    assert [job.state for job in driver.checkout.training_jobs()] == ["RUNNING"]
    assert "was cancelled; trainings keep running" in driver.checkout.on_login_node("shardmake", "status", "demo")
    driver.submit("train")
    driver.wait_for_end("done")
    assert "Adopting job" in driver.log()
    assert_trained_once(driver, 120)
    losses = driver.checkout.losses()
    shutil.rmtree(driver.checkout.run / "train")
    driver.submit("train")
    driver.wait_for_end("done")
    assert driver.checkout.losses() == losses, "an undisturbed training has the same losses"


@pytest.mark.faults
def test_the_node_of_the_driver_job_fails_in_mid_training(driver: DriverJobs) -> None:
    configure(driver.checkout, LONG, nodes=1)
    first = driver.submit("train")
    driver.wait_for_steps(3)
    assert driver.cluster.job(first).nodes == "c1"
    driver.cluster.kill_node("c1")
    driver.cluster.declare_down("c1")
    driver.wait_for_log("Driver job", 2)
    driver.wait_for_end("done")
    print(driver.log())
    assert driver.state()["jobs"] == [first] and driver.cluster.job(first).state == "COMPLETED", "Slurm restarted it"
    assert "Adopting job" in driver.log()
    assert_trained_once(driver, LONG)


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["REQUEUE", "CANCEL"])
def test_a_preempted_driver_job_continues(driver: DriverJobs, mode: str) -> None:
    """After the grace time, Slurm queues the job again, or cancels it and the job submits itself."""
    configure(driver.checkout, LONG, nodes=1)
    driver.cluster.run(["scontrol", "update", "partitionname=cpu", f"preemptmode={mode}"])
    try:
        first = driver.submit("train")
        driver.wait_for_steps(3)
        options = f"--parsable --partition=urgent --nodelist=c1 --exclusive --output={driver.checkout.root}/urgent"
        urgent = driver.cluster.run(f"sbatch {options} --wrap 'sleep 5'").stdout.strip()
        driver.cluster.wait_job(urgent, "COMPLETED", timeout=120)
        driver.wait_for_end("done")
    finally:
        driver.cluster.run(["scontrol", "update", "partitionname=cpu", "preemptmode=REQUEUE"])
    print(driver.log())
    jobs = driver.state()["jobs"]
    assert jobs[0] == first and len(jobs) == (1 if mode == "REQUEUE" else 2)
    assert "Adopting job" in driver.log()
    assert_trained_once(driver, LONG)


@pytest.mark.faults
def test_a_driver_job_that_an_administrator_queues_again(driver: DriverJobs) -> None:
    configure(driver.checkout, LONG, nodes=1)
    first = driver.submit("train")
    driver.wait_for_steps(3)
    driver.cluster.run(["scontrol", "requeue", first])
    driver.wait_for_log(", number 1.", 2)
    driver.wait_for_end("done")
    print(driver.log())
    assert driver.state()["jobs"] == [first] and "Adopting job" in driver.log()
    assert_trained_once(driver, LONG)


@pytest.mark.faults
def test_a_driver_job_killed_during_a_stage_leaves_no_second_writer(driver: DriverJobs) -> None:
    """SIGKILL, as from the kernel, while the job of data is queued: nothing is recorded.

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
        output = driver.checkout.on_login_node("shardmake", "submit", "train")
    finally:
        driver.cluster.run(["scontrol", "update", "partitionname=cpu", "nodes=c[1-3]"])
    driver.wait_for_end("done")
    print(output, driver.log())
    assert_trained_once(driver, STEPS)


@pytest.mark.faults
def test_a_stopped_training_stays_stopped_in_the_next_driver_job(driver: DriverJobs) -> None:
    """The other run keeps the workflow alive, and the driver job continues in another one."""
    config = yaml.safe_load((driver.checkout.root / "config/config.yaml").read_text())
    config["runs"] = {
        "demo": config["runs"]["demo"] | {"nodes": 1},
        "other": config["runs"]["demo"] | {"nodes": 1, "max_steps": 120},
    }
    driver.checkout.write_config(config)
    first = driver.submit("train")
    driver.wait_for_steps(3)
    driver.checkout.on_login_node("shardmake", "stop", "demo")
    driver.cluster.wait_until(lambda: driver.folder.ended_run("demo").exists(), "the stop")
    driver.cluster.run(["scancel", "--signal=USR1", "--batch", first])
    driver.wait_for_log("demo stays stopped.")
    driver.wait_for_end("failed")
    print(driver.log())
    assert len(driver.state()["jobs"]) == 2
    assert len(driver.checkout.training_jobs()) == 1, "it was not started again"
    assert (driver.checkout.root / "runs/other/train/receipt.json").exists()

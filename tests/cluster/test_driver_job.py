"""Snakemake and the drivers in a driver job on the three-node Slurm: it continues itself, and may die at any time."""

import json
from typing import Any

import pytest

from shardmake.run.driver_job import DriverDir
from tests.cluster.fault_run import ClusterCheckout

pytestmark = [pytest.mark.cluster, pytest.mark.training]
STEPS = 60


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
            lambda: len(self.checkout.metrics()) >= steps, f"{steps} steps; {self.log()}", timeout=200
        )

    def wait_for_end(self, end: str, timeout: float = 200) -> None:
        """Wait until no driver job is queued or running, and compare the recorded end."""
        self.cluster.wait_until(lambda: not self.active(), f"the end of the driver jobs; {self.log()}", timeout=timeout)
        assert self.state()["end"] == end, self.log()

    def active(self) -> list[str]:
        """Return the ids of the driver jobs in the queue."""
        jobs = self.cluster.jobs()
        return [job.id for job in jobs if job.name.startswith("driver-") and job.state in ("PENDING", "RUNNING")]


@pytest.fixture
def driver(checkout: ClusterCheckout) -> DriverJobs:
    """Driver jobs of a checkout whose site forbids long processes on the login node."""
    checkout.configure_cluster(slurm={"driver": "job"}, max_steps=STEPS, checkpoints={"every_steps": 10})
    return DriverJobs(checkout)


def test_a_driver_job_continues_in_the_next_one_and_trains_once(driver: DriverJobs) -> None:
    refused = driver.checkout.on_login_node("snakemake", "--profile", "slurm", check=False)
    assert "Run `shardmake submit` with the same arguments" in refused
    assert not driver.cluster.jobs()

    first = driver.submit("train")
    driver.wait_for_steps(3)
    driver.cluster.run(["scancel", "--signal=USR1", "--batch", first])  # as Slurm does before the limit
    driver.wait_for_end("done")
    print(driver.log())
    assert driver.state()["jobs"][0] == first and len(driver.state()["jobs"]) == 2
    assert "Adopting job" in driver.log()
    assert [job.state for job in driver.checkout.training_jobs()] == ["COMPLETED"]
    assert sorted(driver.checkout.losses()) == list(range(1, STEPS + 1))

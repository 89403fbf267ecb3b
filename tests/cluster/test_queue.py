"""Drivers share the queries of the real squeue."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardmake.launch.watcher import FRESH_SECONDS
from tests.cluster.baseline import assert_equals_the_next_training
from tests.cluster.fault_run import ClusterCheckout
from tests.cluster.harness import Cluster

pytestmark = pytest.mark.cluster
DRIVERS, SECONDS = 8, 5
REPOSITORY = Path(__file__).resolve().parents[2]

WATCH = """
import sys, time
from pathlib import Path
from shardmake.config.models import Cluster
from shardmake.launch.slurm_jobs import SlurmJobs
jobs = SlurmJobs(Path("run"), Cluster(executor="slurm", processes_per_node=1, cpus_per_node=1, memory_gib_per_node=1.0))
end, seen = time.monotonic() + float(sys.argv[1]), set()
while time.monotonic() < end:
    seen.add(jobs._query(sys.argv[2]).name)
    time.sleep(0.2)
print(*seen)
"""


SUBMIT = """
import sys
from pathlib import Path
from shardmake.core.errors import TooFewNodesError
from shardmake.launch.slurm_jobs import SlurmJobs
from shardmake.run.attempt import AttemptDir
from shardmake.run.plan import Resources
from tests.unit.plans import make_cluster, make_plan
root = Path(sys.argv[1])
slurm = {"partition": "gpu", "qos": "long", "constraint": "ib"}
sizes = {"processes_per_node": 1, "cpus_per_node": 1, "memory_gib_per_node": 1.0}
cluster = make_cluster(executor="slurm", accelerator="cpu", slurm=slurm, **sizes)
attempt = AttemptDir(root / "train/attempts/001")
plan = make_plan("zero1", nodes=2, processes_per_node=1)
plan = plan.model_copy(update={"resources": {"train": Resources(memory_gib=1, cpus=1)}})
try:
    SlurmJobs(root, cluster).submit(attempt, plan, sys.argv[2].split())
except TooFewNodesError as error:
    print("TooFewNodesError", error)
"""


def test_slurm_says_when_it_has_too_few_nodes_without_the_excluded_ones(cluster: Cluster, shared_folder: Path) -> None:
    command = [sys.executable, "-c", SUBMIT, str(shared_folder)]
    said = cluster.run([*command, "c1 c2"], cwd=REPOSITORY).stdout
    assert "TooFewNodesError Slurm rejected the job" in said and "Excluded nodes: c1, c2" in said
    assert "TooFewNodesError" not in cluster.run([*command, "c1"], cwd=REPOSITORY).stdout
    cluster.run(["scancel", "--user=root"])


def test_eight_drivers_run_squeue_as_often_as_one(cluster: Cluster, shared_folder: Path) -> None:
    job = cluster.run(f"sbatch --parsable --output={shared_folder}/out --wrap 'sleep 600'").stdout.strip()
    cluster.wait_job(job, "RUNNING")
    wrapper = shared_folder / "bin/squeue"
    wrapper.parent.mkdir()
    real = cluster.run("command -v squeue").stdout.strip()
    wrapper.write_text(f'#!/bin/sh\necho asked >> {shared_folder}/count\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    command = f"PATH={wrapper.parent}:$PATH TMPDIR={shared_folder} exec python -c '{WATCH}' {SECONDS} {job}"
    started = time.monotonic()
    drivers = [cluster.popen(command, stdout=subprocess.PIPE) for _ in range(DRIVERS)]
    assert [driver.communicate()[0].split() for driver in drivers] == [["RUNNING"]] * DRIVERS
    asked = (shared_folder / "count").read_text().count("asked")
    assert asked <= 2 + (time.monotonic() - started) / FRESH_SECONDS
    cluster.run(["scancel", job])


@pytest.mark.faults
@pytest.mark.training
@pytest.mark.timeout(900)
def test_a_worker_that_slurm_cannot_start_is_named_and_the_next_job_trains(checkout: ClusterCheckout) -> None:
    """As on a loaded node, whose slurmd does not answer within MessageTimeout."""
    checkout.configure_cluster(slurm={"srun_extra": ["--msg-timeout=2"]}, max_steps=6)
    for stage in ("fetch", "plan", "render", "data"):
        checkout.on_login_node("shardmake", stage, "demo")
    (slurmd,) = checkout.cluster.run(["pgrep", "-x", "slurmd"], node="c2").stdout.split()
    log = checkout.root / "driver.log"
    checkout.cluster.run(["kill", "-STOP", slurmd], node="c2")
    try:
        driver = checkout.cluster.popen(
            checkout.command("shardmake", "train", "demo"), cwd=checkout.root, stdout=log.open("a")
        )
        checkout.cluster.wait_until(lambda: " -> " in log.read_text(), "the end of the first job", timeout=200)
    finally:
        checkout.cluster.run(["kill", "-CONT", slurmd], node="c2")
    assert driver.wait(400) == 0, log.read_text()
    first, last = checkout.read("train/attempts/index.json")
    assert first["end"] == "node failure" and last["end"] == "finished"
    assert first["message"].startswith("Slurm could not start the worker on c2: ")
    assert_equals_the_next_training(checkout)


LATE_SBATCH = """#!/bin/sh
[ -e {folder}/asked ] && exec {sbatch} "$@"
touch {folder}/asked
(sleep {seconds}; exec {sbatch} "$@") > {folder}/late 2>&1 &
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""


@pytest.mark.faults
@pytest.mark.training
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seconds", "jobs"), [(1, 1), (15, 2)])
def test_one_job_trains_where_slurm_accepts_a_job_after_its_sbatch_has_failed(
    checkout: ClusterCheckout, seconds: int, jobs: int
) -> None:
    """The job is found and adopted before sbatch is repeated, or appears later and ends at once beside the other."""
    checkout.configure_cluster(nodes=1, max_steps=40, checkpoints={"every_steps": 40})
    for stage in ("fetch", "plan", "render", "data"):
        checkout.on_login_node("shardmake", stage, "demo")
    wrapper = checkout.root / "bin/sbatch"
    wrapper.parent.mkdir()
    sbatch = checkout.cluster.run("command -v sbatch").stdout.strip()
    wrapper.write_text(LATE_SBATCH.format(folder=shlex.quote(str(wrapper.parent)), sbatch=sbatch, seconds=seconds))
    wrapper.chmod(0o755)
    path = f"{wrapper.parent}:{os.environ['PATH']}"
    output = checkout.on_login_node("shardmake", "train", "demo", env={"PATH": path})
    assert "Slurm does not answer. The driver looks for the job in 5 s." in output
    late = (wrapper.parent / "late").read_text().split()[-1]
    (attempt,) = checkout.read("train/attempts/index.json")
    assert attempt["end"] == "finished" and (attempt["job"] == late) == (jobs == 1)
    assert len(checkout.training_jobs()) == jobs and sorted(checkout.losses()) == list(range(1, 41))
    if jobs == 2:
        checkout.cluster.wait_job(late, "COMPLETED")
        log = checkout.run / f"train/attempts/001/slurm/{late}_0_log.out"
        assert f"belongs to job {attempt['job']}, because the sbatch of this one had failed" in log.read_text()
    assert_equals_the_next_training(checkout)

"""Drivers share the queries of the real squeue, and starts that the real Slurm estimates."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardmake.launch.watcher import FRESH_SECONDS
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


ASK = """
from pathlib import Path
from shardmake.config.load import load_cluster
from shardmake.launch.submission_check import expected_starts
from shardmake.run.paths import RunDir
from tests.unit.launch.test_submission_check import estimates
from tests.unit.plans import make_plan
cluster = load_cluster(Path("config/clusters/three-node-test.yaml"))
plan = make_plan("zero3").asking(2)
plan = plan.model_copy(update={"resources": {"train": plan.resources["train"].model_copy(update={"cpus": 2})}})
print(expected_starts(plan, estimates(1, 2, 3, too_large=9), cluster, RunDir(Path("runs/none"))))
"""


def ask(cluster: Cluster) -> str:
    return cluster.run(["python", "-c", ASK], cwd=REPOSITORY).stdout.strip()


def test_the_estimate_follows_the_jobs_that_hold_nodes(cluster: Cluster, shared_folder: Path) -> None:
    cluster.reset()
    start = "if submitted now, by Slurm's estimate without the jobs that already wait: 2 nodes: would start "
    assert ask(cluster) == f"{start}at once; 1 node: would start at once; 3 nodes: would start at once"

    options = f"--parsable --exclusive --output={shared_folder}/out"
    holds = cluster.run(f"sbatch {options} --nodes=2 --time=40 --wrap 'sleep 600'").stdout.strip()
    cluster.wait_job(holds, "RUNNING")
    held = ask(cluster)
    assert held.startswith(f"{start}in about ") and "1 node: would start at once" in held
    minutes = {part.split()[-2] for part in held.split("; ") if part.endswith(" min")}
    assert minutes <= {"38", "39", "40"} and minutes

    waits = cluster.run(f"sbatch {options} --nodes=3 --time=60 --wrap 'sleep 600'").stdout.strip()
    assert cluster.job(waits).state == "PENDING"
    behind = ask(cluster)
    assert "60 min" not in behind and "100 min" not in behind, "Slurm does not count the job that waits"
    cluster.run(["scancel", holds, waits])
    cluster.wait_idle()


def test_slurm_that_cannot_start_the_job_gives_no_time(cluster: Cluster) -> None:
    cluster.reset()
    set_partition = "scontrol update partitionname=gpu state="
    try:
        cluster.run(f"{set_partition}down")
        assert ask(cluster) == "Slurm starts no jobs at present: partition gpu is down"
    finally:
        cluster.run(f"{set_partition}up")
    try:
        cluster.run("scontrol update nodename=c[2-3] state=drain reason=test")
        assert ask(cluster).endswith("2 nodes: Slurm does not know when it would start")
    finally:
        cluster.run("scontrol update nodename=c[2-3] state=resume")

"""Drivers share the queries of the real squeue."""

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

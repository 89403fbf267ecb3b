"""Estimated starts on the real Slurm: idle, behind a job that holds nodes, and where no job can start."""

from pathlib import Path

import pytest

from tests.cluster.harness import Cluster

pytestmark = pytest.mark.cluster

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
REPOSITORY = Path(__file__).parents[2]


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

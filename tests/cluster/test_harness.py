"""The harness itself: what the other cluster tests take for granted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import namespaces
from tests.cluster.conftest import require_cluster
from tests.cluster.harness import STATE, Cluster, ClusterError
from tests.cluster.slurm_conf import NODES

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
LATE = 12
"""Seconds for which a node does not answer, and after which Slurm must not yet take it for down."""
SECOND = STATE.with_name(f"{STATE.name}-second")


@pytest.fixture(autouse=True)
def _no_jobs_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").reset()


def test_all_nodes_are_idle(cluster: Cluster) -> None:
    # A star after the state means that Slurm waits for an answer of the node, which takes a while on a busy machine.
    idle = dict.fromkeys(NODES, "idle")
    cluster.wait_until(lambda: cluster.node_states() == idle, "three idle nodes", timeout=60)


def test_a_step_runs_on_two_hosts(cluster: Cluster) -> None:
    assert sorted(cluster.run("srun --nodes=2 --ntasks-per-node=1 hostname").stdout.split()) == ["c1", "c2"]


def test_a_step_starts_although_a_node_answers_late(cluster: Cluster) -> None:
    """As on a loaded machine: the credential of the step must not expire before the node reads it."""
    (slurmd,) = cluster.run(["pgrep", "-x", "slurmd"], node="c2").stdout.split()
    cluster.run(["kill", "-STOP", slurmd], node="c2")
    try:
        step = cluster.popen("srun --nodes=3 --ntasks-per-node=1 hostname", stdout=subprocess.PIPE)
        time.sleep(LATE)
    finally:
        cluster.run(["kill", "-CONT", slurmd], node="c2")
    # If Slurm noticed the silence before it placed the job, srun says first that it waits for the node.
    output = step.communicate(timeout=60)[0]
    assert sorted(line for line in output.splitlines() if not line.startswith("srun:")) == ["c1", "c2", "c3"], output


def test_gpus_are_counted_and_numbered(cluster: Cluster) -> None:
    assert cluster.run("srun --gres=gpu:2 printenv CUDA_VISIBLE_DEVICES").stdout.strip() == "0,1"


@pytest.mark.parametrize(("options", "refusal"), [
    ("--partition=gpu --qos=long", "requires features=ib"), ("--partition=gpu --constraint=ib", "requires qos=long"),
    ("--partition=cpu", "requires qos=short"), ("--partition=gpu --qos=long --constraint=ib", None),
    ("--partition=cpu --qos=short", None), ("", None),
])  # fmt: skip
def test_partitions_refuse_jobs_without_their_parameters(cluster: Cluster, options: str, refusal: str | None) -> None:
    done = cluster.run(f"sbatch {options} --output=/dev/null --wrap true", check=False)
    assert (done.returncode == 0) == (refusal is None), done.stderr
    assert (refusal or "") in done.stderr


def test_a_job_sees_the_checkout_the_environment_and_slurm(cluster: Cluster) -> None:
    script = f"test {ROOT} -ef . && command -v python && echo $HOME && env --unset=SLURM_CONF squeue --me --noheader"
    python, home, queue = cluster.run(["srun", "bash", "-c", script], cwd=ROOT).stdout.splitlines()
    assert (Path(python).parent, home) == (Path(sys.executable).parent, os.environ["HOME"])
    assert "c1" in queue


def test_tmp_and_shared_memory_are_the_nodes_own(cluster: Cluster) -> None:
    for folder in ("/tmp", "/dev/shm"):
        cluster.run(["touch", f"{folder}/shardmake-only-c1"], node="c1")
        for host in ("c2", "head"):
            assert cluster.run(["test", "-e", f"{folder}/shardmake-only-c1"], node=host, check=False).returncode == 1


def test_submitit_and_gloo_work_across_nodes(cluster: Cluster, shared_folder: Path) -> None:
    command = [sys.executable, "-m", "tests.cluster.allreduce", str(shared_folder)]
    output = cluster.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1"}).stdout
    assert output.splitlines()[-2:] == ["3 c1", "3 c1"]  # submitit warns before: sacct needs accounting


def test_a_cut_node_is_unreachable_until_it_joins(cluster: Cluster) -> None:
    def reaches_c2() -> bool:
        probe = ["timeout", "1", "bash", "-c", "exec 3<>/dev/tcp/c2/6818"]
        return cluster.run(probe, node="c1", check=False).returncode == 0

    assert reaches_c2()
    cluster.cut("c1")
    assert not reaches_c2()
    cluster.join("c1")
    cluster.wait_until(reaches_c2, "the way from c1 to c2")


def test_a_killed_node_loses_its_job_and_returns(cluster: Cluster, shared_folder: Path) -> None:
    job = cluster.run(f"sbatch --parsable --nodelist=c2 --output={shared_folder}/out --wrap 'sleep 600'").stdout.strip()
    cluster.wait_job(job, "RUNNING")
    cluster.kill_node("c2")
    with pytest.raises(ClusterError, match="not running"):
        cluster.run("true", node="c2")
    cluster.declare_down("c2")
    cluster.wait_job(job, "PENDING")
    cluster.start_node("c2")
    cluster.wait_until(lambda: "down" not in cluster.node_states()["c2"], "c2 to come back")


def test_preemption_sends_sigterm_at_once(cluster: Cluster, shared_folder: Path) -> None:
    seen = shared_folder / "seen"
    step = shared_folder / "step.sh"
    step.write_text(f"trap 'echo TERM >> {seen}' TERM; echo started >> {seen}; while :; do sleep 0.1; done")
    cluster.run(f"sbatch --requeue --output={shared_folder}/out --wrap 'srun bash {step}'")
    cluster.wait_until(seen.exists, "the step")
    cluster.run(f"sbatch --partition=urgent --nodes=3 --exclusive --output={shared_folder}/urgent --wrap 'sleep 600'")
    cluster.wait_until(lambda: seen.read_text().split() == ["started", "TERM"], "SIGTERM")


def test_jobs_survive_a_restart_of_the_controller(cluster: Cluster, shared_folder: Path) -> None:
    job = cluster.run(f"sbatch --parsable --output={shared_folder}/out --wrap 'sleep 600'").stdout.strip()
    cluster.wait_job(job, "RUNNING")
    cluster.restart_controller()
    assert cluster.job(job).state == "RUNNING"


def test_a_cluster_in_use_rejects_others(cluster: Cluster) -> None:
    for action in (Cluster().up, Cluster().down, Cluster().attach):
        with pytest.raises(ClusterError, match="Another process uses the cluster"):
            action()


def test_a_crashed_harness_is_cleaned_up_after() -> None:
    require_cluster()
    interfaces = _interfaces()
    harness = f"from tests.cluster.harness import *; Cluster(Path('{SECOND}')).up(); print('up', flush=True); input()"
    crashed = subprocess.Popen(
        [sys.executable, "-c", harness], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert crashed.stdout is not None
    assert crashed.stdout.readline() == "up\n"
    crashed.send_signal(signal.SIGKILL)
    crashed.wait()
    left = set(namespaces.processes(SECOND))
    assert left
    with Cluster(SECOND) as again:
        assert left.isdisjoint(namespaces.processes(SECOND))
        assert again.run("srun hostname").stdout == "c1\n"
        assert _interfaces() == interfaces
    assert list(namespaces.processes(SECOND)) == []
    assert not SECOND.exists()
    assert _interfaces() == interfaces
    assert str(SECOND) not in Path("/proc/mounts").read_text()


def test_a_cluster_left_up_is_not_taken_down_by_the_next_up() -> None:
    require_cluster()
    first = Cluster(SECOND)
    first.up()
    first.leave_up()
    with pytest.raises(ClusterError, match="is up"):
        Cluster(SECOND).up()
    second = Cluster(SECOND)
    second.attach()
    assert second.node_states() == dict.fromkeys(NODES, "idle")
    second.down()
    assert not SECOND.exists()


def test_with_accounting_sacct_lists_the_jobs() -> None:
    require_cluster(accounting=True)
    with Cluster(SECOND, accounting=True) as cluster:
        cluster.run("srun --job-name=counted true")
        finished = "sacct --noheader --parsable2 --allocations --format=JobName,State"
        cluster.wait_until(lambda: cluster.run(finished).stdout == "counted|COMPLETED\n", "sacct to know the job")


def _interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}

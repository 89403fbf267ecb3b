"""``shardmake doctor`` on the three-node Slurm: the login node, two nodes, and nodes with recorded GPUs."""

import json
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.load import load_cluster
from shardmake.doctor.job import JOB_NAME
from tests.cluster.harness import Cluster, Job, environment
from tests.programs import write_program
from tests.unit.doctor.recorded import nvidia_smi, smi_xml

pytestmark = [pytest.mark.cluster, pytest.mark.training]
CLUSTER_FILE = Path(__file__).parents[2] / "config/clusters/three-node-test.yaml"
PARTITION = ("--partition", "gpu", "--qos", "long", "--constraint", "ib")
ROWS = "0, GPU-0, 4, 0, 580.65.06, 8.0\n1, GPU-1, 4, 0, 580.65.06, 8.0\n"
A100 = {"name": "NVIDIA A100-SXM4-80GB", "fabric": "N/A", "status": "N/A"}


@pytest.fixture(autouse=True)
def fresh(cluster: Cluster) -> None:
    cluster.reset()


def doctor(
    cluster: Cluster, folder: Path, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return cluster.run(["shardmake", "doctor", *options, "--json"], cwd=folder, env=env, check=False, timeout=600)


def rows(answer: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["check"]: row for row in answer}


def doctor_jobs(cluster: Cluster) -> list[Job]:
    return [job for job in cluster.jobs() if job.name.startswith(JOB_NAME)]


def test_the_login_node_needs_no_job(cluster: Cluster, shared_folder: Path) -> None:
    before = len(doctor_jobs(cluster))
    done = doctor(cluster, shared_folder, "--cluster", str(CLUSTER_FILE))
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(json.loads(done.stdout)["login_node"])
    assert found["Slurm"]["verdict"] == "ok"
    assert found["accounts"]["found"] == "this Slurm has no accounting: it needs neither an account nor a qos"
    assert found["sacct"]["verdict"] == "warning" and "MinJobAge (300 sec)" in found["sacct"]["advice"]
    assert "3 nodes with 2 a100 (gpu_type: a100), 2 cores, 7 GiB, features ib" in found["partition gpu"]["found"]
    assert found["file locks"]["verdict"] == "ok"
    assert len(doctor_jobs(cluster)) == before


def test_two_nodes_are_checked_and_described(cluster: Cluster, shared_folder: Path) -> None:
    options = ("--cluster", str(CLUSTER_FILE), "--node", "--nodes", "2", "--skip-builds", "--write", "cluster.yaml")
    done = doctor(cluster, shared_folder, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    found = rows(answer["compute_nodes"])
    for check in ("all-reduce in the node", "all-reduce of the nodes", "files of other nodes", "file locks of nodes"):
        assert found[check]["verdict"] == "ok", found[check]
    assert found["environment"]["nodes"] == ["c1", "c2"], "equal findings of two nodes are one row"
    assert found["GPUs"]["verdict"] == "not checked"
    (job,) = [job for job in doctor_jobs(cluster) if job.id == max((job.id for job in doctor_jobs(cluster)), key=int)]
    assert (job.state, job.partition) == ("COMPLETED", "gpu")
    written, by_hand = load_cluster(shared_folder / "cluster.yaml"), load_cluster(CLUSTER_FILE)
    assert written.intra_node_gbps and written.inter_node_gbps != by_hand.inter_node_gbps
    assert written.slurm == by_hand.slurm and written.network_interface == "eth0"

    again = doctor(cluster, shared_folder, *options)
    assert again.returncode == 2 and "cluster.yaml exists" in again.stderr


def test_recorded_gpus_are_judged_and_no_gpu_is_guessed(cluster: Cluster, shared_folder: Path) -> None:
    programs = shared_folder / "bin"
    xml = smi_xml(A100, {**A100, "errors": "3", "persistence": "Disabled"})
    write_program(programs / "nvidia-smi", nvidia_smi(ROWS, xml))
    path = {"PATH": f"{programs}:{environment()['PATH']}"}
    done = doctor(cluster, shared_folder, *PARTITION, "--node", "--skip-builds", env=path)
    assert done.returncode == 1, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    found = rows(answer["compute_nodes"])
    assert found["driver"]["verdict"] == "stops a run" and "torch is a build without CUDA" in found["driver"]["found"]
    assert found["GPUs"]["found"] == "2 GPUs, idle and without memory errors", "what the table of nvidia-smi shows"
    assert found["memory errors"]["found"] == "GPU 1: uncorrected ECC errors", "what only its XML shows"
    assert found["persistence mode"]["verdict"] == "warning" and found["MIG"]["verdict"] == "ok"
    assert found["fabric manager"]["verdict"] == "not checked"
    for check in ("CUDA", "all-reduce"):
        assert found[check]["verdict"] == "stops a run" and "CUDA build" in found[check]["advice"], found[check]
    assert answer["cluster_file"] is None and "CUDA did not start" in found["cluster file"]["found"]
    assert not (shared_folder / "cluster.yaml").exists()
    assert (Path(answer["folder"]) / "report.json").exists()


def test_a_job_that_slurm_rejects_is_an_error_with_slurms_reason(cluster: Cluster, shared_folder: Path) -> None:
    before = len(doctor_jobs(cluster))
    done = doctor(cluster, shared_folder, "--partition", "gpu", "--node", "--skip-builds")
    assert done.returncode == 2 and "requires" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert len(doctor_jobs(cluster)) == before


def test_an_interrupt_cancels_the_job(cluster: Cluster, shared_folder: Path) -> None:
    known = {job.id for job in doctor_jobs(cluster)}

    def new_jobs() -> list[Job]:
        return [job for job in doctor_jobs(cluster) if job.id not in known]

    command = ["shardmake", "doctor", "--node", "--cluster", str(CLUSTER_FILE), "--skip-builds"]
    process = cluster.popen(command, cwd=shared_folder, stdout=subprocess.PIPE)
    cluster.wait_until(lambda: bool(new_jobs()), "the job of doctor", timeout=120)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in output, output
    (job,) = new_jobs()
    cluster.wait_job(job.id, "CANCELLED", timeout=60)

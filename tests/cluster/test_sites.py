"""Rules of sites on the real Slurm: options, memory as a site takes it, a second environment, several clusters."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import require_cluster
from tests.cluster.fault_run import ClusterCheckout
from tests.cluster.harness import STATE, Cluster
from tests.cluster.slurm_conf import gres_conf, slurm_conf
from tests.workflow.checkout import LOCAL, RUN

pytestmark = pytest.mark.cluster
REPOSITORY = Path(__file__).resolve().parents[2]

SBATCH = """
import json, re, subprocess, sys
from pathlib import Path
from pydantic import ValidationError
from shardmake.core.errors import ShardmakeError
from shardmake.launch.driver_script import batch_script
from shardmake.launch.slurm_jobs import SlurmJobs
from shardmake.launch.stage_jobs import sbatch_command
from shardmake.run.attempt import AttemptDir
from shardmake.run.driver_job import DriverDir
from shardmake.run.plan import Resources
from tests.unit.plans import make_cluster, make_plan, make_run
root = Path(sys.argv[1])

def ask(slurm, accelerator="a100-80gb"):
    sizes = {"processes_per_node": 1, "cpus_per_node": 1, "memory_gib_per_node": 1.0}
    try:
        cluster = make_cluster(executor="slurm", accelerator=accelerator, slurm=slurm, **sizes)
    except ValidationError as error:
        return {"refused": str(error)}
    try:
        stage = sbatch_command("data", make_run(), cluster, Resources(memory_gib=1, cpus=1))
    except ShardmakeError as error:
        return {"refused": str(error)}
    plan = make_plan("zero1", nodes=1, processes_per_node=1)
    plan = plan.model_copy(update={"resources": {"train": Resources(memory_gib=1, cpus=1)}})
    texts = {
        "train": SlurmJobs(root, cluster).script(AttemptDir(root / "1"), plan, []),
        "driver": batch_script(cluster, "driver-1", DriverDir(root)),
    }
    answers = {}
    for job, text in texts.items():
        (root / job).write_text(text)
        done = subprocess.run(["sbatch", "--test-only", root / job], capture_output=True, text=True)
        answers[job] = [done.returncode, done.stderr, text]
    done = subprocess.run(f"{stage} --test-only --wrap=true", shell=True, capture_output=True, text=True)
    answers["data"] = [done.returncode, done.stderr, stage]
    return answers

print(json.dumps({name: ask(**given) for name, given in json.loads(sys.argv[2]).items()}))
"""


def ask(cluster: Cluster, folder: Path, cases: dict[str, object]) -> dict[str, dict[str, Any]]:
    """Return what the real sbatch answers to the jobs of each case, or why the configuration refuses it."""
    command = [sys.executable, "-c", SBATCH, str(folder), json.dumps(cases)]
    return json.loads(cluster.run(command, cwd=REPOSITORY).stdout.splitlines()[-1])


VALUES = {
    "begin": "now+1hour", "cpu-freq": "high", "deadline": "now+9days", "gres": "gpu:1", "gres-flags": "enforce-binding",
    "distribution": "block", "mail-type": "END", "power": "level", "profile": "none", "propagate": "NONE",
    "time-min": "10", "exclusive": "user", "nodelist": "c1", "dependency": "singleton", "gpu-bind": "closest",
    "gpu-freq": "low", "mem": "100", "tmp": "0",
}  # fmt: skip
"""Values that this Slurm can use; others have 1."""
LACKING = {"bbf": "Invalid --bbf", "licenses": "Invalid license", "reservation": "reservation is invalid"}
"""Options whose objects the three-node cluster does not have: the real sbatch answers so, in all jobs."""


def test_every_option_of_sbatch_is_taken_or_refused_by_name(cluster: Cluster, shared_folder: Path) -> None:
    text = cluster.run(["sbatch", "--help"]).stdout
    options = dict(sorted(re.findall(r"^ +(?:-\w, )?--([a-z-]+)(\[?=\S+)?", text, re.MULTILINE)))
    extra = {name: {name: VALUES.get(name, "1") if value else True} for name, value in options.items()}
    found = ask(cluster, shared_folder, {name: {"slurm": {"extra": given}} for name, given in extra.items()})
    refused = {name: answer["refused"] for name, answer in found.items() if "refused" in answer}
    assert len(options) > 80 and [name for name, words in refused.items() if f"'{name}'" not in words] == []
    wrong = {
        (name, job): words
        for name in found.keys() - refused.keys()
        for job, (status, words, _) in found[name].items()
        if bool(status) != (name in LACKING) or LACKING.get(name, "") not in words
    }
    assert wrong == {}
    assert all(
        "gpu:1" in answer["train"][2] and "--nodes=1" in answer["train"][2]
        for answer in found.values()
        if "train" in answer
    )


def test_memory_is_requested_as_the_partition_takes_it(cluster: Cluster, shared_folder: Path) -> None:
    words = {"whole": "--mem is not available", "percpu": "needs --mem-per-cpu"}
    forms = {"whole": "none", "percpu": "per_cpu"}
    cases = {
        f"{partition} {form}": {"slurm": {"partition": partition, "memory": form}}
        for partition in words
        for form in ("per_node", "per_cpu", "none")
    }
    found = ask(cluster, shared_folder, cases)
    for case, answer in found.items():
        partition, form = case.split()
        is_right = forms[partition] == form
        assert {job: status == 0 for job, (status, _, _) in answer.items()} == dict.fromkeys(answer, is_right), case
        assert is_right or all(words[partition] in said for _, said, _ in answer.values())


def test_options_that_every_job_has_can_be_left_out(cluster: Cluster, shared_folder: Path) -> None:
    left_out = dict.fromkeys(("cpus-per-task", "comment", "no-requeue", "requeue"), False)
    (answer,) = ask(cluster, shared_folder, {"less": {"slurm": {"memory": "none", "extra": left_out}}}).values()
    for status, said, text in answer.values():
        lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        assert status == 0, said
        assert not [line for line in lines if any(f"--{name}" in line for name in left_out)]


@pytest.fixture
def environment(shared_folder: Path) -> Path:
    """An environment of another path with the same packages, whose Python notes the hosts and what they start."""
    folder = shared_folder / "another environment"
    (folder / "bin").mkdir(parents=True)
    for name in ("lib", "pyvenv.cfg"):
        (folder / name).symlink_to(Path(sys.prefix, name))
    for program in Path(sys.prefix, "bin").iterdir():
        (folder / "bin" / program.name).symlink_to(program.resolve())
    python = folder / "bin/python"
    python.unlink()
    python.write_text(f'#!/bin/sh\necho "$(hostname) $*" >> "{folder}/used"\nexec "{folder}/bin/python3" "$@"\n')
    python.chmod(0o755)
    return folder


@pytest.mark.training
def test_jobs_use_their_own_environment(checkout: ClusterCheckout, environment: Path) -> None:
    checkout.configure_cluster(max_steps=4, checkpoints={"every_steps": 4})
    file = checkout.root / "config/cluster.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"environment": str(environment)}))
    checkout.on_login_node("shardmake", "fetch", "demo")
    checkout.on_login_node("snakemake", "--profile", "slurm", "render", "data")
    checkout.on_login_node("shardmake", "train", "demo")
    used = (environment / "used").read_text().splitlines()
    assert {host for line in used if "shardmake.launch.slurm_task" in line for host in line.split()[:1]} == {"c1", "c2"}
    assert any("shardmake.cli data" in line for line in used), used


def test_the_doctor_checks_both_environments(cluster: Cluster, environment: Path, shared_folder: Path) -> None:
    file = shared_folder / "cluster.yaml"
    values = yaml.safe_load((REPOSITORY / "config/clusters/three-node-test.yaml").read_text())
    scratch = {"scratch": "$SLURM_SUBMIT_DIR"}  # which only a job has
    file.write_text(yaml.safe_dump(values | {"environment": str(environment)} | scratch))
    words = ("shardmake", "doctor", "--cluster", str(file), "--node", "--skip-builds", "--json")
    answer = json.loads(cluster.run(words, cwd=shared_folder, check=False, timeout=600).stdout)
    login = {row["check"]: row for row in answer["login_node"]}["environment of the jobs"]
    node = {row["check"]: row for row in answer["compute_nodes"]}["environment"]
    assert login["found"] == f"{environment}, with the versions of this one"
    assert node["found"] == f"{environment}, the same versions as on the login node"
    checked = {row["check"]: row["found"] for row in answer["compute_nodes"]}["scratch"]
    assert checked.startswith(f"{shared_folder}, "), checked


@pytest.fixture(scope="module")
def two_clusters() -> Iterator[Cluster]:
    """The cluster `test`, and `other`, whose one node c3 has MIG slices beside whole GPUs; both have one accounting."""
    require_cluster(accounting=True)
    with Cluster(STATE.with_name(f"{STATE.name}-sites"), accounting=True) as cluster:
        folder = cluster.state / "other"
        folder.mkdir()
        text = slurm_conf(cluster.state, accounting=True).replace("gpu:a100:2", "gpu:a100:2,gpu:1g.10gb:4")
        text = re.sub("/(slurmctld|slurmd-|spool-)", r"/other-\1", text.replace("c1,c2,c3", "c3"))
        ports = "ClusterName=other\nSlurmctldPort=6827\nSlurmdPort=6828"
        (folder / "slurm.conf").write_text(text.replace("ClusterName=test", ports))
        whole = gres_conf(cluster.state)
        slices = re.sub("File=.*", "File=/dev/tty[0-3]", whole.replace("a100", "1g.10gb"))
        (folder / "gres.conf").write_text(whole + slices)
        for name in ("cgroup.conf", "job_submit.lua"):
            (folder / name).write_text((cluster.state / "etc/slurm" / name).read_text())
        cluster.run("sacctmgr --immediate add cluster other")
        cluster.run(["slurmctld", "-f", str(folder / "slurm.conf")])
        cluster.run(["slurmd", "-f", str(folder / "slurm.conf"), "-N", "c3"], node="c3")
        idle = ["sinfo", "--clusters=other", "--noheader", "--partition=open", "--format=%T"]
        cluster.wait_until(lambda: cluster.run(idle, check=False).stdout == "idle\n", "the node of the other cluster")
        yield cluster


OTHER = {"SLURM_CLUSTERS": "other"}


def test_the_doctor_asks_the_cluster_of_slurm_clusters(two_clusters: Cluster) -> None:
    doctor = ["shardmake", "doctor", "--json", "--partition", "open"]
    answer = two_clusters.run(doctor, env={"SLURM_CLUSTERS": "test,other"}, check=False).stdout
    login = {row["check"]: row for row in json.loads(answer)["login_node"]}
    assert login["partitions"]["found"] == (
        "sinfo lists several clusters: other, test. A run has its jobs in one. Set SLURM_CLUSTERS to one."
    )
    node = two_clusters.run(
        [*doctor, "--node", "--skip-builds"], cwd=two_clusters.shared, env=OTHER, check=False, timeout=600
    )
    login = {row["check"]: row for row in json.loads(node.stdout)["login_node"]}
    assert (
        "1 node with 2 a100 and 4 1g.10gb (gpu_type: a100, gpu_type: 1g.10gb)"
        in (login["partition open (default)"]["found"])
    )
    assert {row["check"] for row in json.loads(node.stdout)["compute_nodes"]} >= {"environment", "GPUs"}
    job = two_clusters.run(["scontrol", "show", "job"], env=OTHER).stdout
    assert "NodeList=c3" in job and "TresPerNode=gres:gpu:a100:2" in job


@pytest.mark.training
def test_tasks_of_a_job_array_train_runs_and_continue_them(checkout: ClusterCheckout) -> None:
    """One gets the signal that Slurm sends before the time limit, and the array is submitted again."""
    own = {"processes_per_node": 1, "cpus_per_node": 1}
    (checkout.root / "config/cluster.yaml").write_text(yaml.safe_dump(LOCAL | own))
    run = RUN | {"strategy": "ddp", "max_steps": 100, "checkpoints": {"every_steps": 100}, "push": None}
    point = {key: value for key, value in run.items() if key not in ("learning_rate", "push")}
    runs = {"rates": point | {"sweep": {"learning_rate": [1e-3, 2e-3]}}}
    checkout.write_config({"cluster": "config/cluster.yaml", "runs": runs})
    names = [f"rates-lr{rate}e-3" for rate in (1, 2)]
    script = (REPOSITORY / "examples/array.sh").read_text()
    (checkout.root / "array.sh").write_text(re.sub(r"RUNS=\(.*\)", f"RUNS=({' '.join(names)})", script))
    checkout.on_login_node("snakemake", "--profile", "profiles/local", "data")

    def steps(name: str) -> list[int]:
        metrics = checkout.root / f"runs/{name}/train/metrics.jsonl"
        lines = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
        return [line["step"] for line in lines if "loss" in line]

    def submit(tasks: str) -> str:
        less = ("--gpus-per-node=0", "--cpus-per-task=1", "--mem=2G", "--time=10")
        return checkout.cluster.run(
            ["sbatch", "--parsable", f"--array={tasks}", *less, "array.sh"], cwd=checkout.root
        ).stdout.strip()

    job = submit("0-1%2")
    checkout.cluster.wait_until(lambda: len(steps(names[0])) >= 2, "training", timeout=300)
    checkout.cluster.run(["scancel", "--signal=TERM", f"{job}_0"])
    checkout.cluster.wait_idle(timeout=400)
    reports = [(checkout.root / f"runs/{name}/report.html").exists() for name in names]
    assert reports == [False, True] and steps(names[0])[-1] < 100
    submit("0")
    checkout.cluster.wait_idle(timeout=400)
    assert (checkout.root / f"runs/{names[0]}/report.html").exists()
    assert steps(names[0]) == steps(names[1]) and steps(names[0])[-1] == 100
    assert len(list((checkout.root / f"runs/{names[0]}/train/attempts").glob("0*"))) == 2

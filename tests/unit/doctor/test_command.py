"""The command: its exit status, contradicting options, and what keeps it from submitting a job."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.core.errors import ShardmakeError
from shardmake.doctor import command
from shardmake.doctor.command import check_compute_nodes, named_cluster
from shardmake.doctor.options import Options
from shardmake.doctor.records import DoctorDir, DoctorRequest, NodeFacts, NodeReport
from shardmake.run.findings import Finding, Verdict, ok, stops
from tests.programs import install_programs
from tests.unit.doctor.recorded import slurm_programs

CLUSTER = {"executor": "slurm", "processes_per_node": 2, "cpus_per_node": 4, "memory_gib_per_node": 8}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cluster file and a configuration, on a login node whose Slurm answers."""
    install_programs(tmp_path / "bin", monkeypatch, slurm_programs())
    monkeypatch.chdir(tmp_path)
    run = {
        "model": "base", "data": {"train": "train.jsonl"}, "sequence_length": 32, "global_batch_size": 2, "max_steps": 2,
        "learning_rate": 1e-3,
    }  # fmt: skip
    (tmp_path / "named.yaml").write_text(json.dumps(CLUSTER | {"slurm": {"partition": "gpu", "account": "lab-nlp"}}))
    (tmp_path / "config.yaml").write_text(json.dumps({"cluster": "named.yaml", "runs": {"chat": run}}))
    return tmp_path


@pytest.mark.parametrize("words", [["--cluster", "named.yaml"], ["--config", "config.yaml"], []])
def test_the_login_node_as_json(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", *words])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["would_stop_a_run"] is False and answer["compute_nodes"] == [] and answer["cluster_file"] is None
    assert {"Slurm", "partition gpu", "torch"} <= {row["check"] for row in answer["login_node"]}


def test_the_status_is_1_only_if_something_would_stop_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "named.yaml").write_text(json.dumps(CLUSTER | {"slurm": {"partition": "gpus"}}))
    done = CliRunner().invoke(app, ["doctor", "--cluster", "named.yaml"])
    assert done.exit_code == 1 and "1 stops a run" in done.output
    install_programs(folder / "bin", monkeypatch, {"sacct": "exit 1"})
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0, "a warning is not an error"


@pytest.mark.parametrize(
    ("words", "status"), [(["--account", "lab-nlp"], 0), (["--account", "lab-npl"], 1), (["--qos", "x"], 1)]
)
def test_options_without_a_cluster_file_are_checked(words: list[str], status: int) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", *words])
    assert done.exit_code == status
    accounts = [row for row in json.loads(done.stdout)["login_node"] if row["check"] == "accounts"]
    assert ("lab-nlp" in words) == (accounts[0]["verdict"] == "ok")


@pytest.mark.parametrize(("options", "words"), [
    (Options(cluster=Path("named.yaml"), config=[Path("config.yaml")]), "--cluster and --config both name"),
    (Options(cluster=Path("named.yaml"), gpu_type="h100"), "--gpu-type: the cluster file has"),
    (Options(config=[Path("config.yaml")], qos="long"), "--qos: the cluster file has"),
    (Options(cluster=Path("missing.yaml")), "'missing.yaml' does not exist"),
])  # fmt: skip
def test_options_that_contradict_each_other(options: Options, words: str) -> None:
    with pytest.raises(ShardmakeError) as error:
        named_cluster(options)
    assert words in str(error.value)


def test_no_job_is_submitted_if_slurm_or_the_file_forbid_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check_nodes", Mock(side_effect=AssertionError("a job was submitted")))
    options = Options(cluster=Path("named.yaml"))
    with pytest.raises(ShardmakeError, match=r"No job was submitted: qos: slurm.qos 'x' is not one of yours"):
        check_compute_nodes(options, [stops("qos", "slurm.qos 'x' is not one of yours", "Set it.")])
    (folder / "cluster.yaml").write_text("mine")
    with pytest.raises(ShardmakeError, match=r"cluster.yaml exists"):
        check_compute_nodes(Options(), [])
    with pytest.raises(AssertionError, match="submitted"):
        check_compute_nodes(options, [])
    with pytest.raises(ShardmakeError, match=r"cluster.yaml exists"):
        check_compute_nodes(replace(options, write=Path("cluster.yaml")), [])


def test_findings_of_nodes_decide_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Finding] = []

    def checked(request: DoctorRequest, _: DoctorDir) -> tuple[list[NodeReport], list[Finding]]:
        facts = NodeFacts(intra_gbps=0.7, inter_gbps=0.35)
        return [NodeReport(node_rank=0, host="c1", findings=found, facts=facts, seconds=1.0)], []

    monkeypatch.setattr(command, "check_nodes", checked)
    options = Options(cluster=Path("named.yaml"), nodes=2, write=Path("first.yaml"))
    found[:] = [ok("scratch", "/tmp")]
    passed = check_compute_nodes(options, [])
    assert passed.exit_status == 0 and passed.cluster_file == Path("first.yaml") and Path("first.yaml").exists()
    record = json.loads((passed.folder / "report.json").read_text()) if passed.folder else {}
    assert record["reports"][0]["facts"]["inter_gbps"] == 0.35
    found[:] = [stops("locked memory", "limited", "Ask.")]
    failed = check_compute_nodes(Options(cluster=Path("named.yaml"), nodes=2, write=Path("second.yaml")), [])
    assert failed.exit_status == 1 and failed.nodes[0].verdict is Verdict.STOPS

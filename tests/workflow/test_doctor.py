"""The checks of nodes with real processes: two nodes of one rank, and one node of two ranks, over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardmake.config.load import load_cluster
from shardmake.doctor import kernels
from shardmake.doctor.cluster_file import compose
from shardmake.doctor.job import make_request
from shardmake.doctor.records import DoctorDir, NodeReport
from shardmake.run.findings import Verdict, would_stop
from tests.unit.plans import make_cluster
from tests.workflow.checkout import LOCAL

SECONDS = 280


def test_two_nodes_meet_and_measure_the_network_between_them(tmp_path: Path) -> None:
    folder = DoctorDir(tmp_path / "doctor")
    folder.shared.mkdir(parents=True)
    cluster = make_cluster(
        executor="slurm", processes_per_node=1, cpus_per_node=1, nvme_path=None, scratch=str(tmp_path), cache=str(tmp_path)
    )  # fmt: skip
    request = make_request(cluster, 2, build_kernels=False)
    request.write(folder.request)
    nodes = [
        subprocess.Popen([sys.executable, "-m", "shardmake.doctor.node", str(folder.root), str(rank)])
        for rank in range(2)
    ]
    assert [node.wait(SECONDS) for node in nodes] == [0, 0]
    reports = [NodeReport.read(folder.report(rank)) for rank in range(2)]
    for report in reports:
        found = {finding.check: finding for finding in report.findings}
        assert not would_stop(report.findings), report.findings
        for check in ("all-reduce of the nodes", "files of other nodes", "file locks of nodes"):
            assert found[check].verdict is Verdict.OK
        assert "GB/s for 16 MiB with gloo" in found["all-reduce of the nodes"].found
        assert found["GPUs"].verdict is Verdict.NOT_CHECKED, "never ok without a GPU"
        assert all(finding.nodes == (report.host,) for finding in report.findings)
        assert report.facts.inter_gbps and report.facts.intra_gbps is None
    values = yaml.safe_load(compose(request, reports, drafted=False)[0])
    assert values["inter_node_gbps"] > 0 and "intra_node_gbps" not in values


@pytest.mark.nvme
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", kernels.BUILDS)
def test_extensions_of_deepspeed_are_compiled_in_a_folder_of_their_own(tmp_path: Path, name: str) -> None:
    make_request(make_cluster(nvme_path=str(tmp_path)), 1, build_kernels=True).write(tmp_path / "request.json")
    check = kernels.RunningCheck(name, tmp_path / "request.json", tmp_path, tmp_path, {"DS_ACCELERATOR": "cpu"})
    (found,) = check.result(kernels.BUILD_SECONDS).findings
    assert (found.check, found.verdict) == (name, Verdict.OK), found
    assert not list(tmp_path.glob("shardmake-*_doctor-*"))


def test_the_command_checks_this_machine_and_writes_a_cluster_file(tmp_path: Path) -> None:
    cluster = LOCAL | {"cpus_per_node": 1, "scratch": str(tmp_path), "cache": str(tmp_path)}
    (tmp_path / "local.yaml").write_text(json.dumps(cluster))
    command = [sys.executable, "-m", "shardmake.cli", "doctor", "--node", "--skip-builds", "--json"]
    command += ["--cluster", "local.yaml", "--write", "cluster.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["cluster_file"] == "cluster.yaml" and not answer["would_stop_a_run"]
    rows = {row["check"]: row for row in answer["compute_nodes"]}
    assert rows["all-reduce in the node"]["verdict"] == "ok"
    assert rows["all-reduce of the nodes"]["verdict"] == "not checked"
    written = load_cluster(tmp_path / "cluster.yaml")
    assert written.intra_node_gbps and written.accelerator == "cpu" and written.scratch == str(tmp_path)
    assert json.loads((Path(answer["folder"]) / "report.json").read_text())["compute_nodes"] == answer["compute_nodes"]

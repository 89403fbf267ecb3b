"""The report of a node: always written, and a failure of something optional does not stop a run."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.doctor import network, node
from shardmake.doctor.job import make_request
from shardmake.doctor.kernels import BUILDS, ON_GPU, KernelResult
from shardmake.doctor.records import DoctorDir, NodeFacts, NodeReport
from shardmake.run.findings import Verdict, not_checked, ok, stops
from tests.programs import install_programs
from tests.unit.doctor.recorded import nvidia_smi, smi_xml
from tests.unit.plans import make_cluster

ROWS = "".join(f"{n}, GPU-{n}, 1, 0, 580.65.06, 9.0\n" for n in range(2))


@pytest.mark.parametrize("check", ["Liger", "bitsandbytes", "CPU Adam", "NVMe I/O"])
def test_what_only_some_settings_need_is_a_warning(check: str) -> None:
    found = node.without_optional(stops(check, "failed", "Reinstall it."))
    assert found.verdict is Verdict.WARNING
    assert found.advice.startswith("Only ") and found.advice.endswith("Reinstall it.")
    for finding in (stops("CUDA", "a", "b"), ok(check, "a"), not_checked(check, "a")):
        assert node.without_optional(finding) == finding


class Recorded:
    """A check that ends at once."""

    started: list[str]

    def __init__(self, name: str, *_: object) -> None:
        self.name = name
        self.started.append(name)

    def result(self, seconds: float) -> KernelResult:
        facts = NodeFacts(gpu_name="NVIDIA H100 80GB HBM3", gpu_memory_gib=79.1) if self.name == "CUDA" else NodeFacts()
        return KernelResult(findings=[ok(self.name, "fine")], facts=facts)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DoctorDir:
    """A node with two recorded GPUs, one rank and nvme_path."""
    install_programs(tmp_path / "bin", monkeypatch, {"nvidia-smi": nvidia_smi(ROWS, smi_xml({}, {}))})
    folder = DoctorDir(tmp_path / "doctor")
    folder.shared.mkdir(parents=True)
    folders = dict.fromkeys(("nvme_path", "scratch", "cache"), str(tmp_path))
    cluster = make_cluster(accelerator="h100", processes_per_node=2, **folders)
    make_request(cluster, 1, build_kernels=True).write(folder.request)
    monkeypatch.setattr(Recorded, "started", [], raising=False)
    monkeypatch.setattr(node.kernels, "RunningCheck", Recorded)
    measured = network.Bandwidths(backend="nccl", size=1, intra=300.0, inter=None)
    monkeypatch.setattr(network, "run_ranks", lambda *_: ([ok("all-reduce in the node", "300 GB/s")], measured))
    return folder


def test_a_gpu_node_runs_every_check_and_starts_builds_first(folder: DoctorDir) -> None:
    node.check_node(folder, 0)
    report = NodeReport.read(folder.report(0))
    assert Recorded.started == [*BUILDS, *ON_GPU]
    expected = {"driver", "GPUs", "memory errors", "scratch", "compilers", "locked memory", *ON_GPU, *BUILDS}
    assert expected <= {finding.check for finding in report.findings}
    assert all(finding.nodes == (report.host,) for finding in report.findings)
    facts = report.facts
    assert (facts.gpu_name, facts.gpu_memory_gib, facts.intra_gbps) == ("NVIDIA H100 80GB HBM3", 79.1, 300.0)


def test_a_node_whose_check_fails_still_reports(folder: DoctorDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.kernels, "RunningCheck", Mock(side_effect=RuntimeError("a bug")))
    node.check_node(folder, 0)
    findings = NodeReport.read(folder.report(0)).findings
    assert findings[0].check == "files of other nodes", "what was found before is kept"
    assert findings[-1].verdict is Verdict.NOT_CHECKED and "a bug" in findings[-1].found

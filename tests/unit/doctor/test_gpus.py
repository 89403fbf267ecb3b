"""Every verdict about GPUs, from the XML of nvidia-smi."""

from pathlib import Path

import pytest

from shardmake.launch.gpus import check_nvidia_smi, check_states, parse_states, query_states
from shardmake.run.findings import Finding, Verdict
from tests.programs import install_programs
from tests.unit.doctor.recorded import CONSUMER, nvidia_smi, smi_xml

OK, WARNING, STOPS, NOT_CHECKED = Verdict.OK, Verdict.WARNING, Verdict.STOPS, Verdict.NOT_CHECKED
ROWS = "".join(f"{n}, GPU-{n}, 1, 0, 580.65.06, 9.0\n" for n in range(2))


def found(*gpus: dict[str, str], ranks: int = 2) -> dict[str, Finding]:
    return {row.check: row for row in check_states(parse_states(smi_xml(*gpus)), ranks)}


def test_healthy_gpus_are_ok() -> None:
    rows = found({}, {})
    assert {row.verdict for row in rows.values()} == {OK} and rows["GPU model"].found == "NVIDIA H100 80GB HBM3"
    assert rows["slowdown"].found == "nothing on 2 GPUs", "a software limit by heat is normal under load"


@pytest.mark.parametrize(("gpu", "check", "verdict", "words"), [
    ({"mode": "Prohibited"}, "compute mode", STOPS, "GPU 1: no program"),
    ({"mode": "Exclusive_Process"}, "exclusive mode", WARNING, "one process at a time"),
    ({"mig": "Enabled"}, "MIG", STOPS, "enabled"),
    ({"persistence": "Disabled"}, "persistence mode", WARNING, "start slowly"),
    ({"errors": "2"}, "memory errors", STOPS, "uncorrected ECC errors"),
    ({"failure": "Yes"}, "row remapping", STOPS, "must be replaced"),
    ({"pending": "Yes"}, "pending remapping", WARNING, "reset"),
    ({"slowdown": "Active"}, "slowdown", WARNING, "by the hardware"),
    ({"width": "8x"}, "PCIe width", WARNING, "fewer lanes"),
    ({"fabric": "In Progress", "status": "N/A"}, "fabric manager", STOPS, "In Progress"),
    ({"fabric": "Completed", "status": "Insufficient Resources"}, "fabric manager", STOPS, "Insufficient"),
])  # fmt: skip
def test_a_defect_of_one_gpu_is_named(gpu: dict[str, str], check: str, verdict: Verdict, words: str) -> None:
    row = found({}, gpu)[check]
    assert row.verdict is verdict and words in row.found and row.advice


def test_what_a_driver_does_not_report_is_not_ok() -> None:
    rows = found(CONSUMER)
    silent = {name for name, row in rows.items() if row.verdict is NOT_CHECKED}
    of_servers = {"persistence mode", "memory errors", "row remapping", "pending remapping", "fabric manager"}
    assert silent == {"MIG", *of_servers}


def test_a_mig_slice_different_gpus_and_throttle_reasons_of_older_drivers() -> None:
    assert found({"mig": "Enabled"}, ranks=1)["MIG"].verdict is WARNING
    assert found({}, {"name": "NVIDIA A100-SXM4-80GB"})["GPU model"].verdict is WARNING
    old = smi_xml({"slowdown": "Active"}).replace("clocks_event_reason", "clocks_throttle_reason")
    assert parse_states(old)[0].slowdown == "yes"


def test_a_node_with_recorded_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_programs(tmp_path / "bin", monkeypatch, {"nvidia-smi": nvidia_smi(ROWS, smi_xml({}, {}))})
    rows = list(check_nvidia_smi("0,1", 2, "13.0"))
    assert {row.verdict for row in rows} == {OK} and rows[0].found == "driver 580, torch for CUDA 13.0"
    few = list(check_nvidia_smi("0", 2, "13.0"))
    assert any(row.verdict is STOPS and "1 GPUs are visible, and the plan needs 2" in row.found for row in few)
    old = list(check_nvidia_smi("0,1", 2, None))
    assert old[0].verdict is STOPS and "without CUDA" in old[0].found


def test_gpus_of_other_jobs_on_the_node_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xml = smi_xml({}, {"mig": "Enabled", "errors": "2", "name": "NVIDIA A100-SXM4-80GB"})
    install_programs(tmp_path / "bin", monkeypatch, {"nvidia-smi": nvidia_smi(ROWS, xml)})
    rows = {row.check: row.verdict for row in check_nvidia_smi("0", 1, "13.0")}
    assert set(rows.values()) == {OK}
    (other,) = [row for row in check_nvidia_smi("1", 1, "13.0") if row.check == "memory errors"]
    assert other.found == "GPU 1: uncorrected ECC errors"
    of_slice = {row.check: row for row in check_nvidia_smi("MIG-5", 1, "13.0")}
    assert of_slice["MIG"].verdict is WARNING, "all GPUs of the node: a slice does not name its GPU"


@pytest.mark.parametrize("script", ["exit 9", "echo No devices were found", "echo '<nvidia_smi_log>'"])
def test_a_missing_or_silent_nvidia_smi_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    install_programs(tmp_path / "bin", monkeypatch, {"nvidia-smi": script})
    assert query_states() is None
    install_programs(tmp_path / "bin", monkeypatch, {"nvidia-smi": nvidia_smi(ROWS, "")})
    assert list(check_nvidia_smi("0,1", 2, "13.0"))[-1].verdict is NOT_CHECKED
    monkeypatch.setenv("PATH", str(tmp_path))
    (row,) = check_nvidia_smi(None, 2, "13.0")
    assert row.verdict is STOPS and "gpu_request" in row.advice and query_states() is None

"""Every verdict about a login node, from recorded answers of Slurm's programs."""

import fcntl
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.config.models import Slurm
from shardmake.core import private_names
from shardmake.core.disk import FreeSpace
from shardmake.core.units import GIB
from shardmake.doctor import login
from shardmake.launch.gpu_status import GpuStatus
from shardmake.run.findings import Finding, Verdict, run_checks, would_stop
from tests.programs import install_programs
from tests.unit.doctor.recorded import CLOSED, NO_ACCOUNTING, NO_DATABASE, SINFO, slurm_programs
from tests.unit.plans import make_cluster

OK, WARNING, STOPS, NOT_CHECKED = Verdict.OK, Verdict.WARNING, Verdict.STOPS, Verdict.NOT_CHECKED


def checked(slurm: dict[str, str] | None, folder: Path) -> list[Finding]:
    cluster = None if slurm is None else make_cluster(executor="slurm", slurm=slurm)
    return run_checks(login.login_checks(cluster, cluster.slurm if cluster else Slurm(), folder))


def verdicts(findings: list[Finding]) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in findings}


def test_a_cluster_that_answers_has_nothing_that_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_programs(tmp_path / "bin", monkeypatch, slurm_programs())
    found = checked({"partition": "gpu", "account": "lab-nlp", "qos": "long"}, tmp_path)
    assert not would_stop(found)
    by_name = {finding.check: finding for finding in found}
    assert by_name["Slurm"].found == "slurm 23.11.4 answers"
    assert by_name["accounts"].found == "you may use lab-nlp, lab-vision"
    assert by_name["qos"].found == "you may use debug, long, normal" and by_name["sacct"].verdict is OK
    gpu = by_name["partition gpu"].found
    assert "16 nodes with 8 h100 (gpu_type: h100), 96 cores, 1006 GiB, features h100,ib" in gpu
    assert "8 nodes with 4 v100" in gpu and "at most 48 h" in gpu and "allocated/idle/other/total 20/3/1/24" in gpu
    assert "partition cpu (default)" in by_name


GONE = "echo 'slurm_load_partitions: Connection refused' >&2; exit 1"
NO_CONTROLLER = "echo 'slurm_ping: error: Unable to contact slurm controller' >&2; exit 1"
NAMED = {"account": "lab-nlp"}


@pytest.mark.parametrize(("programs", "slurm", "check", "verdict", "words"), [
    ({"scontrol": NO_CONTROLLER}, None, "Slurm", STOPS, "Unable to contact"),
    ({"sacct": NO_DATABASE}, None, "sacct", WARNING, "accounting storage is disabled"),
    ({"sacctmgr": CLOSED}, None, "accounts", NOT_CHECKED, "permission denied"),
    (slurm_programs(config=NO_ACCOUNTING), None, "accounts", OK, "neither an account nor a qos"),
    (slurm_programs(associations=""), None, "accounts", STOPS, "no account of yours"),
    (slurm_programs(config="", associations=""), None, "accounts", NOT_CHECKED, "no account of yours"),
    (slurm_programs(associations="lab-nlp|normal\n"), None, "accounts", OK, "you may use lab-nlp"),
    ({}, None, "accounts", WARNING, "you may use lab-nlp, lab-vision"),
    ({"sinfo": GONE}, None, "partitions", STOPS, "Connection refused"),
    (slurm_programs(states="gpu|drain|0/0/24/24\n"), None, "partition gpu", WARNING, "its state is drain"),
    (slurm_programs(states=""), None, "partition gpu", OK, "16 nodes"),
    ({}, {"account": "lab-npl"}, "accounts", STOPS, "Did you mean 'lab-nlp'?"),
    ({}, NAMED | {"qos": "lang"}, "qos", STOPS, "Did you mean 'long'?"),
    ({}, {"partition": "gpus"}, "partitions", STOPS, "Did you mean 'gpu'?"),
])  # fmt: skip
def test_answers_of_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], slurm: dict[str, str] | None,
    check: str, verdict: Verdict, words: str,
) -> None:  # fmt: skip
    """Also about names in the cluster file that Slurm does not have."""
    install_programs(tmp_path / "bin", monkeypatch, slurm_programs() | programs)
    (row,) = [finding for finding in checked(slurm, tmp_path) if finding.check == check]
    assert row.verdict is verdict and words in (row.advice if slurm else row.found)
    assert row.verdict is OK or row.advice


def test_hidden_partitions_and_the_account_of_the_shell_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the plan and in the jobs."""
    programs, everything = slurm_programs(), slurm_programs(sinfo=SINFO.replace("cpu*|", "secret|"))["sinfo"]
    sinfo = f'case "$*" in *--all*) {everything}\n;; *) {programs["sinfo"]}\n;; esac'
    install_programs(tmp_path / "bin", monkeypatch, programs | {"sinfo": sinfo})
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab-nlp")
    found = verdicts(checked({"partition": "gpu,secret"}, tmp_path))
    assert "partitions" not in found and "partition secret" not in found and found["accounts"] is OK


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = login.check_slurm()
    assert found.verdict is STOPS and "not installed" in found.found and "login node" in found.advice


def test_a_local_executor_needs_no_slurm(tmp_path: Path) -> None:
    assert {"Slurm", "sacct"} & set(login.login_checks(make_cluster(), Slurm(), tmp_path)) == set()


def test_a_shared_folder_on_a_local_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "mount_of", lambda folder, mounts: ("/dev/sda1", "/", "ext4"))
    assert verdicts(list(login.check_shared_folder(tmp_path, on_slurm=True)))["shared folder"] is WARNING
    assert verdicts(list(login.check_shared_folder(tmp_path, on_slurm=False)))["shared folder"] is OK
    monkeypatch.setattr(login, "mount_of", lambda folder, mounts: ("nas:/home", "/home", "nfs4"))
    assert verdicts(list(login.check_shared_folder(tmp_path, on_slurm=True)))["shared folder"] is OK
    (gone,) = login.check_shared_folder(tmp_path / "missing", on_slurm=True)
    assert gone.verdict is STOPS


def test_locks_of_a_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert login.check_lock(tmp_path).verdict is OK
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)
    assert login.check_lock(tmp_path).verdict is WARNING
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(38, "Function not implemented")))
    found = login.check_lock(tmp_path)
    assert found.verdict is STOPS and "-o flock" in found.advice


def test_little_free_space_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = FreeSpace(4 * GIB, "your quota on /home", 4000, "your quota on /home")
    monkeypatch.setattr(login, "free_space", lambda folder: little)
    found = verdicts(list(login.check_shared_folder(tmp_path, on_slurm=True)))
    assert found["free space"] is found["free files"] is WARNING
    cache = login.check_cache(make_cluster(cache=str(tmp_path)))
    assert cache.verdict is WARNING and "4.0 GiB (your quota on /home)" in cache.found
    monkeypatch.setattr(login, "free_space", lambda folder: FreeSpace(4000 * GIB, "free on the file system"))
    cache = login.check_cache(make_cluster(cache=str(tmp_path)))
    assert cache.verdict is OK


def test_versions_against_those_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(names: Iterable[str]) -> dict[str, str | None]:
        return dict.fromkeys(names, "0.1") | {"torch": "99.1", "deepspeed": None}

    monkeypatch.setattr(login, "installed_versions", installed)
    monkeypatch.setattr(private_names, "installed_versions", installed)
    found = verdicts(list(login.check_versions()))
    assert (found["peft"], found["deepspeed"], found["versions"]) == (OK, STOPS, WARNING)


H100 = [GpuStatus("0", "GPU-0", 0, 0, 580, 9.0)]
OLD = [GpuStatus("0", "GPU-0", 0, 0, 550, 8.0)]


@pytest.mark.parametrize(("accelerator", "cuda", "gpus", "verdict"), [
    ("h100", None, None, STOPS), ("cpu", None, None, OK), ("cpu", None, H100, STOPS),
    ("h100", "13.0", None, NOT_CHECKED), ("h100", "13.0", H100, OK), ("a100-80gb", "13.0", OLD, STOPS),
])  # fmt: skip
def test_the_build_of_torch_against_file_and_driver(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, cuda: str | None, gpus: list[GpuStatus] | None, verdict: Verdict
) -> None:
    monkeypatch.setattr(login, "installed_cuda", lambda: cuda)
    monkeypatch.setattr(login, "list_gpus", lambda: gpus)
    (found,) = login.check_torch(make_cluster(accelerator=accelerator))
    assert found.verdict is verdict

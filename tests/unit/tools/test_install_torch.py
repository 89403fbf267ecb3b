"""The build of torch that ``make install`` chooses, without one too, and the versions of ``make test-versions``."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardmake.core.errors import ConfigError
from shardmake.launch.gpu_status import parse_gpus
from tools import install_torch
from tools.library_versions import other_pins, requirements

ROOT = Path(__file__).parents[3]
A100 = parse_gpus("0, GPU-0, 4, 0, 550.54.15, 8.0")
H100 = parse_gpus("0, GPU-0, 1, 0, 580.65.06, 9.0")
KEPLER = parse_gpus("0, GPU-0, 0, 0, 470.256.02, 3.7")


@pytest.mark.parametrize(("wanted", "gpus", "build"), [
    ("", None, None), ("", [], None), ("", A100, "cu126"), ("", H100, "cu130"), ("cu126", H100, "cu126"),
    ("cu130", A100, "cu130"),  # for other nodes than this one
    ("cpu", H100, "cpu"),
])  # fmt: skip
def test_the_user_or_the_driver_chooses_the_build(wanted: str, gpus: list | None, build: str | None) -> None:
    assert install_torch.choose_build(wanted, gpus, "2.13.0") == build


@pytest.mark.parametrize(("wanted", "gpus", "words"), [
    ("rocm", None, "does not support AMD GPUs"),
    ("cu128", None, r"torch 2\.13\.0 has no stable build of this name\. Use cu130 \(driver 580 or newer\), cu126"),
    ("12.6", None, "Cannot install for CUDA=12.6"),
    ("", KEPLER, r"the NVIDIA driver is 470, and torch for CUDA 12\.6 needs 525 or newer.* Update the driver"),
])  # fmt: skip
def test_a_build_that_cannot_be_installed_is_refused(wanted: str, gpus: list | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        install_torch.choose_build(wanted, gpus, "2.13.0")


def test_the_package_index_has_one_build_without_a_suffix() -> None:
    assert install_torch.requirements("cu126", "2.13.0") == ["torch==2.13.0+cu126"]
    # "===" because "==" would also take another build that a configured index has.
    assert install_torch.requirements("cu130", "2.13.0") == ["torch==2.13.0+cu130", "torch===2.13.0"]
    assert install_torch.requirements(None, "2.13.0") == ["torch==2.13.0"]


def test_pip_without_the_build_answers_other_failures_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # constraints of this machine would change pip's words
    empty = ["--dry-run", "--no-deps", "--no-index", f"--find-links={tmp_path}"]
    assert not install_torch.run_pip("torch==2.13.0+cu999", empty)
    with pytest.raises(ConfigError, match=r"Cannot install torch==1\. pip failed:\n(.|\n)*no such option: --wrong"):
        install_torch.run_pip("torch==1", ["--wrong"])


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """Record what pip is asked for; it finds everything but builds for CUDA 12.6."""
    calls: list[tuple[str, tuple[str, ...]]] = []

    def run(requirement: str, options: Sequence[str] = ()) -> bool:
        calls.append((requirement, tuple(options)))
        return "cu126" not in requirement

    monkeypatch.setattr(install_torch, "run_pip", run)
    monkeypatch.setattr(install_torch, "list_gpus", lambda: None)
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    return calls


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None, cuda: str | None) -> None:
    monkeypatch.setattr(install_torch, "installed_version", lambda: version)
    monkeypatch.setattr(install_torch, "installed_cuda", lambda: cuda)


def test_a_missing_build_says_where_its_index_stands(pip: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_INDEX", "file:///mirror/cu126")
    with pytest.raises(ConfigError, match=r"install page of pytorch\.org: make install CUDA=cu126 TORCH_INDEX=ADDRESS"):
        install_torch.main("cu126")
    assert [options for _, options in pip] == [("--extra-index-url", "file:///mirror/cu126")]


def test_another_build_than_requested_is_refused(pip: list, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None, None)
    with pytest.raises(ConfigError, match="CUDA=cu130 was requested, and pip installed a build for the CPU"):
        install_torch.main("cu130")


def test_a_machine_without_a_driver_reads_which_driver_nodes_need(pip: list, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None, "13.0")
    line = install_torch.main("")
    assert "needs driver 580 or newer" in line and "make install CUDA=cu126 (driver 525 or newer)" in line
    assert [requirement for requirement, _ in pip] == [f"torch=={pinned()}"]


def test_an_installed_cuda_stays_until_another_one_is_named(pip: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_torch, "list_gpus", lambda: H100)
    installed(monkeypatch, pinned(), "12.6")
    assert "for CUDA 12.6" in install_torch.main("") and pip == []
    installed(monkeypatch, pinned(), "13.0")
    install_torch.main("cu130")
    assert [requirement for requirement, _ in pip] == [f"torch=={pinned()}+cu130"]


@pytest.mark.parametrize(("cuda", "extras"), [("13.0", "[gpu]"), (None, "")])
def test_packages_for_gpus_come_with_cuda(cuda: str | None, extras: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, pinned(), cuda)
    assert install_torch.extras() == extras


def pinned() -> str:
    return install_torch.pinned_version((ROOT / "constraints.txt").read_text())


def test_make_hands_the_build_on_and_installs_again_for_another_one() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA", "MAKEFLAGS")}
    done = subprocess.run(
        ["make", "-n", "install", "CUDA=cu126"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "-m tools.install_torch cu126\n" in done.stdout and "-c constraints.txt" in done.stdout
    # A folder, which modules set, is not the name of a build and installs nothing again.
    dry_run = ["make", "-n", "install"]
    folder = {**environment, "CUDA": "/usr/local/cuda-12.6"}
    for variables in (folder, environment):
        done = subprocess.run(dry_run, cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
        assert "/usr/local" not in done.stdout and "install_torch cu" not in done.stdout


def test_every_package_for_gpus_is_pinned() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    pins = (ROOT / "constraints.txt").read_text()
    assert extras and all(f"\n{name.partition('>')[0]}==" in pins for name in extras)


def test_it_runs_before_any_package_is_installed() -> None:
    """``-S`` leaves out the packages of the environment."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    subprocess.run([sys.executable, "-S", "-c", "import tools.install_torch"], env={"PYTHONPATH": path}, check=True)


def test_a_python_in_a_closed_home_is_named(tmp_path: Path) -> None:
    python = tmp_path / "home/versions/python3"
    python.parent.mkdir(parents=True)
    python.touch()
    python.parents[1].chmod(0o750)
    warning = install_torch.private_python(python)
    assert warning and "which is closed to them. To share it" in warning
    assert install_torch.private_python(Path("/usr/bin/env")) is None


def test_oldest_and_newest_are_those_of_the_supported_range() -> None:
    oldest = requirements(["oldest"])
    assert {"torch==2.11.*", "typer==0.24.*"} <= set(oldest)
    assert all("." in text.partition("==")[2].removesuffix(".*") for text in oldest), "5.* is not the oldest 5"
    assert {"torch>=2.11", "snakemake<10,>=9.27"} <= set(requirements(["newest"]))
    assert requirements(["torch==2.12.1", "peft==0.22"]) == ["torch==2.12.1", "peft==0.22"]


def test_the_other_libraries_keep_their_pins() -> None:
    pins = [line.partition("==")[0] for line in other_pins(install_torch.CONSTRAINTS.read_text(), ["torch==2.11.*"])]
    assert {"sympy", "transformers"} <= set(pins) and not {"torch", "triton"} & set(pins)

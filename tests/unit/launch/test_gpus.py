"""GPUs as nvidia-smi reports them on real nodes, builds of torch that cannot use them, and turns at them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardmake.core import process
from shardmake.launch import gpu_status
from shardmake.launch.gpu_status import GpuStatus, list_gpus, list_released_gpus, parse_gpus
from shardmake.launch.gpu_use import GpuSampler
from shardmake.launch.gpus import check_build, check_gpus, slow_gpus
from shardmake.run.attempt import GpuUse
from shardmake.run.findings import Finding
from shardmake.run.turns import VARIABLE, wait_for_turn
from tests.programs import install_programs

ROWS = "0, GPU-a, 3, 0\n1, GPU-b, 40960, 0\n2, GPU-c, 3, [N/A]\n3, GPU-d, 3, 2\n"


def texts(findings: list[Finding]) -> list[str]:
    return [finding.found for finding in findings]


UUID = "GPU-8f6d2a10-0000-4000-8000-000000000001"
FIRST_SLICE = "2 MIG slices are visible, but CUDA shows only the first: one rank per node works"
HEALTHY = "0, GPU-0, 1, 0, 580.65.06, 9.0"
SLICES = "MIG-3c1a0000-0000-4000-8000-000000000001,MIG-GPU-8f6d2a10-0000-4000-8000-000000000001/1/0"


@pytest.mark.parametrize(("rows", "visible", "planned", "words"), [
    (ROWS, "0,2", 2, []), (ROWS, "GPU-a,GPU-c", 2, []), (ROWS, "0", 2, ["1 GPUs are visible, and the plan needs 2"]),
    (ROWS, "0,1", 2, ["GPU 1 is in use: 40.0 GiB"]), (ROWS, "0,3", 2, ["GPU 3 has 2 uncorrected memory errors"]),
    (ROWS, None, 4, ["GPU 1 is in use: 40.0 GiB", "GPU 3 has 2 uncorrected memory errors"]),
    (f"0, {UUID}, [Insufficient Permissions], [N/A]", None, 1, []), (f"0, {UUID}, 3, 0", "GPU-8f6d2a10", 1, []),
    (f"0, {UUID}, 3, 0", "GPU-8f6d2a11", 1, ["0 GPUs are visible, and the plan needs 1"]),
    (f"0, {UUID}, [N/A], [N/A]", SLICES, 1, []), (f"0, {UUID}, [N/A], [N/A]", SLICES, 2, [FIRST_SLICE]),
    (f"0, {UUID}, [N/A], [N/A]", SLICES, 3, ["2 GPUs are visible, and the plan needs 3", FIRST_SLICE]),
    (f"0, {UUID}, 3, 0", "", 1, ["0 GPUs are visible, and the plan needs 1"]),
    (f"{HEALTHY}, Default, Not Active, 16, 16", None, 1, []),
    (f"{HEALTHY}, Exclusive_Process, Not Active, 16, 16", None, 1, []),
    (f"{HEALTHY}, Prohibited, Not Active, 16, 16", None, 1, ["GPU 0 is in the compute mode Prohibited, in which no program can use it"]),
    (f"{HEALTHY}, Default, Active, 8, 16", None, 1, []), (f"0, GPU-0{', [N/A]' * 8}", None, 1, []),
])  # fmt: skip
def test_gpus_must_be_present_idle_and_healthy(rows: str, visible: str | None, planned: int, words: list[str]) -> None:
    assert texts(check_gpus(parse_gpus(rows), visible, planned)) == words


def test_slow_gpus_are_named_and_the_installed_cuda_is_torchs() -> None:
    slow = ["the hardware slows GPU 0 down because of heat or power", "GPU 0 uses 8 of its 16 PCIe lanes"]
    assert texts(slow_gpus(parse_gpus(f"{HEALTHY}, Default, Active, 8, 16"))) == slow
    for row in (f"{HEALTHY}, Prohibited, Not Active, 16, 16", f"0, GPU-0{', [N/A]' * 8}"):
        assert texts(slow_gpus(parse_gpus(row))) == []
    assert gpu_status.installed_cuda() == torch.version.cuda


RECORDED = {
    "8 A100": "".join(f"{n}, GPU-{n}, 4, 0, 550.54.15, 8.0\n" for n in range(8)),
    "8 H100": "".join(f"{n}, GPU-{n}, 1, 0, 580.65.06, 9.0\n" for n in range(8)),
    "V100": "0, GPU-0, 0, 0, 535.183.01, 7.0\n", "B200": "0, GPU-0, 0, 0, 580.65.06, 10.0\n",
    "B200, driver 570": "0, GPU-0, 0, 0, 570.124.06, 10.0\n", "RTX 4090": "0, GPU-0, 310, [N/A], 580.65.06, 8.9\n",
    "no rights": "0, GPU-0, [Insufficient Permissions], [N/A], [N/A], [N/A]\n",
    "old driver": "0, GPU-0, 0, 0, 470.256.02\n",
}  # fmt: skip


@pytest.mark.parametrize(("rows", "cuda", "words"), [
    ("8 H100", "13.0", None), ("8 A100", "12.8", None),
    ("8 A100", "13.0", "driver is 550, and torch for CUDA 13.0 needs 580 or newer: run make install CUDA=cu126"),
    ("old driver", "12.6", "needs 525 or newer: update the driver, because no build of torch runs on it"),
    ("V100", "12.6", None), ("V100", "13.0", "compute capability 7.0, and torch for CUDA 13.0 starts at 7.5"),
    ("B200", "12.6", "capability 10.0, and torch for CUDA 12.6 has no code for it: run make install CUDA=cu130"),
    ("B200", "12.8", None), ("RTX 4090", "13.0", None), ("no rights", "13.0", None),
    ("8 H100", None, "torch is a build without CUDA: run make install CUDA=cu130"),
])  # fmt: skip
def test_a_build_that_cannot_use_the_gpus_is_a_finding(rows: str, cuda: str | None, words: str | None) -> None:
    findings = check_build(parse_gpus(RECORDED[rows]), cuda)
    assert len(findings) == (words is not None), "equal GPUs are one finding"
    assert words is None or words in findings[0].found


@pytest.mark.parametrize(("rows", "build"), [
    ("8 H100", "cu130"), ("8 A100", "cu126"), ("V100", "cu126"), ("B200", "cu130"), ("old driver", None),
    ("no rights", "cu130"), ("B200, driver 570", None),
])  # fmt: skip
def test_the_newest_build_that_the_driver_and_the_gpus_can_run(rows: str, build: str | None) -> None:
    """The builds for CUDA 12.8, which ran Blackwell on driver 570, ended with torch 2.11."""
    assert gpu_status.newest_build(parse_gpus(RECORDED[rows])) == build


Smi = Callable[[str], None]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Return a function that installs a script of this name; each call writes a line into the file ``calls``."""
    monkeypatch.setenv("PATH", str(tmp_path))
    counted = f"echo >> {tmp_path}/calls\n"
    return lambda script: install_programs(tmp_path, monkeypatch, {"nvidia-smi": counted + script})


NO_CAPABILITY = 'case "$*" in *compute_cap*) echo "Field compute_cap is not a valid field to query."; exit 2;; esac'


@pytest.mark.parametrize(("script", "number", "last"), [
    (f"cat <<'END'\n{RECORDED['8 H100']}END", 8, GpuStatus("7", "GPU-7", 1 << 20, 0, 580, 9.0)),
    (f"{NO_CAPABILITY}\necho '0, GPU-0, 0, 0, 470.256.02'", 1, GpuStatus("0", "GPU-0", 0, 0, 470, None)),
    ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18", 0, None), (None, 0, None),
], ids=["8-h100", "older-driver", "failing", "missing"])  # fmt: skip
def test_gpus_are_listed(nvidia_smi: Smi, script: str | None, number: int, last: GpuStatus | None) -> None:
    if script is not None:
        nvidia_smi(script)
    gpus = list_gpus()
    assert (len(gpus), gpus[-1]) == (number, last) if gpus else last is None


def test_a_gpu_that_is_released_is_waited_for(nvidia_smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = HEALTHY.replace(" 1, 0", " 71680, 0")
    nvidia_smi(f"if [ $(wc -l < {tmp_path}/calls) -lt 3 ]; then echo '{busy}'; else echo '{HEALTHY}'; fi")
    monkeypatch.setattr(gpu_status, "_RELEASE_POLL_SECONDS", 0.0)
    assert texts(check_gpus(list_released_gpus(None), None, 1)) == []
    nvidia_smi(f"echo '{busy}'")
    assert list_released_gpus("GPU-1") == parse_gpus(busy), "a GPU of another job"
    monkeypatch.setattr(gpu_status, "_RELEASE_SECONDS", 0.2)
    assert texts(check_gpus(list_released_gpus(None), None, 1)) == ["GPU 0 is in use: 70.0 GiB"]


def test_the_use_of_the_visible_gpus_is_sampled_until_the_ranks_end(nvidia_smi: Smi) -> None:
    state = "1, 0, 580.65.06, 9.0, Default, Not Active, 16, 16, 81559"
    rows = f"0, GPU-0, {state}, 100, 99.5\n1, GPU-1, {state}, 90, 412.5\n2, GPU-2, {state}, [N/A], 1\n3, GPU-3, {state}, 0, [N/A]"
    nvidia_smi(f"cat <<'END'\n{rows}\nEND")
    sampler = GpuSampler("1,2,3", seconds=0.01)
    sampler.start()
    while not (means := sampler.means()):
        assert sampler.is_alive()
    sampler.ended.set()
    sampler.join()
    assert means == [GpuUse(number="1", percent=90, watts=412.5), GpuUse(number="3", percent=0, watts=None)]


def test_a_hanging_nvidia_smi_is_asked_once(nvidia_smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi("exec sleep 60")
    monkeypatch.setattr(process, "SECONDS", 0.5)
    assert list_gpus() is None
    assert (tmp_path / "calls").read_text() == "\n"


def test_a_rank_waits_for_the_file_of_its_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings that take turns may find the GPUs in use."""
    wait_for_turn("demo-001")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "demo-001.go").touch()
    beats: list[None] = []
    thread = threading.Thread(target=wait_for_turn, args=("demo-002", 1, lambda: beats.append(None)))
    thread.start()
    while not (tmp_path / "demo-002.1.waiting").exists() or len(beats) < 2:
        assert thread.is_alive()
    (tmp_path / "demo-002.go").touch()
    thread.join(10)
    assert not thread.is_alive()
    assert check_gpus(parse_gpus(ROWS), "0,1", 2) == []

"""Verdicts about CUDA, kernels and processes that crash or hang."""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from shardmake.doctor import kernels
from shardmake.doctor.job import make_request
from shardmake.launch.gpus import accelerator_of
from shardmake.run.findings import Finding, Verdict
from tests.programs import install_programs
from tests.unit.plans import make_cluster

Patch = pytest.MonkeyPatch

OK, WARNING, STOPS, NOT_CHECKED = Verdict.OK, Verdict.WARNING, Verdict.STOPS, Verdict.NOT_CHECKED
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(("name", "memory", "accelerator"), [
    ("NVIDIA H100 80GB HBM3", 79.1, "h100"), ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
    ("NVIDIA H100 NVL", 93.1, "h100-nvl"), ("NVIDIA H200", 139.8, "h200"), ("NVIDIA GH200 480GB", 94.5, "gh200"),
    ("NVIDIA B200", 178.3, "b200"), ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
    ("NVIDIA A100-SXM4-80GB", 79.1, "a100-80gb"), ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40gb"),
    ("NVIDIA A100 80GB PCIe", 79.1, "a100-80gb"), ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, None),
    ("Tesla V100-SXM2-16GB", 15.8, "v100-16gb"), ("Tesla V100S-PCIE-32GB", 31.7, "v100-32gb"), ("Tesla T4", 14.6, "t4"),
    ("NVIDIA A10G", 22.0, "a10"), ("NVIDIA L4", 22.0, "l4"), ("NVIDIA L40", 44.4, "l40"), ("NVIDIA L40S", 44.4, "l40s"),
    ("NVIDIA RTX A6000", 47.5, "rtx-a6000"), ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx6000-ada"),
    ("NVIDIA GeForce RTX 3090", 23.6, "rtx3090"), ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090"),
    ("NVIDIA GeForce RTX 5090", 31.4, "rtx5090"), ("NVIDIA GeForce RTX 2080 Ti", 10.7, "rtx2080ti"),
    ("NVIDIA GeForce RTX 3060", 11.6, None), ("AMD Instinct MI300X", 191.0, None),
])  # fmt: skip
def test_the_drivers_name_becomes_the_catalogues(name: str, memory: float, accelerator: str | None) -> None:
    assert accelerator_of(name, memory) == accelerator


@pytest.mark.parametrize(("capability", "built", "verdict"), [
    ((9, 0), CU130, OK), ((8, 9), CU130, OK), ((7, 0), CU130, STOPS), ((12, 0), ["sm_80", "sm_90"], STOPS),
    ((12, 0), ["sm_80", "sm_90", "compute_90"], OK), ((9, 0), ["sm_80", "sm_90a"], OK), ((7, 0), [], STOPS),
])  # fmt: skip
def test_code_for_an_architecture(capability: tuple[int, int], built: list[str], verdict: Verdict) -> None:
    found = kernels.judge_architecture({capability}, built)
    assert found.verdict is verdict
    assert verdict is OK or f"sm_{capability[0]}{capability[1]}" in found.found


@pytest.mark.parametrize(("judge", "rate", "accelerator", "verdict"), [
    (kernels.judge_matmul, 700, "h100", OK), (kernels.judge_matmul, 400, "h100", WARNING),
    (kernels.judge_matmul, 250, "a100-80gb", OK), (kernels.judge_matmul, 90, "v100-16gb", OK),
    (kernels.judge_matmul, 100, None, NOT_CHECKED), (kernels.judge_copy, 52.0, "h100", OK),
    (kernels.judge_copy, 12.0, "h100", WARNING), (kernels.judge_copy, 22.0, "a100-80gb", OK),
    (kernels.judge_copy, 20.0, None, NOT_CHECKED),
])  # fmt: skip
def test_a_matrix_product_and_a_copy_against_the_peak_and_the_link(
    judge: Callable[[float, str | None], Finding], rate: float, accelerator: str | None, verdict: Verdict
) -> None:
    found = judge(rate, accelerator)
    assert found.verdict is verdict and found.found.startswith(f"{rate} ")


def test_peers_number_of_gpus_and_errors_of_a_kernel() -> None:
    assert kernels.judge_peers({}).verdict is NOT_CHECKED
    assert kernels.judge_peers({(0, 1): True, (1, 0): True}).verdict is OK
    found = kernels.judge_peers({(0, 1): False, (1, 0): True})
    assert found.verdict is WARNING and "1 of 2 pairs lack it: 0-1" in found.found
    assert kernels.judge_count(8, 8).verdict is OK and kernels.judge_count(1, 8).verdict is STOPS
    for error, verdict in ((0.004, OK), (0.5, STOPS), (float("nan"), STOPS)):
        assert kernels.judge_error("varlen attention", error, "output", "Use sdpa.").verdict is verdict


@pytest.fixture
def on_cpu(monkeypatch: Patch) -> None:
    """Run what needs a GPU on the CPU; the kernels of GPUs themselves cannot run here."""
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "MATRIX", 64)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def sdpa(*heads: torch.Tensor, starts: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """Return torch's attention of query, key and value within each sequence."""
    parts = [[tensor[first:end].transpose(0, 1)[None] for tensor in heads] for first, end in pairwise(starts.tolist())]
    outputs = [torch.nn.functional.scaled_dot_product_attention(*part, is_causal=causal) for part in parts]
    return torch.cat([output[0].transpose(0, 1) for output in outputs])


@pytest.mark.usefixtures("on_cpu")
def test_an_attention_kernel_is_compared_with_its_gradients() -> None:
    """A kernel that attends to later tokens stops a run."""
    for causal, verdict in ((True, OK), (False, STOPS)):
        attend = lambda *heads, c=causal: sdpa(*heads[:3], starts=heads[3], causal=c)  # noqa: E731
        assert kernels._compare_attention("a kernel", attend).verdict is verdict
    assert kernels._matmul_rate() > 0, "a matrix product is timed"


@pytest.mark.parametrize(("capability", "checks"), [((7, 5), []), ((8, 0), ["varlen attention"])])
def test_gpus_before_ampere(monkeypatch: Patch, capability: tuple[int, int], checks: list[str]) -> None:
    compared: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(kernels, "_compare_attention", lambda name, _: compared.append(name) or kernels.ok(name, ""))
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    found = kernels.check_attention(make_request(make_cluster(), 1, build_kernels=False)).findings
    assert compared == checks and STOPS not in {row.verdict for row in found}
    assert checks or "compute capability 7.5" in found[0].found


@pytest.mark.parametrize("check", [kernels.check_liger, kernels.check_bitsandbytes])
def test_missing_packages_are_not_checked(monkeypatch: Patch, check: Callable[..., kernels.KernelResult]) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    (found,) = check(make_request(make_cluster(), 1, build_kernels=False)).findings
    assert found.verdict is NOT_CHECKED and "not installed" in found.found and "needed only for" in found.advice


def failing(tmp_path: Path, monkeypatch: Patch, program: str) -> kernels.RunningCheck:
    """Start a check whose process runs ``program`` in place of Python."""
    install_programs(tmp_path, monkeypatch, {"python": program})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return kernels.RunningCheck("CPU Adam", tmp_path / "request.json", tmp_path, tmp_path, {})


@pytest.mark.parametrize(("program", "found", "advice"), [
    ("echo Traceback; echo \"RuntimeError: Error building extension 'cpu_adam'\"; exit 1",
     "Error building extension 'cpu_adam'", "compiler with C++20"),
    ("echo 'RuntimeError: CUDA error: no kernel image is available for execution'; exit 1", "no kernel", "supports it"),
    ("echo 'Illegal instruction'; exit 132", "Illegal instruction", "cpu-adam.log has the whole output"),
    ("exit 3", "exit status 3", "cpu-adam.log"),
])  # fmt: skip
def test_crashed_checks(tmp_path: Path, monkeypatch: Patch, program: str, found: str, advice: str) -> None:
    (row,) = failing(tmp_path, monkeypatch, program).result(30).findings
    assert row.verdict is STOPS and found in row.found and advice in row.advice


def test_a_check_that_hangs_is_ended(tmp_path: Path, monkeypatch: Patch) -> None:
    check = failing(tmp_path, monkeypatch, "exec sleep 60")
    (row,) = check.result(0.3).findings
    assert row.verdict is STOPS and "did not end within" in row.found and check.process.wait(10) < 0
    assert not list(tmp_path.glob("shardmake-*_doctor-*")), "no folder of builds is left"


def test_a_result_is_read_back(tmp_path: Path, monkeypatch: Patch) -> None:
    result = kernels.KernelResult(findings=[kernels.judge_count(2, 2)])
    (tmp_path / "saved.json").write_text(result.model_dump_json())
    check = failing(tmp_path, monkeypatch, f'cp {tmp_path}/saved.json "$5"')
    assert check.result(30) == result

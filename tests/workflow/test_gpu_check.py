"""The checks of ``make gpu-check`` on the CPU: all but the GPUs themselves, with a smaller model and gloo."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmake.data.varlen import register_cpu_kernel
from tests.gpu import attention, checks, results
from tests.gpu import test_gpu as gpu
from tests.gpu.checks import Kit, Workload, program_of_each_process
from tests.gpu.machine import Machine
from tests.unit.data.test_varlen import plain_backward
from tests.workflow.checkout import REPOSITORY
from tests.workflow.test_local import SHORTAGE

pytestmark = pytest.mark.training
CPU = Machine(gpu="CPU of the test", accelerator="cpu", memory=1 << 30, ranks=2)
TINY = Workload(shape=None, sequence_length=64, micro_batch=2, steps=10, warm_up=2)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(CPU, tmp_path_factory.mktemp("kit"), TINY)


def test_strategies_are_compared_with_ddp(kit: Kit, tmp_path: Path) -> None:
    gpu.test_strategy(kit, "zero2")
    assert [one.strategy for one in kit.report.trained] == ["ddp", "zero2"]
    gpu.test_step_time(kit)
    with pytest.raises(AssertionError, match="without a measured peak"):
        gpu.test_memory(kit)
    written = results.write(kit.report, tmp_path)
    assert results.GpuReport.read(written) == kit.report
    assert written.name.startswith("cpu-of-the-test-x2-")
    assert str(kit.folder) not in written.read_text()
    assert "| 2 x CPU of the test |" in kit.report.row() and "| ddp, zero2 |" in kit.report.row()


@pytest.mark.faults  # test_resume.py kills ranks in CI; this one takes minutes
def test_a_killed_training_resumes(kit: Kit) -> None:
    gpu.test_kill_and_resume(kit)


@pytest.mark.faults  # test_local.py has a fallback that CI runs; this one takes minutes
def test_out_of_memory_takes_a_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised by a program here; on a GPU PyTorch's allocator gets a limit."""

    @contextmanager
    def simulated(machine: Machine, plan: Any, estimates: Any, root: Path) -> Iterator[dict[str, Any]]:
        assert checks.memory_limit(plan, estimates) > 0
        with program_of_each_process(root, SHORTAGE):
            yield {}

    monkeypatch.setattr(checks, "shortage", simulated)
    # Long enough for a fallback that recomputes activations.
    gpu.test_out_of_memory_fallback(Kit(CPU, tmp_path, replace(TINY, sequence_length=256, steps=4)))


def test_the_node_is_checked_and_its_all_reduce_is_measured(kit: Kit) -> None:
    gpu.test_node(kit)
    assert {finding.check for finding in kit.report.node} == {"GPUs", "all-reduce in the node"}


def test_attention_kernels_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has the kernel for GPUs only, so its reference takes its place here."""
    register_cpu_kernel()
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", plain_backward)
    errors = attention.attention_errors("cpu")
    assert 0 < errors.varlen <= gpu.ATTENTION * errors.eager < 0.1


def test_without_a_gpu_the_command_fails_with_a_sentence() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "make gpu-check found no GPU. It needs one that torch" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr and "skipped" not in done.stdout

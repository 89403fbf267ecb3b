"""The report of ``make gpu-check``, its row, and the choice of what it runs."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import STRATEGIES, Cluster
from shardmake.core.errors import ConfigError
from shardmake.core.units import GIB
from shardmake.run.findings import stops
from shardmake.run.plan import CandidateEstimate, Choice, Fallback, GpuEstimate, MemoryEstimates
from tests.gpu import checks, machine, results
from tests.gpu.machine import Machine, find_machine
from tests.gpu.results import AttentionErrors, GpuReport, Trained
from tests.unit.plans import make_plan
from tools import gpu_page

PAGE = (results.REPOSITORY / "docs/gpu.md").read_text()


def trained(strategy: str, offset: float, **changes: Any) -> Trained:
    values: dict[str, Any] = {
        "strategy": strategy,
        "precision": "bf16",
        "losses": {1: 8.0, 2: 7.0 + offset},
        "allocated": 4 * GIB,
        "reserved": 5 * GIB,
        "planned_allocated": 3 * GIB,
        "planned_reserved": 4 * GIB,
        "step_seconds": 0.2,
        "planned_step_seconds": 0.1,
    }
    return Trained(**values | changes)


def report() -> GpuReport:
    return GpuReport(
        time=1_800_000_000,
        gpu="NVIDIA A100-SXM4-80GB",
        accelerator="a100-80gb",
        memory_gib=79.1,
        ranks=2,
        driver=580,
        cuda="13.0",
        nccl="2.28",
        versions={"torch": "2.13.0+cu130", "deepspeed": "0.19.8"},
        outcomes={"strategy[ddp]": "passed", "memory": "failed", "attention": "skipped"},
        trained=[trained("ddp", 0.0), trained("zero2", -0.5, planned_allocated=5 * GIB, planned_step_seconds=0.3)],
        attention=AttentionErrors(varlen=0.01, eager=0.012),
        all_reduce_gbps=230.0,
    )


def test_the_row_has_a_cell_for_each_column_of_the_page() -> None:
    assert results.as_row(results.COLUMNS) in PAGE
    cells = [cell.strip() for cell in report().row().strip("|").split("|")]
    assert dict(zip(results.COLUMNS, cells, strict=True)) == {
        "date": "2027-01-15",
        "GPUs": "2 x NVIDIA A100-SXM4-80GB",
        "driver": "580, CUDA 13.0",
        "torch": "2.13.0+cu130",
        "DeepSpeed": "0.19.8",
        "strategies": "ddp, zero2",
        "loss differs by": "0.5000",
        "attention": "1.00% (eager 1.20%)",
        "memory error": "25.0%, worst -25.0%",
        "modelled / measured step": "1.00 (0.50 to 1.50)",
        "all-reduce": "230.0 GB/s",
        "failed": "memory",
    }


def test_a_report_of_checks_that_failed_early_has_a_row() -> None:
    early = report().model_copy(update={"trained": [], "attention": None, "all_reduce_gbps": None, "outcomes": {}})
    assert early.row().count(" - ") == 6 and early.row().endswith("| none |")


def test_the_json_file_is_named_after_gpu_number_and_time(tmp_path: Path) -> None:
    path = results.write(report(), tmp_path)
    assert path.name == "nvidia-a100-sxm4-80gb-x2-20270115-080000.json"
    assert GpuReport.read(path) == report()


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    """If this fails: python -m tools.gpu_page"""
    assert gpu_page.page(PAGE) == PAGE
    assert all(table in PAGE for table in results.tables())


def test_losses_are_compared_at_common_steps_of_equal_trainings() -> None:
    others = [
        trained("zero2", 0.1, losses={2: 7.1, 3: 1.0}),
        trained("ddp", 0.0, training="8B"),
        trained("fsdp", 2.0, training="8B"),
    ]
    row = report().model_copy(update={"trained": [trained("ddp", 0.0), *others[:2]]}).row()
    assert "| 0.1000 |" in row
    assert "| 2.0000 |" in report().model_copy(update={"trained": [trained("ddp", 0.0), *others]}).row()


def test_the_findings_in_the_report_have_no_paths_and_no_names_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu7")
    text = "ImportError: /home/ann/.venv/lib/x.so: undefined symbol on gpu7; 55.2 GB/s, 8192 x 8192"
    failed = stops("flash-attn", text, "/home/ann/kernels-0/flash-attn.log has the whole output.")
    kept = checks.without_places(failed.model_copy(update={"nodes": ("gpu7",)}))
    assert kept.found == "ImportError: PATH: undefined symbol on HOST; 55.2 GB/s, 8192 x 8192"
    assert (kept.nodes, kept.advice, kept.verdict) == ((), "", failed.verdict)


def test_losses_of_other_steps_differ_without_limit() -> None:
    assert trained("ddp", 0.0).loss_difference(trained("zero2", 0.0, losses={1: 8.0})) == float("inf")


def test_one_gpu_leaves_out_what_it_cannot_show() -> None:
    def left(ranks: int) -> list[str]:
        gpus = Machine(gpu="", accelerator="h100", memory=79 * GIB, ranks=ranks)
        return [strategy for strategy in STRATEGIES if not gpus.why_not(strategy)]

    assert left(1) == ["ddp", "zero1", "zero2", "zero3", "zero3-offload", "fsdp", "fsdp-offload"]
    assert set(STRATEGIES) - set(left(2)) == {"zero3-nvme", "zero3-hpz", "fsdp-hybrid"}


def probed(monkeypatch: pytest.MonkeyPatch, stdout: str, returncode: int = 0, stderr: str = "") -> None:
    done = subprocess.CompletedProcess([], returncode, stdout, stderr)
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(machine, "list_gpus", lambda: None)


def test_the_ranks_are_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    one = f'["NVIDIA H100 80GB HBM3", {79 * GIB}]'
    probed(monkeypatch, f'a warning\n{{"gpus": [{one}, {one}, {one}], "cuda": "13.0", "nccl": "2.28.9"}}\n')
    found = find_machine()
    assert (found.accelerator, found.ranks, found.nccl, found.precision) == ("h100", 2, "2.28.9", "bf16")
    assert found.cluster()["gpu_memory_gib"] == 79.0


@pytest.mark.parametrize(
    ("stdout", "returncode", "sentence"),
    [
        ('{"gpus": [], "cuda": null, "nccl": null}', 0, "found no GPU. It needs one that torch"),
        ("", 1, "cannot use the GPUs: RuntimeError: error 802. Run `shardmake doctor --node`"),
        ('{"gpus": [["NVIDIA X1", 1]], "cuda": "13.0", "nccl": ""}', 0, "does not know the GPU 'NVIDIA X1'"),
    ],
)
def test_a_machine_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, stdout: str, returncode: int, sentence: str
) -> None:
    probed(monkeypatch, stdout, returncode, "Traceback\nRuntimeError: error 802\n")
    with pytest.raises(ConfigError, match="make gpu-check") as error:
        find_machine()
    assert sentence in str(error.value)


def estimates(needs: dict[Choice, int]) -> MemoryEstimates:
    candidates = [
        CandidateEstimate.model_construct(choice=choice, gpu=GpuEstimate.model_construct(reserved=need))
        for choice, need in needs.items()
    ]
    return MemoryEstimates.model_construct(candidates=candidates)


def test_the_allocator_gets_more_than_the_last_fallback_needs(tmp_path: Path) -> None:
    plan = make_plan("ddp")
    smaller = plan.choice.model_copy(update={"micro_batch_size": 1})
    plan = plan.model_copy(update={"fallbacks": [Fallback(choice=smaller, host_memory=1, memory_gib=1)]})
    gpus = Machine(gpu="", accelerator="h100", memory=16 * GIB, ranks=1)
    with checks.shortage(gpus, plan, estimates({plan.choice: 6 * GIB, smaller: 2 * GIB}), tmp_path) as keys:
        cluster = Cluster(**gpus.cluster() | keys)
    assert cluster.variables == {"PYTORCH_ALLOC_CONF": "expandable_segments:True,per_process_memory_fraction:0.2500"}
    with pytest.raises(AssertionError, match="the fallbacks save too little"):
        checks.memory_limit(plan, estimates({plan.choice: 6 * GIB, smaller: 5 * GIB}))

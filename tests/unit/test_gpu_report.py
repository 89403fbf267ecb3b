"""The report of trainings on GPUs, its rows, the verdicts about them, and the machines and cases of the kit."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_kit import __main__ as kit
from benchmarks.gpu_kit import machine
from benchmarks.gpu_kit.cases import CASES, keys_of
from benchmarks.gpu_kit.drive import CaseError, memory_limit
from benchmarks.gpu_kit.machine import MACHINES, find_machine
from benchmarks.gpu_kit.prepare import CLUSTER, COMMIT
from shardmake.config.models import Run
from shardmake.core.atomic import write_json
from shardmake.core.errors import ConfigError
from shardmake.core.units import GIB
from shardmake.doctor.gpu_report import COLUMNS, AttentionErrors, GpuReport, Trained, as_row
from shardmake.doctor.trainings import judge
from shardmake.run.findings import Verdict
from shardmake.run.plan import CandidateEstimate, Choice, Fallback, GpuEstimate, MemoryEstimates
from tests.unit.plans import make_plan
from tools import gpu_page

Patch = pytest.MonkeyPatch

PAGE = gpu_page.PAGE.read_text()


def trained(strategy: str, offset: float, **changes: Any) -> Trained:
    values: dict[str, Any] = {
        "strategy": strategy, "precision": "bf16", "losses": {1: 8.0, 2: 7.0 + offset}, "allocated": 4 * GIB,
        "reserved": 5 * GIB, "planned_allocated": 3 * GIB, "planned_reserved": 4 * GIB, "step_seconds": 0.2,
        "planned_step_seconds": 0.1,
    }  # fmt: skip
    return Trained(**values | changes)


def report() -> GpuReport:
    return GpuReport(
        time=1_800_000_000, gpu="NVIDIA A100-SXM4-80GB", accelerator="a100-80gb", memory_gib=79.1, ranks=2, driver=580,
        cuda="13.0", nccl="2.28", versions={"torch": "2.13.0+cu130", "deepspeed": "0.19.8"},
        outcomes={"strategy[ddp]": "passed", "memory": "failed", "attention": "skipped"},
        trained=[trained("ddp", 0.0), trained("zero2", -0.5, planned_allocated=5 * GIB, planned_step_seconds=0.3)],
        attention=AttentionErrors(varlen=0.01, eager=0.012), all_reduce_gbps=230.0,
    )  # fmt: skip


def test_the_row_has_a_cell_for_each_column_of_the_page() -> None:
    assert as_row(COLUMNS) in PAGE
    cells = [cell.strip() for cell in report().row().strip("|").split("|")]
    assert dict(zip(COLUMNS, cells, strict=True)) == {
        "date": "2027-01-15", "GPUs": "2 x NVIDIA A100-SXM4-80GB", "driver": "580, CUDA 13.0", "torch": "2.13.0+cu130",
        "DeepSpeed": "0.19.8", "strategies": "ddp, zero2", "loss differs by": "0.5000",
        "attention": "1.00% (eager 1.20%)", "memory error": "25.0%, worst -25.0%",
        "modelled / measured step": "1.00 (0.50 to 1.50)", "all-reduce": "230.0 GB/s", "failed": "memory",
    }  # fmt: skip


def test_a_report_of_checks_that_failed_early_has_a_row() -> None:
    early = report().model_copy(update={"trained": [], "attention": None, "all_reduce_gbps": None, "outcomes": {}})
    assert early.row().count(" - ") == 6 and early.row().endswith("| none |")


def test_the_json_file_is_named_after_gpu_number_and_time(tmp_path: Path) -> None:
    report().write(tmp_path / report().name)
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia-a100-sxm4-80gb-x2-20270115-080000.json"]
    assert GpuReport.read(tmp_path / report().name) == report()


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    """If this fails: python -m tools.gpu_page"""
    assert gpu_page.page(PAGE) == PAGE and all(table in PAGE for table in gpu_page.tables())


def test_losses_are_compared_at_common_steps_of_equal_trainings() -> None:
    others = [
        trained("zero2", 0.1, losses={2: 7.1, 3: 1.0}),
        trained("ddp", 0.0, training="8B"),
        trained("fsdp", 2.0, training="8B"),
    ]
    row = report().model_copy(update={"trained": [trained("ddp", 0.0), *others[:2]]}).row()
    assert "| 0.1000 |" in row
    assert "| 2.0000 |" in report().model_copy(update={"trained": [trained("ddp", 0.0), *others]}).row()


@pytest.mark.parametrize(("one", "other", "wrong"), [
    (trained("zero2", 0.0), trained("zero3", 0.0015), []),
    (trained("zero2", 0.0), trained("zero3", 0.0025), ["zero2 and zero3"]),
    (trained("ddp", 0.0), trained("zero3", 0.023), []),
    (trained("ddp", 0.0), trained("zero3", 0.06), ["ddp and zero3"]),
    (trained("zero2", 0.0, weights="float32"), trained("zero3", 0.02, weights="bfloat16"), []),
    (trained("zero2", 0.0), trained("zero3", 1.0, training="8B"), []), (trained("ddp", 0.0), trained("ddp", 0.009), []),
    (trained("ddp", 0.0), trained("ddp", 0.011), ["ddp and ddp"]),
    (trained("zero2", 0.0), trained("zero3", 0.0, losses={9: 8.0}), ["zero2 and zero3"]),
    (trained("zero2", 0.0), trained("zero3", 0.0, planned_allocated=6 * GIB), ["memory under zero3"]),
])  # fmt: skip
def test_the_limit_of_losses_depends_on_the_type_of_the_weights(one: Trained, other: Trained, wrong: list[str]) -> None:
    """The planned 3 GiB of `trained` are a quarter below the measured 4."""
    assert [finding.check for finding in judge([one, other]) if finding.verdict is not Verdict.OK] == wrong


def probed(monkeypatch: Patch, stdout: str, returncode: int = 0, stderr: str = "") -> None:
    done = subprocess.CompletedProcess([], returncode, stdout, stderr)
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(machine, "list_gpus", lambda: None)


def test_the_first_gpu_is_the_machine(monkeypatch: Patch) -> None:
    one = f'["NVIDIA H100 80GB HBM3", {79 * GIB}]'
    probed(monkeypatch, f'a warning\n{{"gpus": [{one}, {one}], "cuda": "13.0", "nccl": "2.28.9"}}\n')
    found = find_machine()
    assert (found.accelerator, found.nccl) == ("h100", "2.28.9") and found.cluster()["gpu_memory_gib"] == 79.0


@pytest.mark.parametrize(("stdout", "returncode", "sentence"), [
    ('{"gpus": [], "cuda": null, "nccl": null}', 0, "found no GPU. It needs one that torch"),
    ("", 1, "cannot use the GPU: RuntimeError: error 802. Run `shardmake doctor --node`"),
    ('{"gpus": [["NVIDIA X1", 1]], "cuda": "13.0", "nccl": ""}', 0, "does not know the GPU 'NVIDIA X1'"),
])  # fmt: skip
def test_a_machine_that_cannot_be_used(monkeypatch: Patch, stdout: str, returncode: int, sentence: str) -> None:
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


def test_the_allocator_gets_more_than_the_last_fallback_needs() -> None:
    plan = make_plan("ddp")
    smaller = plan.choice.model_copy(update={"micro_batch_size": 1})
    plan = plan.model_copy(update={"fallbacks": [Fallback(choice=smaller, host_memory=1, memory_gib=1)]})
    assert memory_limit(plan, estimates({plan.choice: 6 * GIB, smaller: 2 * GIB})) == 4 * GIB
    with pytest.raises(CaseError, match="the fallbacks save too little"):
        memory_limit(plan, estimates({plan.choice: 6 * GIB, smaller: 5 * GIB}))


def test_every_case_is_a_run_that_saves_at_most_once_and_programs_name_a_training() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        for gpus in MACHINES.values():
            assert case.program or Run(**keys_of(case, gpus)).checkpoints.keep == 1
        assert set(case.program[1:]) <= set(names)


def test_the_report_has_what_the_rows_of_the_cases_have(tmp_path: Path) -> None:
    write_json(tmp_path / CLUSTER, {"accelerator": "h100"})
    write_json(tmp_path / COMMIT, None)
    one = trained("zero3", 0.0, training="1.24B")
    measured = {name: one.as_json()[name] for name in ("losses", "allocated", "reserved", "step_seconds")}
    rows: list[dict[str, Any]] = json.loads(json.dumps([
        {"case": "zero3", "ok": True, "at": 3.0, **one.as_json(), "attempts": []},
        {"case": "bare-deepspeed", "ok": True, "trainer": "DeepSpeed", "of": "zero3", **measured},
        {"case": "ddp", "ok": False, "reached": True, "error": "RuntimeError: CUDA", "last": []},
        {"case": "fsdp", "ok": False, "reached": False, "error": "CaseError", "last": []},
        {"case": "rates", "ok": True, "rates": {"device copy, GB/s": 2989.0}},
        {"case": "attention", "ok": True, "attention": {"varlen": 0.01, "eager": 0.012}},
    ]))  # fmt: skip
    found = kit.make_report(MACHINES["h200"], rows, 1_800_000_000, tmp_path)
    assert found.trained == [one] and found.rates and found.attention
    assert (found.outcomes["ddp"], found.outcomes["fsdp"]) == ("failed", "skipped")
    assert [(bare.trainer, bare.training) for bare in found.bare] == [("DeepSpeed", "1.24B, 12 steps")]
    rows_of_page = [*found.training_rows()]
    assert "| 4.00 (-25.0%) | 5.00 (-20.0%) | - | 0.100 / 0.200 |" in rows_of_page[0]
    assert len(rows_of_page) == 2 and found.changes == "the plans are for h100"

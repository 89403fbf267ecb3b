"""The kit for a GPU machine: its wheels are installed offline, and its cases rehearsed on the CPU, each to its row."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name, parse_wheel_filename

from benchmarks.gpu_kit.__main__ import choose
from benchmarks.gpu_kit.cases import CASES
from benchmarks.gpu_kit.machine import MACHINES
from shardmake.doctor.gpu_report import GpuReport
from tests.workflow.checkout import REPOSITORY, environment
from tools.gpu_kit import LIMIT, TARGET, add_stub, installed_there, pack, pins

SAMPLED = ("ddp", "bare-trainer", "two-ranks")
"""Cases that CI rehearses."""


def rehearse(folder: Path, *words: str, at_once: int = 2) -> dict[str, dict[str, Any]]:
    """Prepare, move the prepared folder as to another machine, and run; return the rows by case."""
    options = ["--machine", "cpu", *(["--only", *words] if words else [])]
    command = [sys.executable, "-m", "benchmarks.gpu_kit", str(folder / "kit"), "--prepare", *options]
    subprocess.run(command, cwd=REPOSITORY, env=environment(), check=True)
    kit = (folder / "kit").rename(folder / "moved")
    script = ["envs/gpu-kit.sh", "--seconds", "1500", "--at-once", str(at_once), *options]
    variables = environment() | {"KIT": str(kit), "PYTHON": sys.executable}
    done = subprocess.run(script, cwd=REPOSITORY, env=variables, check=False)
    rows = [json.loads(line) for line in (kit / "out/rows.jsonl").read_text().splitlines()]
    assert {row["case"]: row.get("last", row.get("error")) for row in rows if row.get("ok") is False} == {}
    assert done.returncode == 0 and len([*kit.glob("out/cpu-x1-*.json")]) == 1
    return {row["case"]: row for row in rows if "ok" in row}


@pytest.mark.training
@pytest.mark.timeout(900)
def test_sampled_cases_end_with_a_row(tmp_path: Path) -> None:
    rows = rehearse(tmp_path, *SAMPLED)
    assert set(rows) >= set(SAMPLED)
    bare, own = rows["bare-trainer"]["losses"], rows["ddp"]["losses"]
    assert max(abs(bare[step] - loss) for step, loss in own.items()) < 0.001, "another training than the bare one"
    assert "ok" in rows["two-ranks"]["all_reduce"]


@pytest.mark.gpu_kit
@pytest.mark.timeout(1800)
def test_every_case_ends_with_a_row_on_a_cpu_or_says_why_not(tmp_path: Path) -> None:
    assert set(rehearse(tmp_path)) == {case.name for case in CASES if not case.not_on_cpu}


@pytest.mark.gpu_kit
@pytest.mark.timeout(1800)
def test_every_case_is_planned_and_rendered_for_a_gpu(wheels: Path, tmp_path: Path) -> None:
    """Liger and bitsandbytes, which the plan asks for, are those of the kit."""
    packages = [str(path) for name in ("liger_kernel", "bitsandbytes") for path in wheels.glob(f"{name}-*.whl")]
    target = ["--quiet", "--no-index", "--no-deps", f"--target={tmp_path / 'packages'}"]
    subprocess.run([sys.executable, "-m", "pip", "install", *target, *packages], check=True)
    command = [sys.executable, "-m", "benchmarks.gpu_kit", str(tmp_path), "--machine", "h100", "--prepare"]
    variables = environment()
    variables["PYTHONPATH"] = f"{variables.get('PYTHONPATH', REPOSITORY)}:{tmp_path / 'packages'}"
    subprocess.run(command, cwd=REPOSITORY, env=variables, check=True)
    rendered = {path.parts[-3] for path in tmp_path.glob("work/runs/*/plan/rendered.json")}
    assert rendered == {case.name for case in choose([], MACHINES["h100"]) if not case.program}


@pytest.mark.training
@pytest.mark.timeout(900)
def test_doctor_trains_on_nodes_and_writes_the_row(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text((REPOSITORY / "config/clusters/local.yaml").read_text())
    command = [sys.executable, "-m", "shardmake.cli", "doctor", "--node", "--train", "--skip-builds", "--json"]
    options = ["--cluster", "cluster.yaml", "--write", "found.yaml"]
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    found = {row["check"]: row for row in json.loads(done.stdout)["compute_nodes"]}
    checks = ("training under ddp", "training under zero2", "training under zero3", "zero2 and zero3")
    assert {name: found[name]["verdict"] for name in checks} == dict.fromkeys(checks, "ok")
    (report,) = (GpuReport.read(path) for path in tmp_path.glob("logs/doctor/*/cpu-x2-*.json"))
    assert report.row() in found["row of docs/gpu.md"]["found"]


def test_without_a_gpu_the_command_fails_with_a_sentence() -> None:
    variables = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu_kit"]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert done.returncode == 1 and "make gpu-check found no GPU. It needs one that torch" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("kit"))


def pythons() -> Iterator[str]:
    """Yield the Pythons 3.12 of this machine."""
    for path in ["python3.12", *map(str, Path.home().glob(".pyenv/versions/3.12.*/bin/python3.12"))]:
        found = subprocess.run(["/usr/bin/env", path, "--version"], capture_output=True, check=False)
        if found.returncode == 0:
            yield path


@pytest.mark.gpu_kit
def test_the_wheels_are_small_and_replace_nothing_that_fits(wheels: Path) -> None:
    packed = {str(name): str(version) for name, version, *_ in (parse_wheel_filename(p.name) for p in wheels.iterdir())}
    assert sum(path.stat().st_size for path in wheels.iterdir()) < LIMIT
    assert {"deepspeed", "trl", "snakemake", "submitit", "shardmake", "liger-kernel", "bitsandbytes"} <= packed.keys()
    assert not packed.keys() & installed_there()
    (bitsandbytes,) = wheels.glob("bitsandbytes-*.whl")
    libraries = [name for name in zipfile.ZipFile(bitsandbytes).namelist() if name.endswith(".so")]
    assert libraries == ["bitsandbytes/libbitsandbytes_cuda130.so"]


@pytest.mark.gpu_kit
def test_an_offline_installation_meets_every_requirement(wheels: Path, tmp_path: Path) -> None:
    """In a new environment that has only the names and versions of the machine's packages."""
    offline = ["--no-index", "--no-deps", "--no-compile", *map(str, wheels.iterdir())]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    variables["PIP_CONFIG_FILE"] = os.devnull
    python = next(pythons(), None)
    root = tmp_path / "environment"
    subprocess.run([python or sys.executable, "-m", "venv", root], check=True)
    for name, version in installed_there().items():
        if name != "pip":
            add_stub(root, name, version or pins().get(name, "1"))
    pip = [str(root / "bin/python"), "-m", "pip"]
    if python is None:  # the files of another Python than this one
        (packages,) = root.glob("lib/python*/site-packages")
        offline += [*TARGET, f"--target={packages}"]
    subprocess.run([*pip, "install", "--quiet", *offline], check=True, env=variables)
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False, env=variables)
    assert checked.stdout.splitlines() == ["No broken requirements found."]
    found = subprocess.run([*pip, "list", "--format=freeze"], capture_output=True, text=True, check=True, env=variables)
    names = {canonicalize_name(line.partition("==")[0]) for line in found.stdout.splitlines()}
    assert {"deepspeed", "shardmake", "snakemake"} <= names

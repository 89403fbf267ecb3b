"""Findings about the compilers of a node, from stand-ins of the compilers on PATH and through the check of a node."""

import os
import shutil
from pathlib import Path

import pytest

from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.launch.compilers import check_compilers
from shardmake.launch.preflight import PreflightError, check_node
from tests.unit.launch.test_preflight import node
from tests.unit.plans import make_plan

OFFLOADED = {name for name, spec in STRATEGY_SPECS.items() if spec.is_deepspeed and spec.offload_optimizer}
# The answer of GCC 8, which Rocky Linux 8 has.
GCC_8 = "echo \"c++: error: unrecognized command line option '-std=c++20'; did you mean '-std=c++2a'?\" >&2; exit 1"


class FakeBin:
    """A PATH with stand-ins only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, script: str = "exit 0") -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / name).chmod(0o755)

    def findings(self, strategy: str, *, on_gpus: bool = False, **variables: str) -> list[str]:
        variables = {"PATH": str(self.folder), **variables}
        return [row.found for row in check_compilers(STRATEGY_SPECS[strategy], variables, on_gpus=on_gpus)]


@pytest.fixture
def fakebin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBin:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return FakeBin(tmp_path / "bin")


@pytest.mark.parametrize("strategy", STRATEGY_SPECS)
def test_only_offload_of_the_optimizer_needs_a_compiler(fakebin: FakeBin, strategy: str) -> None:
    findings = fakebin.findings(strategy)
    assert bool(findings) == (strategy in OFFLOADED), findings
    assert all("c++: No such file or directory" in finding for finding in findings)


def test_an_old_compiler_is_named_with_its_error(fakebin: FakeBin) -> None:
    fakebin.add("c++", GCC_8)
    (finding,) = fakebin.findings("zero2-offload")
    assert "unrecognized command line option '-std=c++20'" in finding
    assert "install g++ 10 or newer" in finding and "slurm.setup" in finding
    fakebin.add("g++-13")
    assert fakebin.findings("zero2-offload", CXX="g++-13") == []


def test_nvme_needs_libaio_and_on_gpus_the_cuda_toolkit(fakebin: FakeBin, tmp_path: Path) -> None:
    fakebin.add(
        "c++", 'case "$*" in *-laio*) echo "fatal error: libaio.h: No such file or directory" >&2; exit 1;; esac'
    )
    (finding,) = fakebin.findings("zero3-nvme")
    assert "libaio.h: No such file" in finding and "libaio-dev" in finding
    fakebin.add("c++")
    assert fakebin.findings("zero3-nvme") == []
    toolkit = FakeBin(tmp_path / "cuda")
    home = str(tmp_path / "missing")
    (finding,) = fakebin.findings("zero3-nvme", on_gpus=True, CUDA_HOME=home)
    assert "needs nvcc" in finding and "slurm.setup" in finding
    (toolkit.folder / "bin").mkdir()
    (toolkit.folder / "bin/nvcc").write_text("#!/bin/sh\n")
    (toolkit.folder / "bin/nvcc").chmod(0o755)
    assert fakebin.findings("zero3-nvme", on_gpus=True, CUDA_HOME=str(toolkit.folder)) == []
    fakebin.add("nvcc")
    assert fakebin.findings("zero3-nvme", on_gpus=True) == [], "torch takes the folder above that of nvcc"


def test_what_is_compiled_already_needs_no_compiler(fakebin: FakeBin, tmp_path: Path) -> None:
    for name in ("cpu_adam", "async_io"):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / f"{name}.so").touch()
    assert fakebin.findings("zero3-nvme", on_gpus=True, TORCH_EXTENSIONS_DIR=str(tmp_path / "cache")) == []


def test_the_compiler_of_this_machine_passes() -> None:
    assert shutil.which("c++"), "envs/system.sh installs it"
    assert check_compilers(STRATEGY_SPECS["zero3-offload"], os.environ, on_gpus=True) == []


def test_the_check_of_a_node_blames_the_run(fakebin: FakeBin, tmp_path: Path) -> None:
    folder, attempt, _ = node(tmp_path)
    fakebin.add("c++", GCC_8)
    plan = make_plan("zero3-offload", nodes=1).model_copy(update={"host_memory": 1})
    with pytest.raises(PreflightError, match="Adam for offload cannot be compiled") as error:
        check_node(folder, attempt, plan, 0, print)
    assert error.value.blames_run
    compiler = tmp_path / "bin/good"
    fakebin.add("good")
    check_node(folder, attempt.model_copy(update={"environment": {"CXX": str(compiler)}}), plan, 0, print)

"""Findings about the compilers of a node, from stand-ins of the compilers on PATH and through the check of a node."""

import os
import shutil
from pathlib import Path

import pytest

from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.launch.compilers import check_compilers
from shardmake.launch.preflight import PreflightError, check_node
from tests.programs import write_program
from tests.unit.launch.test_preflight import node
from tests.unit.plans import make_plan

OFFLOADED = {name for name, spec in STRATEGY_SPECS.items() if spec.is_deepspeed and spec.offload_optimizer}
# The answer of GCC 8, which Rocky Linux 8 has.
GCC_8 = "echo \"c++: error: unrecognized command line option '-std=c++20'; did you mean '-std=c++2a'?\" >&2; exit 1"


@pytest.fixture
def fakebin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH without programs."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def findings(strategy: str, *, on_gpus: bool = False, **variables: str) -> list[str]:
    rows = check_compilers(STRATEGY_SPECS[strategy], {"PATH": os.environ["PATH"], **variables}, on_gpus=on_gpus)
    return [row.found for row in rows]


@pytest.mark.usefixtures("fakebin")
@pytest.mark.parametrize("strategy", STRATEGY_SPECS)
def test_only_offload_of_the_optimizer_needs_a_compiler(strategy: str) -> None:
    found = findings(strategy)
    assert bool(found) == (strategy in OFFLOADED), found
    assert all("c++: No such file or directory" in finding for finding in found)


def test_an_old_compiler_is_named_with_its_error(fakebin: Path) -> None:
    write_program(fakebin / "c++", GCC_8)
    (finding,) = findings("zero2-offload")
    assert "unrecognized command line option '-std=c++20'" in finding
    assert "install g++ 10 or newer" in finding and "slurm.setup" in finding
    write_program(fakebin / "g++-13")
    assert findings("zero2-offload", CXX="g++-13") == []


def test_nvme_needs_libaio_and_on_gpus_the_cuda_toolkit(fakebin: Path, tmp_path: Path) -> None:
    missing = 'case "$*" in *-laio*) echo "fatal error: libaio.h: No such file or directory" >&2; exit 1;; esac'
    write_program(fakebin / "c++", missing)
    (finding,) = findings("zero3-nvme")
    assert "libaio.h: No such file" in finding and "libaio-dev" in finding
    write_program(fakebin / "c++")
    assert findings("zero3-nvme") == []
    (finding,) = findings("zero3-nvme", on_gpus=True, CUDA_HOME=str(tmp_path / "missing"))
    assert "needs nvcc" in finding and "slurm.setup" in finding
    write_program(tmp_path / "cuda/bin/nvcc")
    assert findings("zero3-nvme", on_gpus=True, CUDA_HOME=str(tmp_path / "cuda")) == []
    write_program(fakebin / "nvcc")
    assert findings("zero3-nvme", on_gpus=True) == [], "torch takes the folder above that of nvcc"


@pytest.mark.usefixtures("fakebin")
def test_what_is_compiled_already_needs_no_compiler(tmp_path: Path) -> None:
    for name in ("cpu_adam", "async_io"):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / f"{name}.so").touch()
    assert findings("zero3-nvme", on_gpus=True, TORCH_EXTENSIONS_DIR=str(tmp_path / "cache")) == []


def test_the_compiler_of_this_machine_passes() -> None:
    assert shutil.which("c++"), "envs/system.sh installs it"
    assert findings("zero3-offload", on_gpus=True, **os.environ) == []


def test_the_check_of_a_node_blames_the_run(fakebin: Path, tmp_path: Path) -> None:
    folder, attempt, _ = node(tmp_path)
    write_program(fakebin / "c++", GCC_8)
    plan = make_plan("zero3-offload", nodes=1).model_copy(update={"host_memory": 1})
    with pytest.raises(PreflightError, match="Adam for offload cannot be compiled") as error:
        check_node(folder, attempt, plan, 0, print)
    assert error.value.blames_run
    write_program(fakebin / "good")
    compiler = {"environment": {"CXX": str(fakebin / "good")}}
    check_node(folder, attempt.model_copy(update=compiler), plan, 0, print)

"""Check that a node has what DeepSpeed needs to compile its extensions, which happens when the ranks start.

Offload of the optimizer compiles DeepSpeed's Adam, in C++ alone. Offload to NVMe also compiles its asynchronous I/O,
which needs libaio and, on GPUs, the CUDA toolkit. No other strategy compiles anything.
"""

import os
import runpy
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from shardmake.config.strategies import StrategySpec
from shardmake.core.temporary import temporary_folder
from shardmake.run.findings import Finding, warning

_SECONDS = 60
_ADAM = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_num_threads() < 1; }\n"
_ASYNC_IO = "#include <libaio.h>\nint main() { return io_submit(nullptr, 0, nullptr) == 0; }\n"


def check_compilers(spec: StrategySpec, variables: Mapping[str, str], *, on_gpus: bool) -> list[Finding]:
    """Return what is missing to compile the extensions of a strategy that are not compiled yet.

    Args:
        spec: The strategy.
        variables: Environment of the ranks.
        on_gpus: The ranks use GPUs.
    """
    missing: list[str] = []
    if not spec.is_deepspeed:
        return []
    if spec.offload_optimizer and not _is_compiled("cpu_adam", variables):
        include = f"-I{sysconfig.get_path('include')}"
        missing += (
            f"DeepSpeed's Adam for offload cannot be compiled ({error}): install g++ 10 or newer and the headers of "
            "Python on the compute nodes, or load a compiler in slurm.setup"
            for error in _compile(_ADAM, variables, include, "-fopenmp", "-c")
        )
    if spec.uses_nvme and not _is_compiled("async_io", variables):
        missing += (
            f"DeepSpeed's I/O on NVMe cannot be compiled ({error}): install libaio with its headers (libaio-dev, "
            "libaio-devel) on the compute nodes"
            for error in _compile(_ASYNC_IO, variables, "-laio")
        )
        if on_gpus and not _has_cuda_toolkit(variables):
            missing.append(
                "DeepSpeed's I/O on NVMe needs nvcc, and neither CUDA_HOME, PATH nor /usr/local/cuda has it: load the "
                "CUDA toolkit in slurm.setup"
            )
    return [warning("compilers", text, "Use strategies without offload until this is solved.") for text in missing]


def _is_compiled(name: str, variables: Mapping[str, str]) -> bool:
    """Return whether an extension came with the installation, or torch has compiled it on this node before."""
    deepspeed = find_spec("deepspeed")
    assert deepspeed is not None and deepspeed.origin is not None
    record = Path(deepspeed.origin).with_name("git_version_info_installed.py")
    if record.exists() and runpy.run_path(str(record))["installed_ops"].get(name):
        return True
    return Path(variables.get("TORCH_EXTENSIONS_DIR", ""), name, f"{name}.so").exists()


def _compile(program: str, variables: Mapping[str, str], *options: str) -> Iterator[str]:
    """Yield the first error of torch's C++ compiler; nothing if it compiles ``program`` or takes too long."""
    compiler = variables.get("CXX") or "c++"
    with temporary_folder("compiler") as folder:
        source = folder / "test.cpp"
        source.write_text(program)
        command = [*compiler.split(), "-std=c++20", str(source), "-o", str(source.with_suffix(".o")), *options]
        try:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return
        except OSError as error:
            yield f"{compiler}: {error.strerror}"
            return
    if done.returncode:
        lines = done.stderr.splitlines()
        yield next((line for line in lines if "error" in line), lines[0] if lines else f"{compiler} failed")


def _has_cuda_toolkit(variables: Mapping[str, str]) -> bool:
    """Return whether nvcc is where torch looks for the CUDA toolkit."""
    nvcc = shutil.which("nvcc", path=variables.get("PATH"))
    found = Path(nvcc).parents[1] if nvcc else Path("/usr/local/cuda")
    home = Path(variables.get("CUDA_HOME") or variables.get("CUDA_PATH") or found)
    return os.access(home / "bin" / "nvcc", os.X_OK)

"""Install the pinned torch in its build for this machine: ``python -m tools.install_torch [cu126|cu130|cpu|extras]``.

``make install`` runs it in the new environment before anything else is installed, so it imports the standard library
and `shardmake.launch.gpu_status` only. Without an argument, the driver of this machine decides. With ``extras`` it
prints which extras to install beside the torch that is there.
"""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shardmake.core.errors import ConfigError, ShardmakeError
from shardmake.launch.gpu_status import (
    TORCH_BUILDS,
    GpuStatus,
    find_misfits,
    installed_cuda,
    list_gpus,
    newest_build,
    oldest_driver,
)

ON_PACKAGE_INDEX = "cu130"
"""The build that the Python package index has under the version without a suffix."""
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"


def pinned_version(constraints: str) -> str:
    """Return torch's version in the text of ``constraints.txt``."""
    found = re.search(r"^torch==(\S+)$", constraints, re.MULTILINE)
    assert found is not None
    return found[1]


def choose_build(wanted: str, gpus: Sequence[GpuStatus] | None, version: str) -> str | None:
    """Return the build to install; None for what pip finds, on a machine without a driver.

    Args:
        wanted: The user's ``CUDA=``; empty if the driver decides.
        gpus: The GPUs of this machine; None without a driver.
        version: torch's version, for messages.

    Raises:
        ConfigError: ``wanted`` does not exist, or this machine's driver cannot run any build.
    """
    if wanted == "rocm":
        raise ConfigError(
            "Cannot install for CUDA=rocm. Shardmake does not support AMD GPUs: its checks, estimates and step times "
            "are those of NVIDIA GPUs. Use NVIDIA GPUs, or CUDA=cpu."
        )
    if wanted and wanted not in (*TORCH_BUILDS, "cpu"):
        raise ConfigError(
            f"Cannot install for CUDA={wanted}. torch {version} has no stable build of this name. "
            f"Use {', '.join(_with_driver(name) for name in TORCH_BUILDS)}, or cpu."
        )
    if wanted or not gpus:
        return wanted or None
    if build := newest_build(gpus):
        return build
    reasons = "; ".join(reason for cuda in TORCH_BUILDS.values() for reason in find_misfits(gpus, cuda))
    raise ConfigError(
        f"Cannot choose a build of torch {version} for this machine: {reasons}. Update the driver, or name the build "
        "that other nodes need: make install CUDA=cu126, or CUDA=cpu."
    )


def requirements(build: str | None, version: str) -> list[str]:
    """Return what pip may install for ``build``, in the order to try."""
    if build is None:
        return [f"torch=={version}"]
    exact = [f"torch=={version}+{build}"]
    return [*exact, f"torch==={version}"] if build == ON_PACKAGE_INDEX else exact


def run_pip(requirement: str, options: Sequence[str] = ()) -> bool:
    """Install ``requirement``; return False if no index of pip has it.

    Raises:
        ConfigError: pip failed for another reason.
    """
    command = [sys.executable, "-m", "pip", "install", "-q", *options, requirement]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return True
    if "No matching distribution found for torch" in done.stderr:
        return False
    raise ConfigError(f"Cannot install {requirement}. pip failed:\n{done.stderr.strip()}\nFix this and run it again.")


def install(build: str | None, version: str) -> None:
    """Install torch and check that it is the build that was chosen.

    Raises:
        ConfigError: pip does not find the build, or installed another one.
    """
    index = os.environ.get("TORCH_INDEX")
    options = ["--extra-index-url", index] if index else []
    if not any(run_pip(requirement, options) for requirement in requirements(build, version)):
        name = f"torch {version} for CUDA={build}" if build else f"torch {version}"
        raise ConfigError(
            f"Cannot install {name}. No package index that pip uses has this build; the Python package index has only "
            f"{ON_PACKAGE_INDEX}. Copy the address after --index-url from the install page of pytorch.org: "
            f"make install CUDA={build or 'cu126'} TORCH_INDEX=ADDRESS. Or set it as extra-index-url in pip's "
            "configuration."
        )
    importlib.invalidate_caches()
    cuda = installed_cuda()
    if build is not None and cuda != TORCH_BUILDS.get(build):
        raise ConfigError(
            f"Cannot use the installed torch: CUDA={build} was requested, and pip installed a build for "
            f"{'the CPU' if cuda is None else f'CUDA {cuda}'}. Check the package indexes in pip's configuration."
        )


def private_python(python: Path = Path(sys.executable)) -> str | None:
    """Return a warning if other users cannot reach the file of this Python, as in most homes."""
    closed = [folder for folder in python.resolve().parents if not folder.stat().st_mode & 0o001]
    if not closed:
        return None
    return (
        f"Warning: other users cannot use this installation: its Python is in {closed[-1]}, which is closed to them. "
        "To share it, install with a Python of the system: make install PYTHON=/usr/bin/python3"
    )


def main(wanted: str) -> str:
    """Install torch if needed, and return a line about the build.

    An installed torch of the pinned version stays unless ``wanted`` names a build: the login node's driver may differ
    from that of the compute nodes, and a later ``make install`` must not change the choice.

    Raises:
        ConfigError: see `choose_build` and `install`.
    """
    version = pinned_version(CONSTRAINTS.read_text())
    gpus = list_gpus()
    if wanted or installed_version() != version:
        install(choose_build(wanted, gpus, version), version)
    cuda = installed_cuda()
    if cuda is None:
        return f"torch {version} for the CPU"
    line = f"torch {version} for CUDA {cuda}, which needs driver {oldest_driver(cuda)} or newer"
    others = ", ".join(_with_driver(name) for name, other in TORCH_BUILDS.items() if other != cuda)
    return line if wanted or gpus else f"{line}. For nodes with another driver: make install CUDA={others}"


def _with_driver(name: str) -> str:
    return f"{name} (driver {oldest_driver(TORCH_BUILDS[name])} or newer)"


def extras() -> str:
    """Return the extras of Shardmake that the installed build of torch can use, as pip writes them."""
    return "[gpu]" if installed_cuda() else ""


def installed_version() -> str | None:
    """Return the version of the installed torch without the suffix of its build; None without torch."""
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    try:
        print(extras() if sys.argv[1:] == ["extras"] else main("".join(sys.argv[1:])))
        if sys.argv[1:] != ["extras"] and (warning := private_python()):
            print(warning, file=sys.stderr)
    except ShardmakeError as error:
        sys.exit(f"Error: {error}")

"""The environment of libraries: caches of compiled kernels, the hub, versions."""

import contextlib
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, MutableMapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from shardmake import __version__
from shardmake.core.permissions import private_folder

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_VARIABLE = "SHARDMAKE_CONFIG"
"""Environment variable with the merged file. The parameters of a rule would rerun it for every other file."""
RUNS_VARIABLE = "SHARDMAKE_RUNS"
"""Environment variable with the folder of the runs, if the workflow is a module with a prefix."""
PROJECT = packed if (packed := _PACKAGE / "project").is_dir() else _PACKAGE.parents[1]
"""Folder with the workflow, its profiles and the constraints: in a wheel that of the package, else the checkout."""


def unset_variable(text: str) -> str:
    """Return the first environment variable in ``text`` that is not set in this process, or empty; else ""."""
    names = (plain or braced for plain, braced in re.findall(r"\$(?:(\w+)|\{(\w+)\})", text))
    return next((name for name in names if not os.environ.get(name)), "")


def scratch_folder(scratch: str) -> Path:
    """Return the cluster's ``scratch`` on this machine, in a job with the job's variables.

    If the folder does not exist, as on a login node or in a job that requests no local disk, it is the temporary one.
    """
    folder = Path(os.path.expandvars(scratch))
    return folder if folder.is_dir() and not unset_variable(scratch) else Path(tempfile.gettempdir())


def kernel_caches(scratch: str) -> dict[str, str]:
    """Return environment variables with which DeepSpeed, Triton and Inductor keep their caches in ``scratch``.

    On a network file system nodes would write to the same cache at once. A folder shared between users would belong
    to the first of them. The libraries load code from these folders, so they are this user's alone.
    """
    folder = private_folder(scratch_folder(scratch) / f"shardmake-{os.getuid()}")
    return {
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def remove_list_settings(environment: MutableMapping[str, str]) -> None:
    """Remove the user's own settings of squeue, sinfo, sacct and scancel, which would hide jobs or ask a person."""
    own = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SLURM_TIME_FORMAT")
    for name in [name for name in environment if name.startswith(own)]:
        del environment[name]


def hub_cache(configured: str | None) -> Path:
    """Return the folder of the hub's cache: ``configured``, else that of the hub's libraries."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(configured or os.environ.get("HF_HOME") or default).expanduser()


def hub_token_file() -> Path:
    """Return the file of the user's token, where ``hf auth login`` puts it."""
    return Path(os.environ.get("HF_TOKEN_PATH") or hub_cache(None) / "token").expanduser()


UNUSED = ("boto3", "scipy", "sklearn")
"""Packages that the libraries import for SageMaker and for losses of object detection, half a second of each rank."""


def hide(*packages: str) -> list[str]:
    """Let no import of this process find ``packages``, as if they were not installed; return those not imported yet."""
    absent = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None lets an import fail
    return absent


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Let imports in a block not find ``packages``: libraries import all that they might use, which takes seconds.

    No garbage is collected meanwhile, a fifth of the time: what is imported stays.
    """
    collects = gc.isenabled()
    gc.disable()
    absent = hide(*packages)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        if collects:
            gc.enable()


def import_without_torch() -> None:
    """Import transformers and datasets as if torch were not installed, in a quarter of the time.

    For a process that needs tokenizers and no model. What it imports later may import torch.
    """
    if "transformers" not in sys.modules and "datasets" not in sys.modules:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that torch was not found, also later
        with hidden("torch"):
            import datasets  # noqa: F401
            import transformers  # noqa: F401


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def hub_environment(cache: str | None, *, offline: bool) -> dict[str, str]:
    """Return variables that the hub's libraries read at import: their cache, and whether they are offline.

    The user's token stays where ``hf auth login`` puts it, and is not looked for in a cache that a lab shares.
    """
    location = {"HF_HOME": str(Path(cache).absolute()), "HF_TOKEN_PATH": str(hub_token_file())} if cache else {}
    return location | (OFFLINE if offline else {})


def leave_collectives_to_gloo() -> None:
    """Let DeepSpeed use gloo on CPUs instead of compiling its shared-memory collectives.

    The compilation needs a C++ compiler and half a minute on every node, for a kernel for inference on one node. Call
    this function before DeepSpeed creates its process group.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


_GIT_SECONDS = 10
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed")


@cache
def library_version(name: str) -> str:
    """Return the version of an installed library as `version` does, without parsing the description below it."""
    found = re.search(r"^Version: (\S+)", distribution(name).read_text("METADATA") or "", re.MULTILINE)
    return found[1] if found else version(name)


def library_versions() -> dict[str, str]:
    """Return the versions that checkpoints record and that must be equal on all nodes.

    Shardmake's is that of the imported code: a container may import a checkout without installing it.
    """
    return {name: version(name) for name in LIBRARIES} | {"shardmake": __version__}


def installed_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Return the version of each package, None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in found:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def checkout_commit(package: Path = Path(__file__).parent) -> str | None:
    """Return the commit of the git checkout that ``package`` is a part of; None if it is installed otherwise.

    The name ends in ``-dirty`` if tracked files were changed.
    """
    if _git(package, "ls-files", "--error-unmatch", ".") is None:
        return None
    return _git(package, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if git is missing, refuses or does not answer."""
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def cache_folder() -> Path:
    """Return the user's cache folder of Shardmake."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardmake"

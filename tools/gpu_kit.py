"""Pack what a GPU machine without a network lacks, as wheels: ``python -m tools.gpu_kit [FOLDER]``.

``envs/gpu-machine.txt`` lists what such a machine has. pip itself resolves the requirements of this package against an
environment with these names and versions, and what it would install is packed: wheels for Python 3.12 on x86_64. torch
is never among them. Of bitsandbytes and PuLP, only the libraries for that machine are kept.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
MACHINE = REPOSITORY / "envs/gpu-machine.txt"
FOLDER = REPOSITORY / "build/gpu-kit"
LIMIT = 60 << 20
"""Bytes of all wheels: such a machine takes few files."""
LIBRARIES = {
    "bitsandbytes": ("bitsandbytes/libbitsandbytes_*", "cuda130"),
    "pulp": ("pulp/solverdir/**/*", "linux/i64"),
}
"""Compiled files of a package, and a part of the paths of those that the machine needs."""
CONSTRAINT = "--constraint=constraints.txt"
TARGET = (
    "--python-version=3.12", "--implementation=cp", "--only-binary=:all:",
    *(f"--platform=manylinux_2_{number}_x86_64" for number in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)),
    "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", "--platform=linux_x86_64",
)  # fmt: skip
FROM_SOURCE = ("deepspeed", "connection-pool")
"""Packages that the index has as sources only; without compiled parts they fit every Python."""
EXTRAS = ("liger-kernel", "bitsandbytes", "nvidia-ml-py")


def installed_there() -> dict[str, str | None]:
    """Return the version of each package of the machine by its canonical name; None if it is not known."""
    lines = [line.strip() for line in MACHINE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    parts = [line.partition("==") for line in lines]
    return {canonicalize_name(name): version or None for name, _, version in parts}


def add_stub(environment: Path, name: str, version: str) -> None:
    """Let pip find ``name`` in ``environment``, without its files and its requirements."""
    (packages,) = environment.glob("lib/python*/site-packages")
    info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")


def pins() -> dict[str, str]:
    """Return the version that ``constraints.txt`` names, by canonical name."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }


def pack(folder: Path = FOLDER) -> Path:
    """Write the wheels below ``folder`` and return their folder.

    Raises:
        RuntimeError: The wheels are too large, or a requirement cannot be met beside the machine's torch.
    """
    wheels, there = folder / "wheels", installed_there()
    shutil.rmtree(wheels, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        venv.create(work / "environment", with_pip=True)
        for package, version in there.items():
            if version and package != "pip":
                add_stub(work / "environment", package, version)
        _pip(work, "install", "--quiet", "--upgrade", "pip")  # older ones resolve for another Python only into a folder
        _constrain(work, pins().keys() - there.keys())
        _pip(work, "wheel", "--no-deps", CONSTRAINT, "--wheel-dir=built", str(REPOSITORY), *FROM_SOURCE)
        replaced = there.keys() & {one.partition("==")[0] for one in _resolve(work)}
        _constrain(work, (pins().keys() - there.keys()) | replaced)
        missing = [one for one in _resolve(work) if there.get(one.partition("==")[0], "absent")]
        if forbidden := [one for one in missing if one.startswith(("torch==", "nvidia-c", "triton=="))]:
            raise RuntimeError(f"The kit was not packed: it would replace {', '.join(forbidden)} of the machine.")
        _pip(work, "download", "--no-deps", *TARGET, "--find-links=built", f"--dest={wheels}", *missing)
    for package, (libraries, kept) in LIBRARIES.items():
        (wheel,) = wheels.glob(f"{package}-*.whl")
        keep_library(wheel, libraries, kept)
    size = sum(path.stat().st_size for path in wheels.iterdir())
    if size > LIMIT:
        raise RuntimeError(f"The kit was not packed: its wheels have {size >> 20} MiB, and {LIMIT >> 20} are allowed.")
    return wheels


def _constrain(work: Path, packages: Iterable[str]) -> None:
    text = "".join(f"{name}=={version}\n" for name, version in pins().items() if name in packages)
    (work / "constraints.txt").write_text(text)


def _resolve(work: Path) -> list[str]:
    """Return what pip would install beside the stubs, as ``name==version``."""
    (own,) = work.glob("built/shardmake-*.whl")
    options = ("--dry-run", "--quiet", *TARGET, CONSTRAINT, "--find-links=built", "--report=report.json")
    _pip(work, "install", *options, str(own), *EXTRAS)
    found = [one["metadata"] for one in json.loads((work / "report.json").read_text())["install"]]
    return [f"{canonicalize_name(one['name'])}=={one['version']}" for one in found]


def keep_library(wheel: Path, libraries: str, kept: str) -> None:
    """Remove the files that match ``libraries`` from ``wheel``, except those below ``kept``."""
    with tempfile.TemporaryDirectory() as name:
        run = (sys.executable, "-m", "wheel")
        subprocess.run([*run, "unpack", f"--dest={name}", str(wheel)], check=True, stdout=subprocess.DEVNULL)
        (root,) = Path(name).iterdir()
        files = [path for path in root.glob(libraries) if path.is_file()]
        assert any(kept in str(path) for path in files), f"{wheel.name} has no {kept}"
        for path in files:
            if kept not in str(path):
                path.unlink()
        wheel.unlink()
        subprocess.run([*run, "pack", f"--dest-dir={wheel.parent}", str(root)], check=True, stdout=subprocess.DEVNULL)


def _pip(work: Path, *words: str) -> None:
    """Run pip of the environment with the stubs."""
    variables = os.environ | {"DS_BUILD_OPS": "0"}
    variables.pop("PYTHONPATH", None)
    subprocess.run([str(work / "environment/bin/python"), "-m", "pip", *words], check=True, env=variables, cwd=work)


if __name__ == "__main__":
    packed = pack(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
    print(f"{sum(path.stat().st_size for path in packed.iterdir()) / 2**20:.1f} MiB in {packed}")

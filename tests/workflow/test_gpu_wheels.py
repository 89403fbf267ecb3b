"""The wheels of ``make gpu-kit``, installed without a network beside what the machine has."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name, parse_wheel_filename

from tools.gpu_kit import LIMIT, TARGET, add_stub, installed_there, pack, pins

pytestmark = pytest.mark.gpu_kit


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("kit"))


def pythons() -> Iterator[str]:
    """Yield the Pythons 3.12 of this machine."""
    for path in ["python3.12", *map(str, Path.home().glob(".pyenv/versions/3.12.*/bin/python3.12"))]:
        found = subprocess.run(["/usr/bin/env", path, "--version"], capture_output=True, check=False)
        if found.returncode == 0:
            yield path


def test_the_wheels_are_small_and_replace_nothing_that_fits(wheels: Path) -> None:
    packed = {str(name): str(version) for name, version, *_ in (parse_wheel_filename(p.name) for p in wheels.iterdir())}
    assert sum(path.stat().st_size for path in wheels.iterdir()) < LIMIT
    assert {"deepspeed", "trl", "snakemake", "submitit", "shardmake", "liger-kernel", "bitsandbytes"} <= packed.keys()
    assert {name: packed[name] for name in packed.keys() & installed_there()} == {
        name: pins()[name] for name in ("transformers", "huggingface-hub")
    }
    (bitsandbytes,) = wheels.glob("bitsandbytes-*.whl")
    assert [name for name in zipfile.ZipFile(bitsandbytes).namelist() if name.endswith(".so")] == [
        "bitsandbytes/libbitsandbytes_cuda130.so"
    ]


def test_an_offline_installation_meets_every_requirement(wheels: Path, tmp_path: Path) -> None:
    """In a new environment that has only the names and versions of the machine's packages."""
    offline = ["--no-index", "--no-deps", "--no-compile", *map(str, wheels.iterdir())]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    variables["PIP_CONFIG_FILE"] = os.devnull
    python = next(pythons(), None)
    root = tmp_path / "environment"
    subprocess.run([python or sys.executable, "-m", "venv", root], check=True)
    for name, version in installed_there().items():
        if name not in ("pip", "huggingface-hub", "transformers"):
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

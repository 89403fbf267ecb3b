"""Requirements with hashes, made and checked by the real pip from a folder of packages."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.hashed_requirements import hashed, resolve


def make_wheel(folder: Path, name: str, version: str, needs: str = "") -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    needed = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_pip_installs_exactly_the_files_that_were_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for version in ("1.0", "2.0"):
        make_wheel(packages, "direct", version, needs="indirect")
        make_wheel(packages, "indirect", version)
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "example"\nversion = "1"\ndependencies = ["direct"]\n[tool.setuptools]\npy-modules = []\n'
    )
    (tmp_path / "constraints.txt").write_text("direct==1.0\nindirect==1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    text = hashed(resolve(project, tmp_path / "constraints.txt"))
    assert [line.split(" --hash=sha256:")[0] for line in text.splitlines()] == ["direct==1.0", "indirect==1.0"]
    requirements = tmp_path / "hashed.txt"
    requirements.write_text(text)
    command = [sys.executable, "-m", "pip", "install", "--require-hashes", "--target", str(tmp_path / "target")]
    command += ["-r", str(requirements)]
    subprocess.run(command, check=True)
    make_wheel(packages, "indirect", "1.0", needs="direct")
    done = subprocess.run([*command, "--upgrade"], capture_output=True, text=True)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr

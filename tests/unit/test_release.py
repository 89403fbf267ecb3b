"""One version everywhere, and a wheel that works without the checkout."""

import subprocess
import sys
import venv
from pathlib import Path

import yaml
from typer.testing import CliRunner

import shardmake
from shardmake.cli import app

REPOSITORY = Path(__file__).resolve().parents[2]
NEWEST = f"## {shardmake.__version__} "


def test_the_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == shardmake.__version__
    headings = [line for line in (REPOSITORY / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].startswith(NEWEST)
    assert CliRunner().invoke(app, ["--version"]).stdout == f"shardmake {shardmake.__version__}\n"


def test_the_entry_in_the_catalog_of_workflows_is_valid() -> None:
    """The keys are those that the catalog reads; the profiles that it names exist."""
    entry = yaml.safe_load((REPOSITORY / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert entry.keys() == {"mandatory-flags", "software-stack-deployment", "report"}
    assert entry["mandatory-flags"].keys() == {"desc", "flags"}
    flag, profile = entry["mandatory-flags"]["flags"].split()
    assert flag == "--profile" and (REPOSITORY / "profiles" / profile / "config.yaml").exists()
    assert entry["software-stack-deployment"].keys() <= {"conda", "apptainer", "apptainer+conda", "modules"}
    assert (REPOSITORY / "workflow/Snakefile").exists() and (REPOSITORY / "config/README.md").exists()


def test_a_wheel_holds_every_file_and_starts_in_a_fresh_environment(tmp_path: Path) -> None:
    """Without dependencies: those of this environment are added to its path."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    copy = tmp_path / "source"
    files = subprocess.run(["git", "ls-files", "src", "pyproject.toml", "README.md", "LICENSE"], cwd=REPOSITORY,
                           capture_output=True, text=True, check=True).stdout.splitlines()  # fmt: skip
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    subprocess.run([*build, str(copy)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"shardmake-{shardmake.__version__}-py3-none-any.whl"

    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    python = tmp_path / "venv/bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    (site / "dependencies.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")))
    done = subprocess.run([tmp_path / "venv/bin/shardmake", "--version"], capture_output=True, text=True, check=True,
                          cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})  # fmt: skip
    assert done.stdout == f"shardmake {shardmake.__version__}\n"
    packed = {name for name in files if name.startswith("src/shardmake/")}
    missing = [name for name in packed if not (site / name.removeprefix("src/")).exists()]
    assert missing == []

"""A wheel in a fresh environment runs the demo, and any folder with a configuration, without the checkout."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

import shardmake
from tests.workflow.checkout import REPOSITORY, Checkout

pytestmark = pytest.mark.training
PACKED = ("Snakefile", "workflow", "profiles", "config", "examples", "constraints.txt")
QUICK = {"runs": {"sbatch-options": {"max_steps": 4}}}


class Installed(Checkout):
    """A folder in which a test runs the commands of a fresh environment."""

    def command(self, *words: str) -> list[str]:
        """Return a command of that environment, which borrows Snakemake and so has no script of it."""
        programs = self.root.parent / "venv/bin"
        return (
            [str(programs / "python"), "-m", *words]
            if words[0] == "snakemake"
            else [str(programs / words[0]), *words[1:]]
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment ``venv``: the wheel, and a path to the dependencies of this one."""
    root = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "ls-files", "src", "setup.py", "pyproject.toml", "README.md", "LICENSE", *PACKED],
                           cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()  # fmt: skip
    for name in files:
        (root / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "source" / name).write_bytes((REPOSITORY / name).read_bytes())
    pip, quiet = [sys.executable, "-m", "pip"], ["-q", "--no-deps"]
    subprocess.run([*pip, "wheel", *quiet, "--no-build-isolation", "-w", root, root / "source"], check=True)
    (wheel,) = root.glob("*.whl")
    assert wheel.name == f"shardmake-{shardmake.__version__}-py3-none-any.whl"
    venv.create(root / "venv")
    subprocess.run([*pip, "--python", root / "venv/bin/python", "install", *quiet, wheel], check=True)
    (site,) = (root / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")))
    packed = {name.removeprefix("src/") for name in files if name.startswith("src/shardmake/")}
    packed |= {f"shardmake/project/{name}" for name in files if name.startswith(PACKED)}
    assert [name for name in packed if not (site / name).exists()] == []
    return root


@pytest.fixture(autouse=True)
def without_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


def folder(root: Path, name: str) -> Installed:
    (root / name).mkdir()
    return Installed(root / name)


def test_the_demo_runs_in_the_folder_that_init_writes(root: Path) -> None:
    lab = folder(root, "demo")
    assert lab("shardmake", "--version").stdout == f"shardmake {shardmake.__version__}\n"
    lab("shardmake", "init", "--demo")
    (lab.root / "quick.yaml").write_text(yaml.safe_dump(QUICK))
    configuration = ("--configfile", "config/config.yaml", "quick.yaml")
    done = lab("snakemake", "--profile", "profiles/local", *configuration)
    assert "the report is runs/sbatch-options/report.html" in done.stdout
    assert "Nothing to be done" in lab("shardmake", "run", *configuration).stdout
    lab("shardmake", "verify", "published/sbatch-options")
    refused = lab("snakemake", "--profile", "slurm", "-n", check=False)
    assert "config/clusters/local.yaml has `executor: local`" in refused.stdout


def test_a_folder_with_a_configuration_alone_is_enough_and_the_installation_stays_as_it_is(
    root: Path, inputs: Path
) -> None:
    lab = folder(root, "any folder")
    (lab.root / "resources").mkdir()
    (lab.root / "resources/demo").symlink_to(inputs)
    (lab.root / "config").mkdir()
    lab.configure()
    (site,) = (root / "venv").glob("lib/python*/site-packages/shardmake")
    before = contents(site)
    assert "demo: estimating memory" in lab("shardmake", "run", "plan").stdout
    assert "Nothing to be done" in lab("shardmake", "run", "plan").stdout
    assert contents(site) == before
    assert sorted(path.name for path in lab.root.iterdir()) == [".snakemake", "config", "logs", "resources", "runs"]


def contents(folder: Path) -> dict[Path, int]:
    """Return the time of every file below ``folder`` that is not byte code."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.*") if path.suffix != ".pyc"}

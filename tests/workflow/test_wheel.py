"""A wheel in a fresh environment runs the demo, and any folder with a configuration, without the checkout.

On demand, uv installs the pinned libraries beside it, and Debian packages and pip do in the root folder of the
container definition.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

import shardmake
from tests.workflow.checkout import PROFILE, REPOSITORY, Checkout

pytestmark = pytest.mark.training
PACKED = ("Snakefile", "workflow", "profiles", "config", "examples", "constraints.txt")
QUICK = {"runs": {"sbatch-options": {"max_steps": 4}}}


class Installed(Checkout):
    """A folder in which a test runs the commands of a fresh environment."""

    environment = "venv"

    def command(self, *words: str) -> list[str]:
        """Return a command of that environment, which borrows Snakemake and so has no script of it."""
        programs = self.root.parent / self.environment / "bin"
        start = [str(programs / "python"), "-m"] if words[0] == "snakemake" else []
        return [*start, *words] if start else [str(programs / words[0]), *words[1:]]


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
    configuration = run_demo(lab)
    assert "Nothing to be done" in lab("shardmake", "run", *configuration).stdout
    lab("shardmake", "verify", "published/sbatch-options")
    refused = lab("snakemake", "--profile", "slurm", "-n", check=False)
    assert "config/clusters/local.yaml has `executor: local`" in refused.stdout


def run_demo(lab: Installed) -> tuple[str, ...]:
    """Run the demo with few steps, and return its options."""
    lab("shardmake", "init", "--demo")
    (lab.root / "quick.yaml").write_text(yaml.safe_dump(QUICK))
    configuration = ("--configfile", "config/config.yaml", "quick.yaml")
    assert "the report is runs/sbatch-options/report.html" in lab("snakemake", *PROFILE, *configuration).stdout
    return configuration


@pytest.mark.install
@pytest.mark.timeout(3600)
def test_uv_installs_from_the_constraints(root: Path) -> None:
    environment, requirements, (wheel,) = root / "uv", root / "requirements.txt", root.glob("*.whl")
    pip = ["uv", "pip"]
    pins = ["-c", REPOSITORY / "constraints.txt", REPOSITORY / "pyproject.toml", "--no-emit-find-links"]
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, environment], check=True)
    python = ["--python", environment / "bin/python"]
    subprocess.run([*pip, "compile", "-q", "--no-header", *python, *pins, "-o", requirements], check=True)
    assert "://" not in requirements.read_text(), "no address of an index"
    subprocess.run([*pip, "sync", "-q", *python, requirements], check=True)
    subprocess.run([*pip, "install", "-q", "--no-deps", *python, wheel], check=True)
    lab = folder(root, "demo with uv")
    lab.environment = "uv"
    run_demo(lab)


def sections(definition: str) -> dict[str, str]:
    """Return the header and the sections of a container definition by name; the header's name is empty."""
    parts = re.split(r"^%(\w+)$", definition, flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))


@pytest.mark.install
@pytest.mark.timeout(3600)
def test_the_container_definition_makes_a_root_folder_that_runs_the_demo(root: Path, tmp_path: Path) -> None:
    parts = sections((REPOSITORY / "envs/container.def").read_text())
    header = dict(re.findall(r"^(\w+): (.*)$", parts[""], re.MULTILINE))
    sources = subprocess.run(["apt-get", "indextargets", "--format", "$(RELEASE) $(SITE)", "Created-By: Packages"],
                             capture_output=True, text=True, check=True).stdout  # fmt: skip
    mirror = dict(line.split() for line in reversed(sources.splitlines()))[header["OSVersion"]]
    include = f"--include={header['Include'].replace(' ', ',')}"
    image = tmp_path / "image"
    subprocess.run(["debootstrap", "--variant=minbase", include, header["OSVersion"], image, mirror], check=True)
    (image / "opt/dist").mkdir()
    shutil.copy(next(root.glob("*.whl")), image / "opt/dist")
    shutil.copy(REPOSITORY / "constraints.txt", image / "opt")
    demo = """
        cd /root && . /opt/shardmake/bin/activate && shardmake init --demo
        snakemake --profile profiles/local --config 'runs={sbatch-options: {max_steps: 4}}'"""
    output = in_root(image, "\n".join([parts["post"], parts["test"], demo]))
    assert "the report is runs/sbatch-options/report.html" in output


def in_root(image: Path, script: str) -> str:
    """Run ``script`` with ``image`` as root folder, with pip's settings, network and /proc of this machine."""
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    places = ["/dev", "/proc", "/etc/resolv.conf", "/etc/hosts", pip.get("PIP_FIND_LINKS", ""), pip.get("PIP_CERT", "")]
    mounts = []
    for place in filter(os.path.exists, places):
        target = image / place.lstrip("/")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.mkdir() if Path(place).is_dir() else target.touch()
        mounts.append(shlex.join(["mount", "--rbind", place, str(target)]))
    variables = [f"{name}={value}" for name, value in pip.items()]
    path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
    inside = shlex.join(["chroot", str(image), "env", "-i", path, "HOME=/root", *variables, "sh", "-ec", script])
    command = ["unshare", "--mount", "--propagation=private", "sh", "-ec", "\n".join([*mounts, inside])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_a_configuration_alone_is_enough_and_the_installation_stays_as_it_is(root: Path, inputs: Path) -> None:
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

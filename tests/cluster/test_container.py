"""Jobs in a container on the three-node Slurm: with Apptainer if it is installed, else with a strict stand-in for it."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardmake.run.attempt import AttemptDir
from tests.cluster.fault_run import ClusterCheckout
from tests.cluster.harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.training]
REPOSITORY = Path(__file__).parents[2]
PYTHON = "/opt/image/python3"
"""Exists only in the image, so what runs with it runs in the container."""


@dataclass
class Image:
    """The folder of a sandbox that takes the programs of this machine's root through binds."""

    folder: Path
    programs: Path
    """Folder of `apptainer`, the first one in PATH."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a login node on which `apptainer` is found."""
        return {"PATH": f"{self.programs}:{os.environ['PATH']}"}

    def section(self, **changes: object) -> dict[str, object]:
        """Return the section `container` of a cluster file."""
        root = [path for path in ("/usr", "/lib", "/lib64", "/bin") if Path(path).exists()]
        binds = [f"{path}:{path}:ro" for path in (*root, sys.prefix, sys.base_prefix)]
        return {"container": {"image": str(self.folder), "python": PYTHON, "binds": binds} | changes}

    def set_python(self, program: str) -> None:
        """Make the image's Python another one."""
        write_program(self.folder / PYTHON.lstrip("/"), f'exec {program} "$@"')


@pytest.fixture
def image(shared_folder: Path) -> Image:
    folder, programs = shared_folder / "an image", shared_folder / "programs"
    for name in ("bin", "dev", "etc", "lib", "lib64", "opt/image", "proc", "root", "sys", "tmp", "usr", "var/tmp"):
        (folder / name).mkdir(parents=True)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\n")
    image = Image(folder, programs)
    image.set_python(sys.executable)
    programs.mkdir()
    if shutil.which("apptainer") is None:
        write_program(programs / "apptainer", f'exec {sys.executable} {REPOSITORY}/tests/apptainer.py "$@"')
    return image


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(cluster: Cluster, shared_folder: Path, inputs: Path) -> ClusterCheckout:
    cluster.reset()
    checkout = ClusterCheckout.create(shared_folder / "a checkout's folder", inputs)
    assert isinstance(checkout, ClusterCheckout)
    checkout.cluster = cluster
    return checkout


def test_jobs_run_in_the_container_and_an_unfit_image_is_named(checkout: ClusterCheckout, image: Image) -> None:
    refused = "cannot run Shardmake: ModuleNotFoundError: No module named"
    checkout.configure_cluster(image.section(python="/usr/bin/python3"), max_steps=30, checkpoints={"every_steps": 30})
    checkout.on_login_node("shardmake", "fetch", "demo", env=image.environment)
    assert refused in checkout.on_login_node("shardmake", "plan", "demo", env=image.environment, check=False)

    checkout.configure_cluster(image.section(), max_steps=30, checkpoints={"every_steps": 30})
    checkout.on_login_node("snakemake", "--profile", "slurm", "render", "data", env=image.environment)
    assert "cpu" in {job.partition for job in checkout.cluster.jobs()}, "data ran as a job, with the image's Python"

    image.set_python("/usr/bin/python3")
    failed = checkout.on_login_node("shardmake", "train", "demo", env=image.environment, check=False)
    assert "The container could not start the worker: " in failed and "No module named '" in failed
    assert len(checkout.training_jobs()) == 1, "the same image would fail again"

    image.set_python(sys.executable)
    log = checkout.root / "train.log"
    with log.open("w") as output:
        command = checkout.command("shardmake", "train", "demo")
        driver = checkout.cluster.popen(command, cwd=checkout.root, env=image.environment, stdout=output)
    checkout.cluster.wait_until(lambda: len(checkout.metrics()) >= 2, "training", timeout=200)
    checkout.cluster.run(["scancel", "--signal=TERM", checkout.training_jobs()[-1].id])
    assert driver.wait(300) == 0, log.read_text()
    print(log.read_text())
    assert "SIGTERM" in log.read_text() and "resuming from checkpoint-" in log.read_text(), "the ranks saved"
    assert sorted(checkout.losses()) == list(range(1, 31))
    settings = AttemptDir(checkout.run / "train/attempts/003")
    assert settings.read().container == str(image.folder)

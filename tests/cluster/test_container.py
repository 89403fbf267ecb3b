"""Jobs in a container on the three-node Slurm.

If Apptainer is installed, the image is a `.sif` file. If not, a strict stand-in runs the commands (`tests/apptainer.py`),
and the image is a folder.
"""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardmake.run.attempt import AttemptDir
from tests.cluster.fault_run import ClusterCheckout
from tests.cluster.harness import Cluster
from tests.cluster.slurm_conf import ADDRESSES
from tests.cluster.users import User, accounts, command_as

pytestmark = [pytest.mark.cluster, pytest.mark.training]
REPOSITORY = Path(__file__).parents[2]
PYTHON = "/image/python3"
"""Exists only in the image, so what runs with it runs in the container."""


@dataclass
class Image:
    """An image that takes the programs of this machine's root folder through binds."""

    folder: Path
    """The files of the image."""
    programs: Path
    """Folder of `apptainer`, the first one in PATH."""
    apptainer: str | None
    """The real program, if it is installed."""

    @classmethod
    def create(cls, root: Path) -> "Image":
        """Create an image in ``root`` whose Python is that of the tests."""
        image = cls(root / "an image", root / "programs", shutil.which("apptainer"))
        for name in ("bin", "dev", "etc", "image", "lib", "lib64", "proc", "root", "sys", "tmp", "usr", "var"):
            (image.folder / name).mkdir(parents=True)
        (image.folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (image.folder / "etc/group").write_text("root:x:0:\n")
        (image.folder / "etc/hosts").touch()
        image.programs.mkdir()
        if image.apptainer is None:
            write_program(image.programs / "apptainer", f'exec {sys.executable} {REPOSITORY}/tests/apptainer.py "$@"')
        image.set_python(sys.executable)
        return image

    @property
    def path(self) -> Path:
        return self.folder.with_suffix(".sif") if self.apptainer else self.folder

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a login node on which `apptainer` is found."""
        return {"PATH": f"{self.programs}:{os.environ['PATH']}"}

    def section(self, **changes: object) -> dict[str, object]:
        root = [path for path in ("/usr", "/lib", "/lib64", "/bin") if Path(path).exists()]
        binds = [f"{path}:{path}:ro" for path in (*root, sys.prefix, sys.base_prefix)]
        return {"container": {"image": str(self.path), "python": PYTHON, "binds": binds} | changes}

    def set_python(self, program: str) -> None:
        write_program(self.folder / PYTHON.lstrip("/"), f'exec {program} "$@"')
        if self.apptainer:
            subprocess.run([self.apptainer, "build", "--force", str(self.path), str(self.folder)], check=True)


@pytest.fixture
def image(shared_folder: Path) -> Image:
    return Image.create(shared_folder)


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
    assert AttemptDir(checkout.run / "train/attempts/003").read().container == str(image.path)


@pytest.fixture
def ada(cluster: Cluster, checkout: ClusterCheckout, shared_folder: Path) -> Iterator[User]:
    """A user who owns the checkout, on hosts where users may open `/dev/fuse`, as they may on a node of a site."""
    shared_folder.chmod(0o755)
    with accounts(cluster, ["ada"]) as (ada,), open_fuse(cluster, shared_folder / "fuse"):
        for path in (checkout.root, *checkout.root.rglob("*")):
            os.chown(path, ada.id, ada.id, follow_symlinks=False)
        yield ada


@contextmanager
def open_fuse(cluster: Cluster, device: Path) -> Iterator[None]:
    """Mount ``device``, which all users may open, over `/dev/fuse` of all hosts; this machine's own stays as it is."""
    os.mknod(device, stat.S_IFCHR, os.makedev(10, 229))
    device.chmod(0o666)
    for host in ADDRESSES:
        cluster.run(["mount", "--bind", str(device), "/dev/fuse"], node=host)
    try:
        yield
    finally:
        for host in ADDRESSES:
            cluster.run(["umount", "-l", "/dev/fuse"], node=host)


@pytest.mark.two_users
@pytest.mark.timeout(3600)
def test_a_user_runs_every_stage_in_the_container(checkout: ClusterCheckout, image: Image, ada: User) -> None:
    """Without root, Apptainer enters a user namespace, in which it mounts a `.sif` file with FUSE."""
    checkout.configure_cluster(image.section(), max_steps=40, checkpoints={"every_steps": 40})
    checkout.shorten_waits()
    log = checkout.root / "snakemake.log"
    words = command_as(ada, checkout.command("snakemake", "--profile", "slurm"), {"OMP_NUM_THREADS": "1"})
    with log.open("w") as output:
        head = checkout.cluster.popen(words, cwd=checkout.root, env=image.environment, stdout=output)
    checkout.cluster.wait_until(lambda: len(checkout.metrics()) >= 2, "training", timeout=1500)
    job = checkout.training_jobs()[-1].id
    checkout.cluster.run(["scancel", f"--signal={signal_before_the_limit(checkout, job)}", job])
    status = head.wait(1500)
    print(log.read_text())
    assert status == 0
    assert "SIGURG, which comes before the job's time limit" in log.read_text(), "the ranks read the image and saved"
    assert sorted(checkout.losses()) == list(range(1, 41))
    assert {job.partition for job in checkout.cluster.jobs()} == {"cpu", "gpu"}
    assert AttemptDir(checkout.run / "train/attempts/002").read().container == str(image.path)
    written = [checkout.root / "published/demo/model.safetensors", *checkout.run.rglob("*")]
    assert {path.lstat().st_uid for path in written} == {ada.id}


def signal_before_the_limit(checkout: ClusterCheckout, job: str) -> str:
    """Return the signal that Slurm would send to the steps of a job before its time limit."""
    script = checkout.cluster.run(["scontrol", "write", "batch_script", job, "-"]).stdout
    (line,) = [line for line in script.splitlines() if line.startswith("#SBATCH --signal=")]
    return line.removeprefix("#SBATCH --signal=").split("@")[0]

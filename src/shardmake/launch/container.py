"""Run the programs of a job in the container of the cluster file: the command of Apptainer, or srun's with pyxis.

The container gets the job's whole environment (no ``--cleanenv``): Slurm's variables, the configuration's and the
hub's must arrive. Those by which a Python of the host would be found are replaced.
"""

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import shardmake
from shardmake.config.inputs import named_paths
from shardmake.config.models import Cluster, Container, Run
from shardmake.core.environment import cache_folder, hub_cache, library_versions
from shardmake.core.errors import ConfigError
from shardmake.launch.preflight import check_versions
from shardmake.run.findings import Finding, Verdict, not_checked, ok, stops

logger = logging.getLogger(__name__)
PROBE_SECONDS = 300
"""Time limit of the check on the login node; the first start of an image may convert it."""
_PROBE = """
import json, submitit, shardmake.launch.worker
from shardmake.core.environment import library_versions
print(json.dumps(library_versions()))
"""
_START_FAILURES = re.compile(
    r"FATAL: |No module named|ModuleNotFoundError|^ImportError|^env: .*(No such file|Permission denied)|pyxis: .*"
    r"(failed|couldn't|could not|error)|apptainer: (command )?not found|unrecognized option '--container-"
    r"|PackageNotFoundError"
)
"""Output of Apptainer, pyxis, the shell or Python if the container, its Python or Shardmake cannot start."""
_NOT_STARTED = 255
"""Exit status of Apptainer if it cannot start the container."""


@dataclass(frozen=True)
class JobContainer:
    """The container of one job: the image, and what of the node is in it."""

    container: Container
    nvidia: bool
    """The job uses GPUs."""
    binds: Sequence[str]
    """``SOURCE[:TARGET[:ro]]``."""
    workdir: Path

    @property
    def image(self) -> str:
        """The image as the program expects it: a file with its absolute path, or a reference."""
        file = image_file(self.container)
        return str(file) if file else self.container.image

    @property
    def python(self) -> list[str]:
        """The command that runs Python in the container; with pyxis, the part behind srun's options."""
        start = ["env", "-u", "PYTHONHOME", f"PYTHONPATH={code_folder() or ''}", "PYTHONNOUSERSITE=1"]
        words = [*start, self.container.python]
        if self.container.kind == "pyxis":
            return words
        binds = [word for bind in self.binds for word in ("--bind", bind)]
        gpus = ["--nv"] if self.nvidia else []
        return ["apptainer", "exec", *gpus, *binds, "--pwd", str(self.workdir), self.image, *words]

    @property
    def srun_options(self) -> list[str]:
        """The options with which srun starts a step in the container; none with Apptainer."""
        if self.container.kind == "apptainer":
            return []
        return [
            f"--container-image={self.image}",
            f"--container-mounts={','.join(map(_for_pyxis, self.binds))}",
            f"--container-workdir={self.workdir}",
        ]

    @property
    def shell_function(self) -> str:
        """A function of the shell that replaces the command `shardmake` in the job of a stage.

        With pyxis it starts a step beside the one in which Snakemake runs, with all that the job has.
        """
        words = shlex.join([*self.python, "-m", "shardmake.cli"])
        if self.container.kind == "pyxis":
            step = shlex.join(["srun", "--overlap", "--nodes=1", "--ntasks=1", *self.srun_options])
            words = f'{step} --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" {words}'
        return f'shardmake() {{ {words} "$@"; }}'


@dataclass(frozen=True)
class JobEnvironment:
    """The Python environment of one job, which is not that of the login node; with the names of `JobContainer`."""

    folder: Path
    srun_options: Sequence[str] = ()

    @property
    def python(self) -> list[str]:
        """The command that runs Python, with the code of this checkout if there is one."""
        return ["env", "-u", "PYTHONHOME", f"PYTHONPATH={code_folder() or ''}", str(self.folder / "bin/python")]

    @property
    def shell_function(self) -> str:
        """See `JobContainer`."""
        return f'shardmake() {{ {shlex.join([*self.python, "-m", "shardmake.cli"])} "$@"; }}'


def job_container(
    cluster: Cluster, run_folders: Iterable[Path] = (), runs: Iterable[Run] = ()
) -> JobContainer | JobEnvironment | None:
    """Return the container of the jobs of ``runs``, which are in ``run_folders``, or their own environment.

    None if they use the login node's environment.
    """
    container = cluster.slurm.container
    if container is None:
        return JobEnvironment(Path(cluster.environment)) if cluster.environment else None
    shared = [Path.cwd(), code_folder(), hub_cache(cluster.cache), cache_folder()]
    for folder in run_folders:
        # Links in a run's folder and in its parts may lead to another file system.
        links = [path for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_symlink()]
        shared += [folder.parent, folder, *links]
    shared += [path for run in runs for path in named_paths(run)]
    local = [Path(path) for path in (cluster.scratch_above_variables, cluster.nvme_path) if path]
    folders = [path for path in shared if path is not None and path.exists()]
    binds = [str(path) for path in distinct_folders([*folders, *local])]
    return JobContainer(container, not cluster.is_cpu, (*binds, *container.binds), Path.cwd())


def distinct_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of ``paths``, by their names and where their links lead, without those below another one."""
    folders = {
        place if place.is_dir() or not place.exists() else place.parent
        for path in paths
        for place in (path.absolute(), path.resolve())
    }
    return sorted(folder for folder in folders if not any(parent in folders for parent in folder.parents))


def code_folder() -> Path | None:
    """Return the folder of the checkout from which this Shardmake is imported; None if it is installed as a package.

    The container imports the same code. A package must be installed in the image.
    """
    folder = Path(shardmake.__file__).parents[1]
    return None if next(folder.glob("shardmake-*.dist-info"), None) else folder


def image_file(container: Container) -> Path | None:
    """Return the image's file or folder; None for a reference to a registry."""
    image = container.image
    is_path = image.startswith(("/", "./")) if container.kind == "pyxis" else "://" not in image
    return Path(image).absolute() if is_path else None


def check_job_environment(cluster: Cluster) -> Iterator[Finding]:
    """Compare the environment of the jobs with this one; its programs may be of another architecture."""
    if cluster.environment is None:
        return
    name, python = "environment of the jobs", Path(cluster.environment) / "bin/python"
    advice = "`shardmake doctor --node` checks it on a node."
    if not python.exists():
        yield not_checked(name, f"{python} is not on this node", advice)
        return
    if _machine(python) not in ("", _machine(Path(sys.executable))):
        yield not_checked(name, f"{python} is built for another architecture", advice)
        return
    command = [*JobEnvironment(Path(cluster.environment)).python, "-c", _PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        yield stops(name, f"{python} cannot start Shardmake: {reason}", "Install Shardmake in that environment.")
    else:
        there, advice = json.loads(done.stdout.splitlines()[-1]), "Install the same versions in both environments."
        different = check_versions(there, library_versions(), f"in {cluster.environment}", advice)
        yield from different or [ok(name, f"{cluster.environment}, with the versions of this one")]


def _machine(program: Path) -> str:
    """Return the architecture in the header of an ELF program; empty for another file."""
    with program.open("rb") as file:
        header = file.read(20)
    return header[18:20].hex() if header.startswith(b"\x7fELF") else ""


def check_container(cluster: Cluster, run_folders: Iterable[Path] = (), runs: Iterable[Run] = ()) -> None:
    """Check the image, and start Shardmake in it if this machine has Apptainer; or check the jobs' environment.

    Raises:
        ConfigError: The image cannot be read, a path cannot be bound, or the jobs' Python cannot run Shardmake.
    """
    for wrong in check_job_environment(cluster):
        if wrong.verdict is Verdict.STOPS:
            raise ConfigError(f"environment: {wrong.found}. {wrong.advice}")
    job = job_container(cluster, run_folders, runs)
    if not isinstance(job, JobContainer):
        return
    file = image_file(job.container)
    if file and not os.access(file, os.R_OK):
        reason = "it cannot be read" if file.exists() else "there is no such file"
        raise ConfigError(
            f"slurm.container.image: {str(file)!r}: {reason}. Name an image on a file system that all nodes see."
        )
    for path in [*job.binds[: len(job.binds) - len(job.container.binds)], str(job.workdir)]:
        if ":" in path or "," in path:
            raise ConfigError(
                f"slurm.container: {path!r} cannot be bound, because {job.container.kind} separates paths at ':' and "
                "','. Rename the folder."
            )
    if job.container.kind == "apptainer":
        _probe(job)


def start_failure(lines: Iterable[str]) -> str:
    """Return the first of a step's ``lines`` that says why the worker did not start; empty without one."""
    return next((line.strip().rstrip(".") for line in lines if _START_FAILURES.search(line)), "")


def _probe(job: JobContainer) -> None:
    """Run Shardmake in the container on this machine, and compare the versions of its libraries with those here."""
    if shutil.which("apptainer") is None:
        logger.info("This machine has no apptainer: the nodes check the container before training.")
        return
    try:
        done = subprocess.run([*job.python, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("The container did not start here within %d s. The plan continues.", PROBE_SECONDS)
        return
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    if done.returncode == _NOT_STARTED:
        logger.warning("Apptainer did not start the container on this machine (%s). The plan continues.", last)
        return
    problems = [last]
    if done.returncode == 0:
        found: Mapping[str, str] = json.loads(done.stdout.splitlines()[-1])
        problems = [row.found for row in check_versions(found, library_versions(), "in the container")]
    if problems:
        raise ConfigError(
            f"slurm.container: {job.container.python} of {job.image} cannot run Shardmake: {'; '.join(problems)}. "
            "Install Shardmake's libraries in the image in the versions of this environment, or set "
            "slurm.container.python to a Python that has them."
        )


def _for_pyxis(bind: str) -> str:
    """Return ``SOURCE:TARGET[:ro]``."""
    source, *rest = bind.split(":")
    return ":".join((source, *(rest or [source])))

"""``shardmake submit``: run Snakemake and the drivers in a Slurm job instead of on the login node."""

import contextlib
import fcntl
import getpass
import io
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from shardmake.commands.workflow import snakemake_arguments
from shardmake.config.invocation import NOTE_VARIABLE, config_options
from shardmake.config.load import load_cluster, load_config
from shardmake.config.models import Cluster, Config
from shardmake.core.atomic import digest, write_text
from shardmake.core.errors import ConfigError, SlurmError
from shardmake.core.temporary import temporary_folder
from shardmake.core.units import plural
from shardmake.launch import driver_script
from shardmake.run.driver_job import FOLDER, DriverDir, DriverState, Workflow, driver_dirs, new_driver_dir
from shardmake.run.paths import short_path

logger = logging.getLogger(__name__)
_NOT_REPEATABLE: Final = ("force", "forceall", "forcerun", "touch", "unlock", "directory")
"""Options of Snakemake by the names of its parser: each driver job would do the same again, or search elsewhere."""


def submit(arguments: Sequence[str], runs: Path) -> None:
    """Prepare the runs here, submit the driver job, and print what follows; refuse a run that another driver has."""
    words = snakemake_arguments(arguments, profile="slurm")
    options = _options(words)
    with _lock(runs):
        _clear_up(runs)
    with temporary_folder("submit") as folder:
        note = folder / "config"
        _prepare(words, note, dry_run=options.dryrun)
        file = Path(note.read_text())
    config = load_config(file)
    cluster = load_cluster(Path(config.cluster))
    _check(config, cluster, options.targets)
    if options.dryrun:
        script = driver_script.batch_script(cluster, f"{driver_script.PREFIX}NAME", DriverDir(runs / FOLDER / "NNN"))
        logger.info("\nThe driver job:\n%s", script)
        return
    with _lock(runs):
        driver_script.refuse_while_driven(runs, config.runs.keys())
        _start(words, file, config, cluster, runs)


def _options(words: Sequence[str]) -> Any:
    """Return Snakemake's options; raise a `ConfigError` for one that a job cannot repeat."""
    from snakemake.cli import parse_args

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            options = parse_args(words)[1]
    except SystemExit as end:
        if not end.code:
            raise  # --version
        text = printed.getvalue().strip()
        raise ConfigError(f"Snakemake does not accept the arguments. Nothing was submitted. It says:\n{text}") from None
    for option in _NOT_REPEATABLE:
        if getattr(options, option):
            raise ConfigError(
                f"--{option} cannot be used with submit: a driver job that continues runs Snakemake with the same "
                "arguments again. To run a step again, remove its file first (docs/reference/commands.md)."
            )
    return options


def _prepare(words: Sequence[str], note: Path, *, dry_run: bool) -> None:
    """Run all rules before the first that needs a job with Snakemake on this machine.

    They need the internet, and refuse what cannot work. Raises a `ConfigError` if Snakemake fails, after its messages.
    """
    short = [] if dry_run else ["--omit-from", *sorted(driver_script.RULES_WITH_JOBS)]
    command = [sys.executable, "-m", "snakemake", *words, *short]
    status = subprocess.run(command, env=os.environ | {NOTE_VARIABLE: str(note)}, check=False).returncode
    if status:
        raise ConfigError(f"Nothing was submitted, because Snakemake ended with status {status}. Its message is above.")


def _check(config: Config, cluster: Cluster, targets: Sequence[str]) -> None:
    """Raise a `ConfigError` if the runs cannot be done in a job of this cluster."""
    if cluster.executor != "slurm":
        raise ConfigError(f"There is nothing to submit to: {config.cluster} has `executor: {cluster.executor}`.")
    if cluster.internet_on_compute_nodes or not {*(targets or ["report"])} & {"push", "report", "all"}:
        return
    for name, run in config.runs.items():
        for to in run.push.destinations if run.push else ():
            if not to.startswith("file:"):
                raise ConfigError(
                    f"The driver job cannot push {name} to {to}: {config.cluster} has `internet_on_compute_nodes: "
                    "false`. Run `shardmake submit evaluate`; once that is done, `snakemake --profile slurm` on a "
                    "login node pushes and writes the report. Or set the key to true if nodes of that partition can "
                    "reach the destination."
                )


@contextlib.contextmanager
def _lock(runs: Path) -> Iterator[None]:
    """Hold the lock under which driver jobs are submitted, so that two never work on one run."""
    (runs / FOLDER).mkdir(parents=True, exist_ok=True)
    with (runs / FOLDER / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clear_up(runs: Path) -> None:
    """Remove what driver jobs that were killed left: locks of Snakemake, and jobs of stages."""
    for folder in driver_dirs(runs):
        workflow, state = Workflow.read(folder.workflow), DriverState.read(folder.state)
        is_hidden = driver_script.is_hidden(workflow) and state.end != "cancelled"
        if state.snakemake_started and not is_hidden and not driver_script.jobs_of(workflow.name):
            driver_script.cancel_stage_jobs(workflow.name)
            driver_script.remove_locks(workflow.runs)
            state.model_copy(update={"snakemake_started": False}).write(folder.state)


def _start(words: Sequence[str], file: Path, config: Config, cluster: Cluster, runs: Path) -> None:
    """Write the folder of the workflow, submit its first driver job, and print what follows."""
    folder = new_driver_dir(runs)
    name = f"{driver_script.PREFIX}{digest(str(folder.root.resolve()))[:8]}"
    Workflow(
        name=name,
        user=getpass.getuser(),
        runs=list(config.runs),
        config=str(file),
        arguments=config_options(words)[1],  # the merged file has the configuration
        offline=not cluster.internet_on_compute_nodes,
        lead_seconds=driver_script.lead_seconds(cluster.slurm),
    ).write(folder.workflow)
    write_text(folder.script, driver_script.batch_script(cluster, name, folder))
    DriverState(jobs=[]).write(folder.state)
    try:
        job = driver_script.submit_script(folder.script, name)
    except SlurmError:
        shutil.rmtree(folder.root)
        raise
    logger.info(
        "Submitted driver job %s for %s. Its output: %s\nTo look at the runs: shardmake status. To stop a training: "
        "shardmake stop NAME. To end the driver job: scancel %s; trainings keep running, and `shardmake submit` "
        "reattaches to them.",
        job, plural(len(config.runs), "run"), short_path(folder.log), job,
    )  # fmt: skip

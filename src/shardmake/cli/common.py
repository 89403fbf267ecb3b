"""The options of several commands, and the opening of a run.

Each command starts without the configuration's models and pydantic: a function imports what it needs.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmake.core import environment
from shardmake.core.login_memory import turn
from shardmake.core.permissions import share
from shardmake.core.private_names import check_libraries, library_warnings
from shardmake.run.paths import RunDir

if TYPE_CHECKING:
    from shardmake.config.models import Cluster, Config, Run

logger = logging.getLogger(__name__)

Name = Annotated[str, typer.Argument(help="Name of the run in the configuration.")]
Sweep = Annotated[str | None, typer.Option(help="Every run of this sweep instead.")]
ConfigFiles = Annotated[
    list[Path],
    typer.Option(
        "--config", envvar=environment.CONFIG_VARIABLE, help="Configuration file. Later ones override earlier ones."
    ),
]
Runs = Annotated[Path, typer.Option(envvar=environment.RUNS_VARIABLE, help="Folder of the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CONFIG = [Path("config/config.yaml")]
MOST_RANKS = 1_000_000

written_folder: ContextVar[Path] = ContextVar("written_folder", default=Path())
"""Folder that the command writes to, for error messages."""


def read(files: list[Path]) -> "tuple[Config, Cluster]":
    """Return the configuration of ``files`` and the cluster that it names."""
    from shardmake.config.load import load_cluster, load_config

    config = load_config(*files)
    return config, load_cluster(Path(config.cluster))


def read_again(name: str, files: list[Path], runs: Path) -> "tuple[Config, Cluster]":
    """Return the configuration as `read`, or the last one with which the workflow made the run ``name``, or any run."""
    from shardmake.config.invocation import last_merged

    problem = f"{files[0]} does not exist" if files == CONFIG and not files[0].exists() else ""
    if not problem:
        found = read(files)
        if not name or name in found[0].runs or not (runs / name).is_dir():
            return found
        problem = f"{name} is not in {', '.join(map(str, files))}"
    if (merged := last_merged(name)) is None:
        return read(files)
    logger.warning("%s. Shown with the configuration of the last workflow here: --config %s", problem, merged)
    return read([merged])


def open_run(name: str, files: list[Path], runs: Path, *, on_node: bool = False) -> "tuple[Run, Cluster, RunDir]":
    """Return the run's configuration, its cluster and its folder; ``on_node``: for a stage that may run on a node."""
    from shardmake.config.load import get_run
    from shardmake.core.build_locks import remove_stale_locks
    from shardmake.run.record import check_format

    config, cluster = read(files)
    run, rundir = get_run(config, name), RunDir(runs / name)
    rundir.refuse_links()
    check_format(rundir)
    written_folder.set(rundir.root)
    os.environ.update(
        environment.hub_environment(cluster.cache, offline=on_node and not cluster.internet_on_compute_nodes)
    )
    if on_node:
        os.environ.update(environment.kernel_caches(cluster.scratch) | cluster.variables)
        for message in remove_stale_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"])):
            logger.warning(message)
    if cluster.shared:
        share(runs, rundir.root, Path("logs"), *([Path(cluster.cache)] if cluster.cache else []))
    return run, cluster, rundir


@contextlib.contextmanager
def stage(
    stage: str, name: str, files: list[Path], runs: Path, *, on_node: bool = False
) -> "Iterator[tuple[Run, Cluster, RunDir]]":
    """Open a run as `open_run`, record the settings of ``stage`` after its success, and notify of its end."""
    from shardmake.config.inputs import check_inputs
    from shardmake.config.user_files import read_user_files
    from shardmake.run.driver_job import refuse_ended
    from shardmake.run.notification import notified
    from shardmake.run.own_files import check_refused
    from shardmake.run.settings import recorded_settings

    check_libraries()
    for message in library_warnings() if stage in ("plan", "train") else ():
        logger.warning(message)
    run, cluster, rundir = open_run(name, files, runs, on_node=on_node)
    refuse_ended(name)
    with notified(stage, run, rundir):
        if stage in ("fetch", "plan"):
            from shardmake.plan.refusals import refuse_before_fetch

            check_inputs(name, run)
            refuse_before_fetch(run, cluster)
            check_refused(read_user_files(run), run)
        turns = turn(cluster.login_memory_gib) if stage in ("plan", "render") else contextlib.nullcontext()
        with turns, recorded_settings(stage, run, cluster, rundir):
            yield run, cluster, rundir

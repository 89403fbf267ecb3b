"""The commands that run, show and control runs, and those of administration."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardmake.cli.common import CONFIG, AsJson, ConfigFiles, Name, Runs, Sweep, open_run, read_again
from shardmake.commands.options import options_of
from shardmake.core.errors import ConfigError
from shardmake.core.log import configure_logging
from shardmake.doctor.options import Options
from shardmake.run.paths import RUNS, RunDir

app = typer.Typer(rich_markup_mode=None)
logger = logging.getLogger(__name__)

StageName = Literal["fetch", "plan", "render", "data", "train", "consolidate", "evaluate", "push", "report"]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(context: typer.Context) -> None:
    """Run Snakemake in this folder: every stage of every run, or up to a stage such as `plan`.

    Workflow and profile are those of the folder, or else of the installed Shardmake. All arguments are Snakemake's,
    such as -n (a dry run) and --configfile FILE.
    """
    from shardmake.commands.workflow import snakemake_arguments

    os.execv(sys.executable, [sys.executable, "-m", "snakemake", *snakemake_arguments(context.args)])


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def submit(context: typer.Context) -> None:
    """Run Snakemake and the drivers in a small Slurm job, which submits itself again before its time limit.

    All arguments are Snakemake's, such as targets, --configfile FILE or -n. The short stages run here first.
    """
    from shardmake.commands.submit import submit as submit_driver

    submit_driver(context.args, RUNS)


@app.command()
def status(
    name: Annotated[str, typer.Argument(help="Name of a run. Default: a table of all runs.")] = "",
    config: ConfigFiles = CONFIG,
    runs: Runs = RUNS,
    watch: Annotated[bool, typer.Option("--watch", help="Renew the table until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run or of all runs, of trainings and of results; changes nothing."""
    from shardmake.commands.driver_state import describe_drivers
    from shardmake.commands.status import COLUMNS, cells, describe, print_table, read_states, status_json
    from shardmake.commands.status import watch as watch_states
    from shardmake.config.load import get_run

    read, cluster = read_again(name, config, runs)
    if name:
        run = get_run(read, name)
        read = read.model_copy(update={"runs": {name: run}})
    if watch and not as_json:
        watch_states(lambda: read_states(read, cluster, runs))
    elif as_json:
        typer.echo(json.dumps(status_json(read, cluster, runs), indent=2))
    elif name:
        typer.echo(describe(run, cluster, RunDir(runs / name)))
    else:
        print_table([*COLUMNS], [cells(state) for state in read_states(read, cluster, runs)])
        if cluster.executor == "slurm":
            typer.echo("\n".join(describe_drivers(runs, read.runs)), nl=False)


@app.command("list")
def list_all(config: ConfigFiles = CONFIG, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """List the runs of the configuration and folders of other runs, with size, age and owner."""
    from shardmake.commands.listing import LISTED, list_runs
    from shardmake.core.tables import print_table

    found = list_runs(*read_again("", config, runs), runs)
    if as_json:
        typer.echo(json.dumps([run.as_json() for run in found], indent=2))
    else:
        print_table(LISTED, [run.cells() for run in found])


@app.command()
def logs(
    name: Name,
    stage: Annotated[
        StageName | None, typer.Argument(help="Default: the one that failed, is queued or runs, else train.")
    ] = None,
    config: ConfigFiles = CONFIG,
    runs: Runs = RUNS,
    rank: Annotated[int | None, typer.Option(help="Only this rank: its lines and its error.", min=0)] = None,
    attempt: Annotated[int | None, typer.Option(help="Number of the attempt. Default: the last one.", min=1)] = None,
    lines: Annotated[int, typer.Option(help="Lines of each log.", min=1)] = 40,
    driver: Annotated[bool, typer.Option("--driver", help="The output of the driver job instead.")] = False,
) -> None:
    """Print the end of the logs of a stage, also of a Slurm job, or of an attempt of the training."""
    from shardmake.commands.control import read_logs
    from shardmake.commands.driver_state import read_driver_log
    from shardmake.commands.status import unfinished_stage
    from shardmake.config.load import get_run

    read, cluster = read_again(name, config, runs)
    run, rundir = get_run(read, name), RunDir(runs / name)
    if driver:
        typer.echo(read_driver_log(rundir, lines))
        return
    found = stage or (unfinished_stage(run, cluster, rundir) if rank is None and attempt is None else "train")
    typer.echo(read_logs(rundir, found, rank, lines, attempt))


@app.command()
def compare(
    names: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Names of at least two runs.")] = None,
    sweep: Sweep = None,
    config: ConfigFiles = CONFIG,
    runs: Runs = RUNS,
    page: Annotated[Path, typer.Option(help="Page to write.")] = Path("compare.html"),
    as_json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, losses, evaluation, speed, hours and memory; write a page with a figure."""
    from shardmake.commands.status import print_comparison, select_runs
    from shardmake.report.comparison import compare as compare_runs
    from shardmake.report.comparison import write_comparison

    found, cluster = read_again("", config, runs)
    comparison = compare_runs(select_runs(found, names or [], sweep), cluster, runs)
    write_comparison(comparison, f"Sweep {sweep}" if sweep else "Comparison of runs", page)
    if as_json:
        typer.echo(json.dumps(comparison.as_json(), indent=2))
    else:
        print_comparison(comparison)
    logger.info("Wrote %s.", page)


@app.command()
def stop(name: Name = "", sweep: Sweep = None, config: ConfigFiles = CONFIG, runs: Runs = RUNS) -> None:
    """Let the training of a run or of a sweep save and stop after its current step; the workflow resumes it."""
    from shardmake.commands.control import for_each, request_stop

    opened = [open_run(one, config, runs) for one in _runs_of(name, sweep, config)]
    typer.echo(for_each([rundir for _, _, rundir in opened], lambda rundir: request_stop(rundir, opened[0][1])))


@app.command()
def cancel(
    name: Name = "",
    sweep: Sweep = None,
    config: ConfigFiles = CONFIG,
    runs: Runs = RUNS,
    driver: Annotated[bool, typer.Option("--driver", help="The driver job instead; trainings keep running.")] = False,
) -> None:
    """Cancel the training job of a run or of a sweep at once; steps since the newest checkpoint may be lost."""
    from shardmake.commands.control import cancel as cancel_job
    from shardmake.commands.control import for_each
    from shardmake.commands.driver_state import cancel_driver

    if driver:
        typer.echo(for_each([RunDir(runs / one) for one in _runs_of(name, sweep, config)], cancel_driver))
        return
    opened = [open_run(one, config, runs) for one in _runs_of(name, sweep, config)]
    typer.echo(for_each([rundir for _, _, rundir in opened], lambda rundir: cancel_job(rundir, opened[0][1])))


def _runs_of(name: str, sweep: str | None, config: list[Path]) -> list[str]:
    from shardmake.config.load import load_config, sweep_runs

    if bool(name) == (sweep is not None):
        raise ConfigError("The run is missing. Name either a run, or a sweep with --sweep NAME.")
    read = load_config(*config)
    return [name] if sweep is None else sweep_runs(read, sweep)


@app.command()
def retrain(name: Name, config: ConfigFiles = CONFIG, runs: Runs = RUNS) -> None:
    """Set a run's training aside, so that the workflow trains it again from the start."""
    from shardmake.commands.control import retrain as set_training_aside
    from shardmake.config.load import get_run, load_config

    get_run(load_config(*config), name)
    typer.echo(set_training_aside(RunDir(runs / name)))


@app.command()
def clean(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs to remove whole, in whatever state they are.")
    ] = None,
    runs: Runs = RUNS,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the folders. Default: only list them.")] = False,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Those that other settings or `retrain` left behind instead.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: Annotated[
        list[Path] | None, typer.Option(help="Only the runs of this configuration. Default: all in the folder.")
    ] = None,
) -> None:
    """List what finished and pushed runs no longer need, never an only copy; or whole runs, or what was set aside."""
    from shardmake.commands.clean import clean as clean_runs
    from shardmake.commands.clean import clean_named
    from shardmake.config.load import load_cluster, load_config
    from shardmake.run.disk_budget import warn_of_purge

    if names or set_aside:
        confirm = (lambda question: yes or typer.confirm(question)) if remove else None
        clean_named(runs, names or [], set_aside=set_aside, confirm=confirm)
        return
    read = load_config(*config) if config else None
    if read:
        days = load_cluster(Path(read.cluster)).purge_days
        for name in read.runs:
            warn_of_purge(RunDir(runs / name), days)
    clean_runs(runs, remove=remove, names=set(read.runs) if read else None)


@app.command()
@options_of(Options)
def doctor(options: Options, as_json: AsJson = False) -> None:
    """Check this login node and, with --node, compute nodes; write a cluster file with what they have."""
    from shardmake.doctor import command
    from shardmake.run.findings import print_table, summarize

    if as_json:
        configure_logging(quiet=True)
    result = command.Result(command.check_login(options), [])
    if not as_json:
        print_table("This machine", result.login)
    if options.node:
        result = command.check_compute_nodes(options, result.login)
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        if options.node:
            print_table("Compute nodes", result.nodes)
            typer.echo(f"\nRecords and logs: {result.folder}")
        typer.echo(summarize(result.findings))
    if result.exit_status:
        raise typer.Exit(result.exit_status)

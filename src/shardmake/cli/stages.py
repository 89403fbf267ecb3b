"""The commands of the stages."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from shardmake.cli.common import CONFIG, ConfigFiles, Name, Runs, open_run, read, stage, written_folder
from shardmake.commands.consolidate import MOST_PROCESSES, MergeRequest, merge, require_run
from shardmake.commands.options import options_of
from shardmake.core.environment import import_without_torch
from shardmake.core.permissions import share_tree
from shardmake.run.paths import RUNS, RunDir

if TYPE_CHECKING:
    from shardmake.config.models import Run
    from shardmake.run.length import Sampled

app = typer.Typer(rich_markup_mode=None)
logger = logging.getLogger(__name__)

FetchPart = Literal["all", "description", "weights"]
CHECK_SECONDS: Final = 300
CHECKED_PER_SECOND: Final = 1 << 20
"""Bytes of data for which the plan's check gets a further second; every row is read, twice."""


@app.command()
def fetch(
    name: Name,
    config: ConfigFiles = CONFIG,
    runs: Runs = RUNS,
    part: Annotated[
        FetchPart, typer.Option(help="All files, all but the weights (enough for a plan), or the weights.")
    ] = "all",
    dequantize: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write a model of quantized weights there in bf16.")
    ] = None,
    add_tokens: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write the model there with the tokens of --token.")
    ] = None,
    token: Annotated[
        list[str] | None, typer.Option(help="New token for --add-tokens, or @FILE with one a line; may be repeated.")
    ] = None,
    special: Annotated[bool, typer.Option(help="The tokens of --token are special: decoding can skip them.")] = False,
) -> None:
    """Download model and data and pin them to their commits; needs internet access."""
    from shardmake.fetch.add_tokens import add_tokens as with_tokens
    from shardmake.fetch.add_tokens import named_tokens
    from shardmake.fetch.dequantize import dequantize as in_bf16
    from shardmake.fetch.stage import fetch as bring

    def merge_start(run: "Run", source: Path, base: Path, out: Path) -> None:
        from shardmake.consolidate.stage import merge_start

        merge_start(run, source, base, out)

    with stage("fetch", name, config, runs) as (run, cluster, rundir):
        tokens = named_tokens(token, add_tokens, special=special)
        sources = bring(run, rundir, "all" if dequantize or tokens else part, merge_start)
        if dequantize:
            in_bf16(Path(sources.model.path), dequantize)
        if add_tokens:
            own = run.trust_remote_code
            with_tokens(Path(sources.model.path), add_tokens, tokens, special=special, trust_remote_code=own)
    if cluster.shared and cluster.cache:
        share_tree(Path(cluster.cache))


def _check_data(run: "Run", rundir: RunDir) -> "tuple[list[int], list[Sampled]]":
    """Return the rows of each source and the sampled ones, read in a process with limits that grow with the files."""
    from shardmake.config.inputs import local_files
    from shardmake.core.process import within_limits

    def read() -> "tuple[list[int], list[Sampled]]":
        if not run.trust_remote_code:
            import_without_torch()
        from shardmake.data.check import check_first_rows, check_sources
        from shardmake.evaluate.prompts import check_prompts

        found = check_sources(run), check_first_rows(run, rundir=rundir)
        check_prompts(run)
        return found

    size = sum(Path(file).stat().st_size for file in local_files(run, "data"))
    seconds = CHECK_SECONDS + size // CHECKED_PER_SECOND
    return within_limits(f"Reading the data with the tokenizer of {run.model}", read, seconds=seconds)


@app.command()
def plan(
    name: Name,
    config: ConfigFiles = CONFIG,
    runs: Runs = RUNS,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Plan away from the cluster, from config.json alone. The plan is for reading."),
    ] = False,
) -> None:
    """Estimate the memory of every strategy and choose the fastest that fits."""
    from shardmake.config.checks import with_first_model
    from shardmake.config.load import get_run
    from shardmake.evaluate.backends import check_backend
    from shardmake.evaluate.harness import prepare_tasks
    from shardmake.launch.submission_check import check_submission, expected_starts
    from shardmake.plan.schedule import check_schedule
    from shardmake.plan.stage import describe, describe_checkpoints, plan_offline, plan_run
    from shardmake.push.check import check_push
    from shardmake.render.script_arguments import check_script_arguments
    from shardmake.run.length import estimate_length
    from shardmake.run.plan import MemoryEstimates, Plan
    from shardmake.run.sources import localize
    from shardmake.train.trackers import check_trackers

    if offline:
        files, cluster = read(config)
        run, rundir = get_run(files, name), RunDir(runs / name)
        local = (
            localize(run, rundir) if rundir.sources.exists() or run.lora.adapter else with_first_model(name, files.runs)
        )
        made = plan_offline(local, cluster, rundir)
        typer.echo(f"{describe(made, rundir)}\n{describe_checkpoints(made, run, cluster, rundir)}")
        return

    def check_plan(plan: Plan) -> None:
        warnings.extend(check_script_arguments(plan.choice, run))
        check_submission(plan, run, cluster, rundir)

    with stage("plan", name, config, runs) as (named, cluster, rundir):
        run = localize(named, rundir)
        check_trackers(run.report_to)
        check_push(run.push, Path(run.model))
        check_backend(run.evaluation.backend, cluster.nvme_path)
        prepare_tasks(run.evaluation)
        counts, sampled = _check_data(run, rundir)
        length = estimate_length(run, counts, sampled, cluster.processes_per_node)
        warnings = length.check() if length else []
        said = length.describe() if length else "", check_schedule(run, length.steps) if length else check_schedule(run)
        made = plan_run(run, cluster, rundir, check_plan)
    typer.echo(describe(made, rundir))
    for line in filter(None, said):
        typer.echo(f"  {line}")
    typer.echo(describe_checkpoints(made, run, cluster, rundir))
    for warning in warnings:
        logger.warning(warning)
    if starts := expected_starts(made, MemoryEstimates.read(rundir.memory), cluster, rundir):
        typer.echo(f"  {starts}")


@app.command()
def render(
    name: Name,
    config: ConfigFiles = CONFIG,
    runs: Runs = RUNS,
    show: Annotated[bool, typer.Option("--show", help="Print the submission without writing files.")] = False,
) -> None:
    """Render the Accelerate and DeepSpeed files from the plan and check them."""
    from shardmake.render.stage import render as render_run
    from shardmake.run.plan import Plan
    from shardmake.run.sources import localize

    if show:
        from shardmake.commands.preview import preview

        run, cluster, rundir = open_run(name, config, runs)
        typer.echo(preview(Plan.read(rundir.plan), localize(run, rundir), cluster, rundir))
        return
    with stage("render", name, config, runs) as (run, cluster, rundir):
        for line in render_run(Plan.read(rundir.plan), localize(run, rundir), cluster, rundir):
            logger.info("%s", line)
    logger.info("Rendered %s, %s and %s.", rundir.accelerate, rundir.deepspeed, rundir.training)


@app.command()
def data(
    name: Name,
    config: ConfigFiles = CONFIG,
    runs: Runs = RUNS,
    cpus: Annotated[int, typer.Option(help="Processes for tokenization.", min=1, max=MOST_PROCESSES)] = 1,
    show: Annotated[
        int, typer.Option(help="Print so many training examples, loss tokens in [[ ]], and write nothing.", min=0)
    ] = 0,
) -> None:
    """Tokenize and pack the data."""
    from shardmake.config.inputs import check_inputs
    from shardmake.run.length import Length
    from shardmake.run.sources import localize

    if show:
        run, _, rundir = open_run(name, config, runs)
        check_inputs(name, run)
        from shardmake.data.stage import preview

        for text in preview(localize(run, rundir), show, rundir):
            typer.echo(text)
        return
    with stage("data", name, config, runs, on_node=True) as (run, cluster, rundir):
        if not run.trust_remote_code:  # whose code may need torch
            import_without_torch()
        from shardmake.data.stage import prepare

        train = prepare(localize(run, rundir), rundir, cpus=cpus).train
        if not run.data.is_raw:
            length = Length(run, train.examples, train.tokens, train.sequences, cluster.processes_per_node)
            logger.info("%s.", length.describe())
            for warning in length.check():
                logger.warning(warning)


@app.command()
def train(name: Name, config: ConfigFiles = CONFIG, runs: Runs = RUNS) -> None:
    """Adopt the run's training job or submit one, and resume it until training finishes."""
    from shardmake.launch.driver import train as drive
    from shardmake.run.sources import check_raw, localize, require_weights

    with stage("train", name, config, runs) as (run, cluster, rundir):
        require_weights(rundir)
        if run.data.is_raw:
            check_raw(rundir)
        drive(localize(run, rundir), cluster, rundir)


@app.command()
@options_of(MergeRequest)
def consolidate(
    request: MergeRequest,
    source: Annotated[str, typer.Argument(help="Name of a run, or a checkpoint's folder.")],
    out: Annotated[Path | None, typer.Argument(help="Model folder to write, if the source is a checkpoint.")] = None,
    config: ConfigFiles = CONFIG,
    runs: Runs = RUNS,
) -> None:
    """Merge a sharded checkpoint into a model folder."""
    from shardmake.consolidate.stage import consolidate_run
    from shardmake.consolidate.stream import show_progress
    from shardmake.run.sources import localize

    if out is not None:
        written_folder.set(out)
        if listed := merge(request, Path(source), out):
            typer.echo(listed)
        return
    require_run(request, source, config)
    with stage("consolidate", source, config, runs, on_node=True) as (run, _, rundir):
        consolidate_run(localize(run, rundir), rundir, workers=request.workers, progress=show_progress)


@app.command()
def evaluate(name: Name, config: ConfigFiles = CONFIG, runs: Runs = RUNS) -> None:
    """Measure the loss of the base and the tuned model, and generate answers with both."""
    from shardmake.evaluate.stage import evaluate as measure

    with stage("evaluate", name, config, runs, on_node=True) as (run, cluster, rundir):
        measure(run, rundir, cluster)


@app.command()
def push(name: Name, config: ConfigFiles = CONFIG, runs: Runs = RUNS) -> None:
    """Push the model and verify the pushed files."""
    from shardmake.push.stage import push as send

    with stage("push", name, config, runs) as (run, _, rundir):
        send(run, rundir)


@app.command()
def report(name: Name, config: ConfigFiles = CONFIG, runs: Runs = RUNS) -> None:
    """Write the report of the run: losses, speed, memory, samples."""
    from shardmake.config.checks import chain_of
    from shardmake.config.load import load_config
    from shardmake.report.stage import write_report
    from shardmake.run.notification import notified

    run, cluster, rundir = open_run(name, config, runs)
    known = load_config(*config).runs
    before = {other: known[other] for other in chain_of(name, known)[:-1]}
    with notified("report", run, rundir):
        logger.info("Wrote %s.", write_report(run, rundir, cluster.profile, before))

"""The command line: one subcommand per stage, no logic. Heavy libraries are imported by the stage that needs them."""

import contextlib
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from shardmake import __version__
from shardmake.commands.consolidate import KEY_HELP, MOST_PROCESSES, MergeRequest, merge, require_run
from shardmake.commands.estimate_request import EstimateRequest, check_options
from shardmake.commands.options import Grouped, options_of
from shardmake.config.checks import chain_of, with_first_model
from shardmake.config.inputs import check_inputs, local_files
from shardmake.config.invocation import RUNS_VARIABLE, VARIABLE, last_merged
from shardmake.config.load import get_run, load_cluster, load_config, load_resolved, sweep_runs
from shardmake.config.methods import DEFAULT_METHOD
from shardmake.config.models import Cluster, Config, Method, Objective, Run, Strategy
from shardmake.config.user_files import read_user_files
from shardmake.core.build_locks import remove_stale_locks
from shardmake.core.environment import hub_environment, import_without_torch, kernel_caches, remove_list_settings
from shardmake.core.errors import STOPPED, ConfigError, StopRequestedError
from shardmake.core.failures import describe_unexpected, explain
from shardmake.core.log import configure_logging
from shardmake.core.login_memory import turn
from shardmake.core.permissions import share, share_tree
from shardmake.core.private_names import check_libraries, library_warnings
from shardmake.core.process import within_limits
from shardmake.core.secrets import redacted_output
from shardmake.doctor.options import Options
from shardmake.run.driver_job import refuse_ended
from shardmake.run.notification import notified
from shardmake.run.own_files import check_refused
from shardmake.run.paths import RUNS, RunDir
from shardmake.run.record import check_format
from shardmake.run.settings import recorded_settings
from shardmake.run.sources import check_raw, localize, require_weights

if TYPE_CHECKING:
    from shardmake.run.length import Sampled

app = typer.Typer(
    cls=Grouped,
    rich_markup_mode=None,  # whose tables cut the names of options in a terminal of 80 columns
    help="Fine-tune Hugging Face models on a Slurm cluster with DeepSpeed or FSDP.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
logger = logging.getLogger(__name__)

Name = Annotated[str, typer.Argument(help="Name of the run in the configuration.")]
Sweep = Annotated[str | None, typer.Option(help="Every run of this sweep instead.")]
ConfigFiles = Annotated[
    list[Path], typer.Option("--config", envvar=VARIABLE, help="Configuration file. Later ones override earlier ones.")
]
Runs = Annotated[Path, typer.Option(envvar=RUNS_VARIABLE, help="Folder of the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StageName = Literal["fetch", "plan", "render", "data", "train", "consolidate", "evaluate", "push", "report"]
FetchPart = Literal["all", "description", "weights"]
CONFIG = [Path("config/config.yaml")]
CHECK_SECONDS: Final = 300
CHECKED_PER_SECOND: Final = 1 << 20
"""Bytes of data for which the plan's check gets a further second; every row is read, twice."""
OUTPUT_CLOSED: Final = 1
USER_ERROR: Final = 2
BUG: Final = 70
"""Exit statuses besides 0; 70 is ``EX_SOFTWARE`` of sysexits.h."""

_folder: ContextVar[Path] = ContextVar("folder", default=Path())
"""Folder that the command writes to, for error messages."""
MOST_RANKS = 1_000_000


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"shardmake {__version__}")
        raise typer.Exit


@app.callback()
def configure(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print debug messages as well.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings, errors and results only.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Configure logging for every command, and ignore the user's own filters and formats of Slurm's lists."""
    configure_logging(verbose=verbose, quiet=quiet)
    remove_list_settings(os.environ)


def _read(files: list[Path]) -> tuple[Config, Cluster]:
    config = load_config(*files)
    return config, load_cluster(Path(config.cluster))


def _read_again(name: str, files: list[Path], runs: Path) -> tuple[Config, Cluster]:
    """Return the configuration as `_read`, or the last one with which the workflow made the run ``name``."""
    config, cluster = _read(files)
    merged = last_merged(name) if name and name not in config.runs and (runs / name).is_dir() else None
    if merged is None:
        return config, cluster
    logger.warning(
        "%s is not in %s. Shown with the configuration of the last workflow that had it: --config %s",
        name, ", ".join(map(str, files)), merged,
    )  # fmt: skip
    return _read([merged])


def _open(name: str, files: list[Path], runs: Path, *, on_node: bool = False) -> tuple[Run, Cluster, RunDir]:
    """Return the run's configuration, its cluster and its folder; ``on_node``: for a stage that may run on a node."""
    config, cluster = _read(files)
    run, rundir = get_run(config, name), RunDir(runs / name)
    rundir.refuse_links()
    check_format(rundir)
    _folder.set(rundir.root)
    os.environ.update(hub_environment(cluster.cache, offline=on_node and not cluster.internet_on_compute_nodes))
    if on_node:
        os.environ.update(kernel_caches(cluster.scratch) | cluster.variables)
        for message in remove_stale_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"])):
            logger.warning(message)
    if cluster.shared:
        share(runs, rundir.root, Path("logs"), *([Path(cluster.cache)] if cluster.cache else []))
    return run, cluster, rundir


@contextlib.contextmanager
def _stage(
    stage: str, name: str, files: list[Path], runs: Path, *, on_node: bool = False
) -> Iterator[tuple[Run, Cluster, RunDir]]:
    """Open a run as `_open`, record the settings of ``stage`` after its success, and notify of its end."""
    check_libraries()
    for message in library_warnings() if stage in ("plan", "train") else ():
        logger.warning(message)
    run, cluster, rundir = _open(name, files, runs, on_node=on_node)
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


@app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder for the inputs. Default: resources/demo, or resources/preferences.")
    ] = None,
    preferences: Annotated[
        bool, typer.Option("--preferences", help="Those of examples/preferences.yaml, with pairs of answers.")
    ] = False,
) -> None:
    """Create the demo's inputs: a chat data set, a tokenizer and a small base model."""
    from shardmake.demo import make_inputs, make_preferences

    if preferences:
        make_preferences(folder or Path("resources/preferences"))
    else:
        make_inputs(folder or Path("resources/demo"))


@app.command()
def init(
    out: Annotated[
        Path | None,
        typer.Option(help="Configuration to write; must not exist. Default: config/config.yaml, then runs.yaml."),
    ] = None,
    model: Annotated[str, typer.Option(help="Base model: a hub id or a folder.")] = "",
    data: Annotated[str, typer.Option(help="Training data: a file, a folder or a hub data set.")] = "",
    cluster: Annotated[str, typer.Option(help="Cluster file.")] = "",
    name: Annotated[str, typer.Option(help="Name of the run. Default: from the model.")] = "",
    method: Annotated[
        Method | None, typer.Option(help=f"What is trained. Default: {DEFAULT_METHOD}, or as in --from.")
    ] = None,
    objective: Annotated[
        Objective | None, typer.Option(help="What training optimizes. Default: sft, or as in --from.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Translate a training file of Axolotl, LLaMA-Factory or TRL.")
    ] = None,
    with_demo: Annotated[bool, typer.Option("--demo", help="The demo's run and inputs instead.")] = False,
) -> None:
    """Make this folder one for the workflow, with a configuration of one run; asks for what no option gives."""
    from shardmake.commands.init import Answers, ask, write_config, write_demo
    from shardmake.commands.workflow import DEFAULT_CONFIG, has_workflow, write_project

    given = {"model": model, "data": data, "cluster": cluster}
    others = {"out": out, **given, "name": name, "method": method, "objective": objective, "from": source}
    if with_demo and (idle := [f"--{option}" for option, value in others.items() if value]):
        raise ConfigError(f"init: {', '.join(idle)} has no effect with --demo. Leave it out.")
    first = Path(DEFAULT_CONFIG)
    out = out or (Path("runs.yaml") if first.exists() and not with_demo else first)
    if out.exists():
        raise ConfigError(f"--out: {str(out)!r} exists, and init never overwrites. Name another file.")
    answers = {} if with_demo else ask(given, source)
    if with_demo or not has_workflow():
        write_project()
    if with_demo:
        demo(folder=None)
        typer.echo(write_demo(out))
        return
    typer.echo(write_config(Answers(name=name, method=method, objective=objective, source=source, **answers), out))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(context: typer.Context) -> None:
    """Run Snakemake in this folder: every stage of every run, or up to a stage such as `plan`.

    Workflow and profile are those of the folder, or else of the installed Shardmake. All arguments are Snakemake's,
    such as -n (a dry run) and --configfile FILE.
    """
    from shardmake.commands.workflow import snakemake_arguments

    os.execv(sys.executable, [sys.executable, "-m", "snakemake", *snakemake_arguments(context.args)])


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

    def merge_start(run: Run, source: Path, base: Path, out: Path) -> None:
        from shardmake.consolidate.stage import merge_start

        merge_start(run, source, base, out)

    with _stage("fetch", name, config, runs) as (run, cluster, rundir):
        tokens = named_tokens(token, add_tokens, special=special)
        sources = bring(run, rundir, "all" if dequantize or tokens else part, merge_start)
        if dequantize:
            in_bf16(Path(sources.model.path), dequantize)
        if add_tokens:
            own = run.trust_remote_code
            with_tokens(Path(sources.model.path), add_tokens, tokens, special=special, trust_remote_code=own)
    if cluster.shared and cluster.cache:
        share_tree(Path(cluster.cache))


@app.command()
@options_of(EstimateRequest)
def estimate(
    request: EstimateRequest,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, sizes in bytes.")] = False,
    explain: Annotated[
        bool, typer.Option(help="Print the numbers that went in, and every term with its formula or source.")
    ] = False,
    list_gpus: Annotated[bool, typer.Option("--list-gpus", help="Print the known GPU models.")] = False,
    deepspeed_table: Annotated[
        bool, typer.Option("--deepspeed-table", help="Print DeepSpeed's own table of model states instead.")
    ] = False,
) -> None:
    """Estimate the memory of every strategy, from a config.json alone."""
    from shardmake.commands.deepspeed_table import deepspeed_table as table_of
    from shardmake.commands.estimate import estimate as estimate_memory
    from shardmake.commands.estimate_table import print_table
    from shardmake.config.accelerators import ACCELERATORS
    from shardmake.memory.read_config import read_model

    if list_gpus:
        typer.echo("\n".join(ACCELERATORS))
        return
    if deepspeed_table:
        check_options(request)
        model = read_model(request.model, revision=request.revision, trust_remote_code=request.trust_remote_code)
        typer.echo(table_of(model, request.nodes, request.gpus_per_node))
        return
    answer = estimate_memory(request)
    if as_json:
        typer.echo(json.dumps(answer.as_json(), indent=2))
    else:
        print_table(answer, explain=explain)


def _check_data(run: Run, rundir: RunDir) -> "tuple[list[int], list[Sampled]]":
    """Return the rows of each source and the sampled ones, read in a process with limits that grow with the files."""

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
    from shardmake.evaluate.backends import check_backend
    from shardmake.evaluate.harness import prepare_tasks
    from shardmake.launch.submission_check import check_submission, expected_starts
    from shardmake.plan.schedule import check_schedule
    from shardmake.plan.stage import describe, describe_checkpoints, plan_offline, plan_run
    from shardmake.push.check import check_push
    from shardmake.render.script_arguments import check_script_arguments
    from shardmake.run.length import estimate_length
    from shardmake.run.plan import MemoryEstimates, Plan
    from shardmake.train.trackers import check_trackers

    if offline:
        files, cluster = _read(config)
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

    with _stage("plan", name, config, runs) as (named, cluster, rundir):
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

    if show:
        from shardmake.commands.preview import preview

        run, cluster, rundir = _open(name, config, runs)
        typer.echo(preview(Plan.read(rundir.plan), localize(run, rundir), cluster, rundir))
        return
    with _stage("render", name, config, runs) as (run, cluster, rundir):
        for line in render_run(Plan.read(rundir.plan), localize(run, rundir), cluster, rundir):
            logger.info("%s", line)
    logger.info("Rendered %s, %s and %s.", rundir.accelerate, rundir.deepspeed, rundir.training)


@app.command()
def check(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE... [-- COMMAND...]",
            help="Accelerate files, DeepSpeed files, training arguments, shell scripts; after --, a launch command.",
        ),
    ],
    every_row: Annotated[bool, typer.Option("--all", help="Print the settings that agree as well.")] = False,
    as_json: AsJson = False,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks, if no file or command has it.", min=1)] = None,
    on_cpu: Annotated[bool, typer.Option("--cpu", help="The nodes have no GPU.")] = False,
) -> None:
    """Compare the settings of Trainer, DeepSpeed and Accelerate in your own files, commands and scripts."""
    from dataclasses import asdict

    from shardmake.render.lint import check as check_words
    from shardmake.render.lint import format_report

    reports = check_words(words, ranks, on_cpu=on_cpu)
    if as_json:
        typer.echo(json.dumps([asdict(report) | {"errors": report.errors} for report in reports], indent=2))
    else:
        typer.echo("\n\n".join(format_report(report, every_row=every_row) for report in reports))
    if any(report.errors for report in reports):
        raise typer.Exit(1)


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
    from shardmake.run.length import Length

    if show:
        run, _, rundir = _open(name, config, runs)
        check_inputs(name, run)
        from shardmake.data.stage import preview

        for text in preview(localize(run, rundir), show, rundir):
            typer.echo(text)
        return
    with _stage("data", name, config, runs, on_node=True) as (run, cluster, rundir):
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

    with _stage("train", name, config, runs) as (run, cluster, rundir):
        require_weights(rundir)
        if run.data.is_raw:
            check_raw(rundir)
        drive(localize(run, rundir), cluster, rundir)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def submit(context: typer.Context) -> None:
    """Run Snakemake and the drivers in a small Slurm job, which submits itself again before its time limit.

    All arguments are Snakemake's, such as targets, --configfile FILE or -n. The short stages run here first.
    """
    from shardmake.commands.submit import submit as submit_driver

    submit_driver(context.args, RUNS)


@app.command()
def reshard(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint: runs/NAME/train/checkpoints/checkpoint-N.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    ranks: Annotated[int, typer.Option(help="Number of ranks that will resume the checkpoint.", min=1, max=MOST_RANKS)],
    strategy: Annotated[Strategy | None, typer.Option(help="Strategy that will resume it. Default: unchanged.")] = None,
) -> None:
    """Convert a checkpoint for another strategy or number of ranks; `train` does this automatically."""
    from shardmake.checkpoint.reshard.convert import reshard as convert

    convert(checkpoint, out, strategy, ranks)
    logger.info("Wrote %s.", out)


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

    if out is not None:
        _folder.set(out)
        if listed := merge(request, Path(source), out):
            typer.echo(listed)
        return
    require_run(request, source, config)
    with _stage("consolidate", source, config, runs, on_node=True) as (run, _, rundir):
        consolidate_run(localize(run, rundir), rundir, workers=request.workers, progress=show_progress)


@app.command()
def evaluate(name: Name, config: ConfigFiles = CONFIG, runs: Runs = RUNS) -> None:
    """Measure the loss of the base and the tuned model, and generate answers with both."""
    from shardmake.evaluate.stage import evaluate as measure

    with _stage("evaluate", name, config, runs, on_node=True) as (run, cluster, rundir):
        measure(run, rundir, cluster)


@app.command()
def push(name: Name, config: ConfigFiles = CONFIG, runs: Runs = RUNS) -> None:
    """Push the model and verify the pushed files."""
    from shardmake.push.stage import push as send

    with _stage("push", name, config, runs) as (run, _, rundir):
        send(run, rundir)


@app.command()
def report(name: Name, config: ConfigFiles = CONFIG, runs: Runs = RUNS) -> None:
    """Write the report of the run: losses, speed, memory, samples."""
    from shardmake.report.stage import write_report

    run, cluster, rundir = _open(name, config, runs)
    known = load_config(*config).runs
    before = {other: known[other] for other in chain_of(name, known)[:-1]}
    with notified("report", run, rundir):
        logger.info("Wrote %s.", write_report(run, rundir, cluster.profile, before))


@app.command()
def verify(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    against: Annotated[Path | None, typer.Option(help="Checkpoint to compare with, bit by bit.")] = None,
    base: Annotated[
        str | None, typer.Option(help="Base model, if one of them is an adapter: a folder or a hub id.")
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Worker threads besides the reading one.", min=1, max=MOST_PROCESSES)
    ] = 4,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code that comes with the model.")
    ] = False,
    key: Annotated[str | None, typer.Option(help=KEY_HELP + " Default: the one that was merged.")] = None,
) -> None:
    """Verify a model folder tensor by tensor, optionally against its checkpoint."""
    from shardmake.consolidate.destination import find_base
    from shardmake.consolidate.verify import checksums_of
    from shardmake.consolidate.verify import verify as check_model

    base_folder = find_base(base) if base is not None else None
    found = check_model(model, against, base=base_folder, workers=workers, trust_remote_code=trust_remote_code, key=key)
    typer.echo(
        f"{model} is valid: {found.parameters:,} parameters, {found.describe_types()}, {len(found.files)} files."
    )
    sums = checksums_of(model)
    typer.echo(f"Every file has its checksum in {sums}." if sums else "The folder has no checksums to compare with.")
    for remark in found.remarks():
        typer.echo(remark)
    if against is not None:
        typer.echo(f"Every bit is equal to {against}.")


@app.command("config")
def show_config(name: Name, config: ConfigFiles = CONFIG) -> None:
    """Show every setting of a run, with what it inherits, and the origin of each."""
    from shardmake.config.inheritance import describe_run

    read, resolved = load_resolved(*config)
    typer.echo(describe_run(get_run(read, name), resolved.origins[name]))


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

    read, cluster = _read_again(name, config, runs)
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

    found = list_runs(*_read(config), runs)
    if as_json:
        typer.echo(json.dumps([run.as_json() for run in found], indent=2))
    else:
        print_table(LISTED, [run.cells() for run in found])


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

    read, cluster = _read(config)
    comparison = compare_runs(select_runs(read, names or [], sweep), cluster, runs)
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

    opened = [_open(one, config, runs) for one in _runs_of(name, sweep, config)]
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
    opened = [_open(one, config, runs) for one in _runs_of(name, sweep, config)]
    typer.echo(for_each([rundir for _, _, rundir in opened], lambda rundir: cancel_job(rundir, opened[0][1])))


def _runs_of(name: str, sweep: str | None, config: list[Path]) -> list[str]:
    if bool(name) == (sweep is not None):
        raise ConfigError("The run is missing. Name either a run, or a sweep with --sweep NAME.")
    read = load_config(*config)
    return [name] if sweep is None else sweep_runs(read, sweep)


@app.command()
def retrain(name: Name, config: ConfigFiles = CONFIG, runs: Runs = RUNS) -> None:
    """Set a run's training aside, so that the workflow trains it again from the start."""
    from shardmake.commands.control import retrain as set_training_aside

    get_run(load_config(*config), name)
    typer.echo(set_training_aside(RunDir(runs / name)))


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

    read, cluster = _read_again(name, config, runs)
    run, rundir = get_run(read, name), RunDir(runs / name)
    if driver:
        typer.echo(read_driver_log(rundir, lines))
        return
    found = stage or (unfinished_stage(run, cluster, rundir) if rank is None and attempt is None else "train")
    typer.echo(read_logs(rundir, found, rank, lines, attempt))


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


def main() -> None:
    """Run the command line and exit; docs/reference/commands.md lists the exit statuses."""
    gc.set_threshold(100_000)  # imports allocate objects that stay, and a collection would visit all of them
    with redacted_output():
        sys.exit(_flush_output(_run()))


def _run() -> int:
    """Run the command line and return the exit status."""
    try:
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except StopRequestedError as stop:
        typer.echo(str(stop))
        return STOPPED
    except Exception as error:
        return _print_error(error)
    return 0


def _print_error(error: Exception) -> int:
    """Print the message of ``error``, with ``--verbose`` also its traceback, and return the exit status."""
    if logger.isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    known = explain(error, _folder.get())
    with contextlib.suppress(OSError):  # standard error may be closed as well
        typer.secho(f"Error: {known or describe_unexpected(error)}", fg="red", err=True)
    return BUG if known is None else USER_ERROR


def _flush_output(status: int) -> int:
    """Write the buffered output; return another status if its reader has ended (``| head``) or its disk is full."""
    output = sys.__stdout__ or sys.stdout  # typer hides a closed pipe behind another sys.stdout
    try:
        output.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # the interpreter flushes once more at its end
        return status or (OUTPUT_CLOSED if isinstance(error, BrokenPipeError) else _print_error(error))
    return status


if __name__ == "__main__":
    main()

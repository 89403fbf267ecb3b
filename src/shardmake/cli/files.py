"""The commands for a user's own files and models."""

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from shardmake.cli.common import CONFIG, MOST_RANKS, AsJson, ConfigFiles, Name
from shardmake.commands.consolidate import KEY_HELP, MOST_PROCESSES
from shardmake.commands.estimate_request import EstimateRequest
from shardmake.commands.options import options_of
from shardmake.config.accelerators import ACCELERATORS
from shardmake.config.choices import Method, Objective, Strategy
from shardmake.config.methods import DEFAULT_METHOD
from shardmake.core.errors import ConfigError

app = typer.Typer(rich_markup_mode=None)
logger = logging.getLogger(__name__)


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
    if list_gpus:
        typer.echo("\n".join(ACCELERATORS))
        return
    from shardmake.commands.estimate import check_options
    from shardmake.commands.estimate import estimate as estimate_memory

    if deepspeed_table:
        from shardmake.commands.deepspeed_table import deepspeed_table as table_of
        from shardmake.memory.read_config import read_model

        check_options(request)
        model = read_model(request.model, revision=request.revision, trust_remote_code=request.trust_remote_code)
        typer.echo(table_of(model, request.nodes, request.gpus_per_node))
        return
    answer = estimate_memory(request)
    if as_json:
        typer.echo(json.dumps(answer.as_json(), indent=2))
    else:
        from shardmake.commands.estimate_table import print_table

        print_table(answer, explain=explain)


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


@app.command("config")
def show_config(name: Name, config: ConfigFiles = CONFIG) -> None:
    """Show every setting of a run, with what it inherits, and the origin of each."""
    from shardmake.config.inheritance import describe_run
    from shardmake.config.load import get_run, load_resolved

    read, resolved = load_resolved(*config)
    typer.echo(describe_run(get_run(read, name), resolved.origins[name]))

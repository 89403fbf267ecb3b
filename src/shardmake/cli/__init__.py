"""The command line: one subcommand per stage, no logic. Heavy libraries are imported by the stage that needs them."""

import contextlib
import gc
import logging
import os
import sys
import traceback
from typing import Annotated, Final

import typer

from shardmake import __version__
from shardmake.cli.common import written_folder
from shardmake.cli.groups import Grouped
from shardmake.core.environment import remove_list_settings
from shardmake.core.errors import STOPPED, StopRequestedError
from shardmake.core.failures import describe_unexpected, explain
from shardmake.core.log import configure_logging
from shardmake.core.secrets import redacted_output

OUTPUT_CLOSED: Final = 1
USER_ERROR: Final = 2
BUG: Final = 70
"""Exit statuses besides 0; 70 is ``EX_SOFTWARE`` of sysexits.h."""
app = typer.Typer(
    cls=Grouped,
    rich_markup_mode=None,  # whose tables cut the names of options in a terminal of 80 columns
    help="Fine-tune Hugging Face models on a Slurm cluster with DeepSpeed or FSDP.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
logger = logging.getLogger(__name__)


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


def main() -> None:
    """Run the command line and exit; docs/reference/commands.md lists the exit statuses."""
    gc.set_threshold(100_000)  # imports allocate objects that stay, and a collection would visit all of them
    with redacted_output():
        status = _flush_output(_run())
        gc.freeze()  # the interpreter's end would visit them as well
        sys.exit(status)


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
    known = explain(error, written_folder.get())
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

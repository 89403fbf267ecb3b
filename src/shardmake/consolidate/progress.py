"""A progress bar for the bytes of a merge, on a terminal only."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

logger = logging.getLogger(__name__)
Advance = Callable[[int], None]
"""Takes the number of bytes that were processed since the last call; any thread may call it."""
ShowProgress = Callable[[str, int], AbstractContextManager[Advance]]
"""Takes the name of the work and its bytes; the returned function counts those that are done."""


@contextmanager
def no_progress(name: str, total: int) -> Iterator[Advance]:
    """Show nothing."""
    yield lambda _: None


@contextmanager
def show_progress(name: str, total: int) -> Iterator[Advance]:
    """Show a bar with speed and remaining time on standard error, if that is a terminal and not ``--quiet``."""
    if not (sys.stderr.isatty() and logger.isEnabledFor(logging.INFO)):
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        work = bar.add_task(name, total=total)
        yield lambda count: bar.advance(work, count)

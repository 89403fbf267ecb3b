"""Standard logging for commands, workers and ranks: plain lines on stdout, warnings on stderr, a prefix per rank."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from shardmake.core.units import format_duration

ROOT = "shardmake"


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Write to the current ``sys.stdout``, or to ``sys.stderr`` from WARNING on."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drop a line that cannot be written, for example to a closed pipe or a full disk; the work continues."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _Formatter(logging.Formatter):
    """Print the message alone at INFO; name the level of everything else."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.prefix = "" if rank is None else f"[rank {rank}] "

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return f"{self.prefix}{level}{super().format(record)}"


def configure_logging(*, verbose: bool = False, quiet: bool = False, rank: int | None = None) -> None:
    """Print shardmake's log records in this process; without this call they follow the caller's own configuration.

    ``quiet`` prints warnings and errors only. The global ``rank`` becomes the prefix of each line.
    """
    logger = logging.getLogger(ROOT)
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    handler = _StreamHandler()
    handler.setFormatter(_Formatter(rank))
    logger.handlers[:] = [handler]
    logger.propagate = False


@contextmanager
def warn_while_slow(what: str, first: float = 5.0, later: float = 60.0) -> Iterator[None]:
    """Say ``what`` takes so long: after ``first`` seconds, and every ``later`` seconds from then on.

    The lines are warnings, because the output of a command may be JSON. Of nested phases the innermost one is named.
    """
    done, started = threading.Event(), time.monotonic()

    def repeat() -> None:
        pause = first
        while not done.wait(pause):
            if _slow_phases[-1] is not done:
                pause = min(1.0, first)
                continue
            logging.getLogger(ROOT).warning("%s (%s so far)", what, format_duration(time.monotonic() - started))
            pause = later

    _slow_phases.append(done)
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _slow_phases.remove(done)


_slow_phases: list[threading.Event] = []
"""The phases of `warn_while_slow` that have not ended, from the outermost to the innermost."""

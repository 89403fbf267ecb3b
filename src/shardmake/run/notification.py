"""Notify a person that a run is done, was stopped, or needs them: the command of the key ``notify``."""

import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator
from typing import Literal

from shardmake.config.models import Run
from shardmake.core.errors import StopRequestedError
from shardmake.core.failures import explain
from shardmake.core.secrets import public_url, redact
from shardmake.run.driver_job import note_end
from shardmake.run.paths import RunDir

SECONDS = 60.0
"""How long the command may take."""
LAST_STAGE = "report"
Event = Literal["done", "stopped", "failed", "held"]
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def notified(stage: str, run: Run, rundir: RunDir) -> Iterator[None]:
    """Notify if ``stage`` fails or is stopped on request, or if it is the last one and succeeds.

    In a driver job the end is recorded as well, so that the next driver job leaves the run as it is. An attempt that
    ends and is resumed is not a failure of the stage. Neither is a driver that a person ended, because
    its job continues.
    """
    try:
        yield
    except StopRequestedError as stop:
        note_end(rundir.name, stage, "stopped", redact(str(stop)))
        notify(run, rundir, stage, "stopped", str(stop))
        raise
    except Exception as error:
        message = str(explain(error, rundir.root) or f"{type(error).__name__}: {error}")
        note_end(rundir.name, stage, "failed", redact(message))
        notify(run, rundir, stage, "failed", message)
        raise
    if stage == LAST_STAGE:
        notify(run, rundir, stage, "done", f"All stages of {rundir.name} are done. The report is {rundir.report}.")


def notify(run: Run, rundir: RunDir, stage: str, event: Event, message: str) -> None:
    """Run the command of ``notify``, if there is one. A command that fails or hangs costs a warning, never the run."""
    if run.notify is None:
        return
    variables = {"RUN": rundir.name, "STAGE": stage, "EVENT": event, "MESSAGE": public_url(redact(message))}
    environment = os.environ | {f"SHARDMAKE_{name}": value for name, value in variables.items()}
    try:
        done = subprocess.run(
            ["sh", "-c", run.notify.command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("notify.command failed: %s. Nobody was notified that %s is %s.", error, rundir.name, event)
        return
    if done.returncode:
        output = (done.stderr or done.stdout).strip()[-500:]
        logger.warning(
            "notify.command ended with exit status %d: %s. Nobody was notified that %s is %s.",
            done.returncode, output or "no output", rundir.name, event,
        )  # fmt: skip

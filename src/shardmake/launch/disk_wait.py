"""Wait until a run's checkpoints and model fit on the disk again."""

import logging
import time

from shardmake.core.errors import DiskFullError
from shardmake.core.units import format_duration
from shardmake.launch.submission import check_stop_file
from shardmake.run.disk_budget import check_run
from shardmake.run.paths import RunDir

logger = logging.getLogger(__name__)
SECONDS = 600.0
_POLL_SECONDS = 5.0


def wait_for_room(rundir: RunDir, seconds: float = SECONDS) -> None:
    """Return once the rest of the run fits on the disk; no job holds nodes meanwhile.

    Raises:
        DiskFullError: It does not fit after ``seconds``; the message says how much is missing and what to remove.
        StopRequestedError: Somebody created the stop file.
    """
    deadline, waits = time.monotonic() + seconds, False
    while True:
        check_stop_file(rundir)
        try:
            return check_run(rundir)
        except DiskFullError as error:
            if time.monotonic() > deadline:
                raise
            if not waits:
                logger.warning("%s The driver waits up to %s for room.", error, format_duration(seconds))
            waits = True
        time.sleep(_POLL_SECONDS)

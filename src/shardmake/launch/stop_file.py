"""The run's stop file, by which anybody asks the training to save and stop."""

import logging

from shardmake.core.errors import ShardmakeError
from shardmake.launch.messages import short_path
from shardmake.run.paths import RunDir

logger = logging.getLogger(__name__)


def clear_stop_file(rundir: RunDir) -> None:
    """Remove the stop file of an earlier request: starting a driver while no job exists means to continue."""
    if rundir.stop_file.exists():
        logger.info("Removing the stop file %s of an earlier request.", short_path(rundir.stop_file))
        rundir.stop_file.unlink(missing_ok=True)


def check_stop_file(rundir: RunDir) -> None:
    """Raise `ShardmakeError` if somebody created the stop file since this driver started."""
    if rundir.stop_file.exists():
        raise ShardmakeError(
            f"Training of {rundir.name} stopped: somebody created {short_path(rundir.stop_file)}. No job was "
            "submitted. Run the same command again to resume."
        )

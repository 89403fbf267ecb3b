"""Run Slurm's query commands, and locate the snapshots of squeue that the drivers of a user share."""

import os
import subprocess
import tempfile
from pathlib import Path

from shardmake.core.atomic import digest

_QUERY_SECONDS = 60


def run_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a query command of Slurm; return status 127 if it is missing, cannot start or does not answer."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_QUERY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def queue_snapshot() -> Path:
    """Return the file in which drivers that watch a job share squeue's answer."""
    return _runtime_folder() / f"queue-{_slurm_in_use()}"


def waiting_snapshot() -> Path:
    """Return the file in which waiting drivers share squeue's answer and claim slots."""
    return _runtime_folder() / f"waiting-{_slurm_in_use()}"


def _slurm_in_use() -> str:
    """Return a digest of the variables that select the cluster: each cluster has its own snapshots."""
    return digest({name: os.environ.get(name) for name in ("SLURM_CONF", "SLURM_CLUSTERS")})


def _runtime_folder() -> Path:
    """Return a private folder of the user on this machine.

    It is not below XDG_RUNTIME_DIR, which disappears at logout while drivers in tmux continue.
    """
    folder = Path(tempfile.gettempdir()) / f"shardmake-queue-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix="shardmake-queue-"))
    return folder

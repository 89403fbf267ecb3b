"""The one job that an attempt belongs to.

Slurm may accept a job after its sbatch has failed with a time-out, beside or long after the job that was submitted in
its place. Two jobs would write to one run. So the first claim of an attempt decides, by the driver that records a job
or by a job that starts, and every other job ends at once.
"""

import os
from pathlib import Path
from typing import Final

from shardmake.core.run_folder import make_folder, open_file, remove, rename
from shardmake.run.attempt import AttemptDir

NOBODY: Final = "nobody"
"""Claimed for an attempt that gets no job any more."""


def claim(folder: AttemptDir, job: str) -> str:
    """Return the job that the attempt belongs to, which is ``job`` if nobody has claimed the attempt before.

    Where the driver has claimed it, as usual, the tasks of its job only read.
    """
    if (owner := _owner(folder)) is None:
        _claim_first(folder, job)
        owner = _owner(folder)
    return owner or job


def _owner(folder: AttemptDir) -> str | None:
    """Return the job whose name is in the folder ``owner``, beside hidden files of a file server."""
    return next((path.name for path in folder.owner.glob("[!.]*")), None)


def _claim_first(folder: AttemptDir, job: str) -> None:
    """Move a folder with one file into place: of several renames to a folder that is not empty, one succeeds."""
    claimed = folder.root / f".owner.{os.uname().nodename}.{os.getpid()}"
    make_folder(claimed, parents=False)
    open_file(claimed / job, "a").close()
    try:
        rename(claimed, folder.owner)
    except OSError:  # another claim was first, or a file server reports an error for a request that it got twice
        if not folder.owner.exists():
            raise
        if _owner(folder) is None:
            open_file(folder.owner / job, "a").close()
    finally:
        remove(claimed)


def attempt_of_script(script: Path) -> AttemptDir | None:
    """Return the attempt whose batch script is ``script``; None if it is not one of an attempt."""
    folder = script.parent.parent
    return AttemptDir(folder) if folder.name.isdigit() and AttemptDir(folder).slurm == script.parent else None

"""The one job that an attempt belongs to, and the one attempt that follows in that job.

Slurm may accept a job after its sbatch has failed with a time-out, beside or long after the job that was submitted in
its place. Two jobs would write to one run. So the first claim of an attempt decides, by the driver that records a job
or by a job that starts, and every other job ends at once. In the same way, the first claim decides what follows after
the ranks failed: an attempt in the same job, by the driver, or none, by the driver or by workers that waited too long.
"""

import os
from pathlib import Path
from typing import Final

from shardmake.core.run_folder import make_folder, open_file, remove, rename
from shardmake.run.attempt import AttemptDir

NOBODY: Final = "nobody"
"""Claimed for an attempt that gets no job any more."""
NONE: Final = "none"
"""Claimed for an attempt that no other follows in its job."""


def claim(folder: AttemptDir, job: str) -> str:
    """Return the job that the attempt belongs to, which is ``job`` if nobody has claimed the attempt before.

    Where the driver has claimed it, as usual, the tasks of its job only read.
    """
    return _claim(folder.owner, job)


def claim_next(folder: AttemptDir, name: str) -> str:
    """Return the attempt that follows in the same job, or `NONE`; it is ``name`` if nobody has decided before."""
    return _claim(folder.next, name)


def next_in_job(folder: AttemptDir) -> str | None:
    """Return the attempt that follows in the same job, `NONE` if none does; None while that is undecided."""
    return _claimed(folder.next)


def last_in_job(folder: AttemptDir, job: str) -> AttemptDir:
    """Return the last attempt of ``job``, which began with the attempt in ``folder``, if that belongs to it."""
    while _claimed(folder.owner) == job and (name := next_in_job(folder)) not in (None, NONE):
        folder = AttemptDir(folder.root.with_name(str(name)))
    return folder


def _claim(place: Path, name: str) -> str:
    if (found := _claimed(place)) is None:
        _claim_first(place, name)
        found = _claimed(place)
    return found or name


def _claimed(place: Path) -> str | None:
    """Return the name of the file in the folder ``place``, beside hidden files of a file server."""
    return next((path.name for path in place.glob("[!.]*")), None)


def _claim_first(place: Path, name: str) -> None:
    """Move a folder with one file into place: of several renames to a folder that is not empty, one succeeds."""
    claimed = place.with_name(f".{place.name}.{os.uname().nodename}.{os.getpid()}")
    make_folder(claimed, parents=False)
    open_file(claimed / name, "a").close()
    try:
        rename(claimed, place)
    except OSError:  # another claim was first, or a file server reports an error for a request that it got twice
        if not place.exists():
            raise
        if _claimed(place) is None:
            open_file(place / name, "a").close()
    finally:
        remove(claimed)


def attempt_of_script(script: Path) -> AttemptDir | None:
    """Return the attempt whose batch script is ``script``; None if it is not one of an attempt."""
    folder = script.parent.parent
    return AttemptDir(folder) if folder.name.isdigit() and AttemptDir(folder).slurm == script.parent else None

"""The one job that an attempt belongs to.

Slurm may accept a job after its sbatch has failed with a time-out, beside or long after the job that was submitted in
its place. Two jobs would write to one run. So the first claim of an attempt decides, by the driver that records a job
or by a job that starts, and every other job ends at once.
"""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

from shardmake.run.attempt import AttemptDir

NOBODY: Final = "nobody"
"""Claimed for an attempt that gets no job any more."""


def claim(folder: AttemptDir, job: str) -> str:
    """Return the job that the attempt belongs to, which is ``job`` if nobody has claimed the attempt before.

    The claim is a folder with one file in it: of several renames to one folder that is not empty, one succeeds.
    """
    claimed = folder.root / f".owner.{os.uname().nodename}.{os.getpid()}"
    claimed.mkdir(exist_ok=True)
    (claimed / job).touch()
    try:
        with contextlib.suppress(OSError):  # also if it is done and a file server reports the repetition of a request
            claimed.rename(folder.owner)
    finally:
        shutil.rmtree(claimed, ignore_errors=True)
    (owner,) = folder.owner.iterdir()
    return owner.name


def attempt_of_script(script: Path) -> AttemptDir | None:
    """Return the attempt whose batch script is ``script``; None if it is not one of an attempt."""
    folder = script.parent.parent
    return AttemptDir(folder) if folder.name.isdigit() and AttemptDir(folder).slurm == script.parent else None

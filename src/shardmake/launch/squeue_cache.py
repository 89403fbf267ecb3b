"""One look at Slurm's queue for all drivers of a user on this machine.

Two hundred runs have two hundred drivers. The first whose snapshot is too old asks squeue for all of the user's jobs
and leaves the answer for the others in the user's runtime folder. The slower Slurm answers, the longer an answer
counts, so that all drivers together never keep the controller busy for more than a twentieth of the time.
"""

import contextlib
import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shardmake.core.atomic import digest, write_text

FRESH_SECONDS = 2.0
FAILED_SECONDS = 10.0
BUSY = 20
_QUERY_SECONDS = 60


class QueueSnapshot(BaseModel):
    """What squeue answered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    taken: float
    """Unix time of the question."""
    seconds: float
    """How long the answer took."""
    returncode: int
    stdout: str
    stderr: str

    def is_fresh(self, now: float) -> bool:
        """Whether it still counts; a failure counts too, so that a controller in trouble is left in peace."""
        least = FRESH_SECONDS if self.returncode == 0 else FAILED_SECONDS
        return 0 <= now - self.taken < max(least, BUSY * self.seconds)


def run_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's query commands; one that is missing, silent or cannot be started is an answer too."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_QUERY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def cached_squeue(command: Sequence[str], folder: Path | None = None) -> QueueSnapshot:
    """The answer to ``command`` that any driver of this user got a moment ago, or a new one.

    Drivers under another Slurm configuration keep a snapshot of their own.
    """
    file = (folder or runtime_folder()) / f"queue-{digest([*command, slurm_in_use()])}.json"
    found = _read(file)
    if found and found.is_fresh(time.time()):
        return found
    with file_lock(file.with_suffix(".lock")):
        found = _read(file)  # another driver may have asked while this one waited
        return found if found and found.is_fresh(time.time()) else _take(command, file)


def _take(command: Sequence[str], file: Path) -> QueueSnapshot:
    taken = time.time()
    answer = run_slurm(*command)
    snapshot = QueueSnapshot(
        taken=taken,
        seconds=time.time() - taken,
        returncode=answer.returncode,
        stdout=answer.stdout,
        stderr=answer.stderr,
    )
    with contextlib.suppress(OSError):  # a full disk: then the next driver asks as well
        write_text(file, snapshot.model_dump_json())
    return snapshot


def _read(file: Path) -> QueueSnapshot | None:
    with contextlib.suppress(OSError, ValidationError):
        return QueueSnapshot.model_validate_json(file.read_text())
    return None


@contextlib.contextmanager
def file_lock(lock: Path) -> Iterator[None]:
    """Hold the lock of a file, after whoever holds it now."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def slurm_in_use() -> str:
    """Digest of what tells Slurm's commands which cluster to ask."""
    return digest({name: os.environ.get(name) for name in ("SLURM_CONF", "SLURM_CLUSTERS")})


def runtime_folder() -> Path:
    """A folder on this machine that is the user's alone.

    Not below XDG_RUNTIME_DIR, which goes when its user logs out, while drivers in a tmux stay.
    """
    folder = Path(tempfile.gettempdir()) / f"shardmake-queue-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix="shardmake-queue-"))
    return folder

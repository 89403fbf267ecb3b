"""Turns at the memory of a login node: as many processes of this user load the libraries at once as fit."""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from shardmake.core.permissions import private_folder
from shardmake.core.temporary import take_lock

logger = logging.getLogger(__name__)
PROCESS_GIB: Final = 0.5
"""Memory of a plan, or of a check of rendered files, with the processes that import torch and DeepSpeed for it."""
_POLL_SECONDS = 0.5


@contextlib.contextmanager
def turn(limit_gib: float) -> Iterator[None]:
    """Hold one of the places that ``limit_gib`` has on this machine, and wait until one is free.

    The kernel frees the place of a process that ends. Where files cannot be locked, nothing is limited.
    """
    folder = private_folder(Path(tempfile.gettempdir(), f"shardmake-{os.getuid()}"))
    places = range(max(1, int(limit_gib / PROCESS_GIB)))
    with contextlib.ExitStack() as held:
        files = [held.enter_context((folder / f"turn-{place}").open("a")) for place in places]
        if not (free := _take_one(files)):
            logger.info(
                "Waiting for %d other plans or renderings on this machine. Together they may use %g GiB "
                "(login_memory_gib in the cluster file).",
                len(files),
                limit_gib,
            )
        while not free:
            time.sleep(_POLL_SECONDS)
            free = _take_one(files)
        yield


def _take_one(files: Sequence[IO[str]]) -> bool:
    return any(take_lock(file.fileno(), without_locks=True) for file in files)

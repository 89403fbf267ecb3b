"""Turns at the GPUs: trainings that start at once, and use the same GPUs one after another.

``SHARDMAKE_TURNS`` names an existing folder. A rank that has imported its libraries writes ``RUN-NNN.R.waiting`` there,
with the number of its attempt and its rank, and waits for ``RUN-NNN.go`` before it touches a device. Whoever sets the
variable creates that file when the GPUs are free. The checks of the node then do not ask if the GPUs are in use.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

VARIABLE: Final = "SHARDMAKE_TURNS"
_POLL_SECONDS = 0.1


def takes_turns() -> bool:
    """Return whether another program assigns the GPUs to one training at a time."""
    return bool(os.environ.get(VARIABLE))


def wait_for_turn(name: str, rank: int = 0, beat: Callable[[], None] = lambda: None) -> None:
    """Wait for the turn of ``name``; ``beat`` is called meanwhile. Without the variable it returns at once."""
    if not takes_turns():
        return
    folder = Path(os.environ[VARIABLE])
    (folder / f"{name}.{rank}.waiting").touch()
    while not (folder / f"{name}.go").exists():
        beat()
        time.sleep(_POLL_SECONDS)

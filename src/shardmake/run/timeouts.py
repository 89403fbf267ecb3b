"""Time limits for ranks without a heartbeat and for collective operations."""

import math

PATIENCE = 6
"""Loading, the first step, saves and evaluations may take this many times longer than a step."""

_ROOM_SECONDS = 300.0


def room_timeout(hang_seconds: float) -> float:
    """Return how long a save that must not be lost waits for room, well within the watchdog's time for a save."""
    return min(_ROOM_SECONDS, PATIENCE * hang_seconds / 2)


def collective_timeout(hang_seconds: float) -> int:
    """Return torch's timeout of a collective in seconds: after the watchdog's, which collects stacks first."""
    return max(1800, math.ceil(2 * PATIENCE * hang_seconds))

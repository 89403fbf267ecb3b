"""Time limits for ranks without a heartbeat and for collective operations."""

import math

PATIENCE = 6
"""Loading, the first step, saves and evaluations may take this many times longer than a step."""


def collective_timeout(hang_seconds: float) -> int:
    """Return torch's timeout of a collective in seconds: after the watchdog's, which collects stacks first."""
    return max(1800, math.ceil(2 * PATIENCE * hang_seconds))

"""How long a silent rank, or a collective operation, is waited for."""

import math

PATIENCE = 6
"""Loading, the first step, saves and evaluations may be silent for so many times longer than a step."""


def collective_timeout(hang_seconds: float) -> int:
    """Seconds after which torch may give up a collective: past the allowances, else it ends ranks without stacks."""
    return max(1800, math.ceil(2 * PATIENCE * hang_seconds))

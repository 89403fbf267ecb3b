"""The machine, its load and the code of a measurement, for the files in ``results``."""

import os
import platform
from collections.abc import Sequence
from typing import Any

from shardmake.core.environment import LIBRARIES, checkout_commit, installed_versions

Load = tuple[float, float, float]
"""Load averages over 1, 5 and 15 minutes."""
_AT_START = os.getloadavg()
_COMMIT = checkout_commit()
"""The code that runs is that of the start; later the benchmark's own results have changed the checkout."""


def machine(packages: Sequence[str] = LIBRARIES, before: Load = _AT_START) -> dict[str, Any]:
    """Return machine, commit, load and the versions of ``packages``; ``before`` is the load when the work began."""
    return {
        "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "commit": _COMMIT,
        "load_before": before, "load_after": os.getloadavg(), "python": platform.python_version(),
        "versions": installed_versions(packages),
    }  # fmt: skip

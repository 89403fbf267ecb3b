"""The interval between saves: the cost of a save against the work that a failure loses."""

import math


def interval_seconds(save_seconds: float, mtbf_seconds: float, upload_seconds: float = 0.0) -> float:
    """Return the interval between two saves that loses least: sqrt(2 d M), J. W. Young, CACM 17(9), 1974.

    Args:
        save_seconds: d, the time for which one save blocks training.
        mtbf_seconds: M, the mean time between failures of the whole job.
        upload_seconds: Time until an asynchronous checkpoint is committed, for which the next save would have to wait.

    The higher orders of J. T. Daly (FGCS 22, 2006) change the interval by at most d, and d is small against M.
    """
    return max(math.sqrt(2 * save_seconds * mtbf_seconds), upload_seconds)


def job_mtbf_seconds(node_mtbf_hours: float, nodes: int) -> float:
    """Return the mean time between failures of a job on ``nodes`` nodes, which the failure of any node ends."""
    return node_mtbf_hours * 3600 / nodes


def lost_share(save_seconds: float, interval: float, mtbf_seconds: float) -> float:
    """Return the share of time spent on saving and on repeated work, to first order: d / tau + tau / (2 M)."""
    return save_seconds / interval + interval / (2 * mtbf_seconds)

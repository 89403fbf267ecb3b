"""How often to save: what a save costs against what a failure loses."""

import math


def interval_seconds(save_seconds: float, mtbf_seconds: float, upload_seconds: float = 0.0) -> float:
    """Time between two saves that loses least: sqrt(2 d M), J. W. Young, CACM 17(9), 1974.

    Args:
        save_seconds: d, how long one save holds the training up.
        mtbf_seconds: M, mean time between failures of the whole job.
        upload_seconds: how long a checkpoint that is saved asynchronously takes until it counts; the next save would
            have to wait for that.

    J. T. Daly's higher orders (FGCS 22, 2006) change it by d at most, and d is small against M.
    """
    return max(math.sqrt(2 * save_seconds * mtbf_seconds), upload_seconds)


def job_mtbf_seconds(node_mtbf_hours: float, nodes: int) -> float:
    """Mean time between failures of a job on ``nodes`` nodes; any node's failure ends it."""
    return node_mtbf_hours * 3600 / nodes


def lost_share(save_seconds: float, interval: float, mtbf_seconds: float) -> float:
    """Share of the time that goes into saving and into work done twice, to first order: d / tau + tau / (2 M)."""
    return save_seconds / interval + interval / (2 * mtbf_seconds)

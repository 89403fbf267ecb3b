"""The use of an attempt's GPUs and the speed of its ranks, as sentences from the heartbeats of its nodes."""

from collections.abc import Sequence
from statistics import median, median_low
from typing import Final

from shardmake.core.units import numbered, plural
from shardmake.run.attempt import AttemptDir, Heartbeat, NodeHeartbeats

WINDOW_STEPS: Final = 10
"""Least steps over which a rank takes the mean of its compute time."""
WINDOW_SECONDS: Final = 12
"""Least seconds of the same."""
WINDOWS: Final = 5
"""Windows in a row in which a straggler is slow."""
THRESHOLD: Final = 1.3
"""A straggler computes more than this many times as long as the median rank."""


def gpu_use(folder: AttemptDir) -> str:
    """Return how much the GPUs of all nodes were used, as a sentence; empty if nothing is known."""
    used = [(gpu, node.beats[0].host) for node in _nodes(folder) if node.beats for gpu in node.gpus]
    if not used:
        return ""
    least, host = min(used, key=lambda one: one[0].percent)
    powers = [gpu.watts for gpu, _ in used if gpu.watts is not None]
    power = f", at {sum(powers) / len(powers):.0f} W each" if len(powers) == len(used) else ""
    mean = sum(gpu.percent for gpu, _ in used) / len(used)
    return (
        f"kernels ran {mean:.0f}% of the time on {plural(len(used), 'GPU')}{power}; least on GPU {least.number} of "
        f"{host} ({least.percent:.0f}%)"
    )


def stragglers(folder: AttemptDir) -> str:
    """Return which ranks of an attempt compute longer than the others, by node; empty if none stands out."""
    return describe_stragglers([beat for node in _nodes(folder) for beat in node.beats])


def describe_stragglers(beats: Sequence[Heartbeat]) -> str:
    """Return the same from the last heartbeats of the ranks.

    A rank stands out if it is slower than `THRESHOLD` in each of its last `WINDOWS` windows. The median is the lower
    one of two, so that of two ranks, or of the ranks of two nodes, the slow ones stand out.
    """
    timed = [beat for beat in beats if len(beat.compute_seconds) == WINDOWS]
    usual = median_low([median(beat.compute_seconds) for beat in timed]) if len(timed) > 1 else 0.0
    slow: dict[str, dict[int, float]] = {}
    for beat in timed:
        if min(beat.compute_seconds) > THRESHOLD * usual > 0:
            slow.setdefault(beat.host, {})[beat.rank] = median(beat.compute_seconds) / usual
    found = [
        f"{numbered('rank', [*ratios])} on {host} {'compute up to' if len(ratios) > 1 else 'computes'} "
        f"{max(ratios.values()):.1f} times"
        for host, ratios in slow.items()
    ]
    if not found:
        return ""
    return (
        f"{', '.join(found)} as long as the median rank (reported from {THRESHOLD} times on, if it lasts for "
        f"{WINDOWS * WINDOW_STEPS} steps and {WINDOWS * WINDOW_SECONDS} s)"
    )


def _nodes(folder: AttemptDir) -> list[NodeHeartbeats]:
    found = (NodeHeartbeats.read_if_exists(path) for path in sorted(folder.heartbeats.glob("node-*.json")))
    return [node for node in found if node]

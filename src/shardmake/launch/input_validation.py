"""Compare the base weights and the tokenized data with their records: every node reads its share of the files.

All nodes read at once, before their ranks start, so together they read every byte once, with the four threads of
`shardmake.core.manifest`. What the ranks then load is in the page cache of a node.
"""

import time
from collections.abc import Callable

from shardmake.core.errors import ModelError
from shardmake.core.units import GIB
from shardmake.launch.preflight import PreflightError
from shardmake.run.attempt import Attempt
from shardmake.run.findings import stops
from shardmake.run.sources import recorded_data, recorded_weights, refuse_changed


def validate_inputs(attempt: Attempt, node_rank: int, report: Callable[[str], None]) -> None:
    """Read the files that this node compares, and pass their number and the duration to ``report``.

    Raises:
        PreflightError: a file is not as `shardmake fetch` or `shardmake data` recorded it.
    """
    started, weights = time.monotonic(), recorded_weights(attempt.rundir)
    files = {**weights, **recorded_data(attempt.rundir, "train", "eval")}
    by_size = sorted(files, key=lambda name: (files[name].size, name))  # every node gets about as many of each size
    share = {name: files[name] for name in by_size[node_rank :: attempt.nodes]}
    try:
        refuse_changed(attempt.rundir, share)
    except ModelError as error:
        raise PreflightError([stops("inputs", str(error).removesuffix("."))], blames_run=True) from None
    size, seconds = sum(entry.size for entry in share.values()) / GIB, time.monotonic() - started
    report(f"{len(share)} of {len(files)} files of model and data are as recorded ({size:.2f} GiB, {seconds:.1f} s)")
    if not weights:
        report("warning: the base weights were not compared, because `shardmake fetch` has recorded none")

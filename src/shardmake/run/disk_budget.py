"""What a run will need on disk, compared with what the file system and the user's quota leave."""

from collections.abc import Mapping
from typing import Any

from shardmake.core.atomic import read_json
from shardmake.core.disk import require_space, tree_size
from shardmake.core.units import GIB
from shardmake.run.paths import RunDir
from shardmake.run.plan import Choice, read_plan


def check_run(rundir: RunDir) -> None:
    """Refuse to start a training whose checkpoints and final model will not fit; what is there already counts."""
    check_plan(rundir, read_json(rundir.memory, f"shardmake plan {rundir.name}"), read_plan(rundir.plan).choice)


def check_plan(rundir: RunDir, estimates: Mapping[str, Any], choice: Choice) -> str:
    """Refuse a choice whose checkpoints and final model will not fit; else say what it needs and what is left.

    ``estimates`` is the content of memory.json.
    """
    terms = _disk_terms(estimates, choice)
    needed = max(0, sum(terms.values()) - tree_size(rundir.checkpoints) - tree_size(rundir.model))
    listed = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in terms.items())
    return require_space(rundir.root, needed, f"Run {rundir.name} will need {needed / GIB:.1f} GiB more ({listed})")


def checkpoint_size(rundir: RunDir, copies: int) -> int:
    """Estimated bytes of one checkpoint of the run's plan, which reckons with ``copies`` kept and one being written."""
    estimates = read_json(rundir.memory, f"shardmake plan {rundir.name}")
    return _disk_terms(estimates, read_plan(rundir.plan).choice)["checkpoints"] // (copies + 1)


def _disk_terms(estimates: Mapping[str, Any], choice: Choice) -> dict[str, int]:
    chosen = choice.model_dump()
    return next(item["disk"]["terms"] for item in estimates["candidates"] if item["choice"] == chosen)

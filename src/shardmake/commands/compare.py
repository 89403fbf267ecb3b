"""``shardmake compare``: choose the runs, print their table, and write the page."""

from collections.abc import Sequence

from shardmake.commands.text_table import print_table
from shardmake.config.load import get_run, sweep_runs
from shardmake.config.models import Config, Run
from shardmake.core.errors import ConfigError
from shardmake.report.comparison import Comparison


def select_runs(config: Config, names: Sequence[str], sweep: str | None) -> dict[str, Run]:
    """Return the runs called ``names``, or those of ``sweep``. Raises `ConfigError` for fewer than two runs."""
    if bool(names) == (sweep is not None):
        raise ConfigError("compare: the runs are missing. Name at least two runs, or one sweep with --sweep NAME.")
    chosen = {name: get_run(config, name) for name in (names if sweep is None else sweep_runs(config, sweep))}
    if len(chosen) < 2:
        raise ConfigError(f"compare: {', '.join(chosen)} is one run. Name at least two different runs.")
    return chosen


def print_comparison(comparison: Comparison) -> None:
    """Print the table and the notes."""
    print_table(*comparison.table())
    print("* is the best value of the runs.")
    for note in comparison.notes:
        print(note)

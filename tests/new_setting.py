"""A setting that exists only here, a row and a key of the run, as every reader of the table finds it.

``python -m tests.new_setting FOLDER`` prints what it found as JSON. The key and the row come before the other imports.
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import Field

from shardmake.config import models


class Run(models.Run):
    """A run with one key more."""

    drop_last: bool = Field(False, description="Leave out the last rows of an epoch.")


models.Run = Run  # type: ignore[misc]

from shardmake.config.settings import SETTINGS, Setting  # noqa: E402

NAME = "dataloader_drop_last"
"""The name that Trainer's argument and DeepSpeed's key share."""
SETTINGS["dropped rows"] = Setting("dropped rows", "drop_last", (NAME,), (NAME,), label="Last rows dropped", shown="{}")

from shardmake.config.effects import effect_of, values_of  # noqa: E402
from shardmake.core.errors import ShardmakeError  # noqa: E402
from shardmake.render.comparison import Settings  # noqa: E402
from shardmake.render.settings_table import compare  # noqa: E402
from shardmake.render.stage import render_files  # noqa: E402
from shardmake.render.user_files import merge_own_files  # noqa: E402
from shardmake.report.card import render_card  # noqa: E402
from shardmake.run.settings_digest import result_settings  # noqa: E402
from shardmake.train.learning_check import check_deepspeed_file  # noqa: E402
from tests import finished_run  # noqa: E402
from tests.planted_settings import ARGUMENTS, AUTO  # noqa: E402
from tests.unit.plans import make_cluster, make_model, make_plan, make_run  # noqa: E402
from tools import strategies_page  # noqa: E402


class DeepSpeedEngine:
    """An engine that runs with other values than the rendered ones."""

    config = AUTO | {NAME: False}


def refused(check: Any, *arguments: Any) -> list[str]:
    """Return the lines of the error that name the setting."""
    try:
        check(*arguments)
    except ShardmakeError as error:
        return [line.strip() for line in str(error).splitlines() if line.strip().startswith(NAME)]
    return []


def find(folder: Path) -> dict[str, Any]:
    """Return what each reader makes of the setting; ``folder`` is empty."""
    plan, cluster = make_plan("zero2"), make_cluster()
    (folder / "ds.json").write_text(json.dumps({NAME: False, "zero_optimization": {"stage": 2}}))
    run = make_run(drop_last=True, deepspeed_config=str(folder / "ds.json"))
    files = render_files(plan, run, cluster, make_model(), folder)
    rows = compare(Settings(ARGUMENTS | {NAME: True}, AUTO | {NAME: False}), folder)[0].rows
    (row,) = [row for row in rows if row.setting == "dropped rows"]
    rundir = finished_run.make_rundir(folder)
    finished_run.with_arguments(finished_run.SETTINGS, **{NAME: True}).write(rundir.training)
    card = render_card(finished_run.make_run(), rundir)
    return {
        "rendered": [files.deepspeed[NAME], files.training.arguments[NAME]],
        "own file": refused(merge_own_files, files, run, plan.choice), "comparison": [row.verdict, row.effect],
        "rank": refused(check_deepspeed_file, DeepSpeedEngine(), {NAME: True}),
        "digest": result_settings(files.training, plan, "data")["drop_last"], "changes": effect_of("drop_last").changes,
        "value": values_of(run, cluster)["drop_last"],
        "report": [line for line in card.splitlines() if "rows dropped" in line],
        "reference": [line for line in strategies_page.table().splitlines() if "`drop_last`" in line],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(find(Path(sys.argv[1]))))

"""Stand-ins for the results of finished stages, as far as Snakemake and the rules read them."""

import os
from pathlib import Path
from typing import Any

from shardmake.config.load import load_cluster, load_config
from shardmake.core.atomic import write_json
from shardmake.core.environment import CONFIG_VARIABLE
from shardmake.run.paths import RunDir
from shardmake.run.record import FORMAT
from shardmake.run.settings import current

CONTENT: dict[str, Any] = {
    "format": FORMAT, "resources": {key: {"cpus": 1, "memory_gib": 1} for key in ("data", "consolidate", "evaluate")},
}  # fmt: skip


def leave(stage: str, name: str) -> None:
    """Write what ``stage`` of the run ``name`` leaves."""
    rundir = RunDir(Path("runs", name))
    config = load_config(Path(os.environ.get(CONFIG_VARIABLE, "config/config.yaml")))
    files = {
        "fetch": (rundir.sources, rundir.weights_receipt), "plan": (rundir.plan, rundir.memory, rundir.memory_table),
        "render": (rundir.accelerate, rundir.deepspeed, rundir.training, rundir.rendered),
        "data": (rundir.data_receipt,), "train": (rundir.train_receipt,),
        "consolidate": (rundir.model / "config.json",), "evaluate": (rundir.evaluation,),
        "push": (rundir.push_receipt,),
        "report": (rundir.report, *map(rundir.figure, ("loss", "optimizer", "speed", "memory", "by-length"))),
    }  # fmt: skip
    for path in files[stage]:
        write_json(path, CONTENT)
    if stage == "render":
        rundir.fallbacks.mkdir(exist_ok=True)
    if stage == "consolidate":
        size = (rundir.model / "config.json").stat().st_size
        write_json(rundir.model_receipt, {"verification": {"files": {"config.json": {"size": size}}}})
    if stage != "report":
        current(stage, config.runs[name], load_cluster(Path(config.cluster))).write(rundir.stage_settings(stage))

"""The settings with which a run's finished stages ran, and what has changed since.

Each stage writes ``settings/STAGE.json`` after its success. It is not an output of the workflow's rules, because
Snakemake removes outputs before it runs a rule again.
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from typing import ClassVar

from psutil import Process
from pydantic import Field

from shardmake.config.effects import STAGES, default_of, differences, own_values, read_keys, result_keys, values_of
from shardmake.config.models import Cluster, Run
from shardmake.core.errors import ConfigError
from shardmake.core.run_folder import make_folder, open_file
from shardmake.core.temporary import take_lock
from shardmake.run.paths import RunDir
from shardmake.run.record import RunFile, optional

logger = logging.getLogger(__name__)
STAGES_BEFORE: Mapping[str, tuple[str, ...]] = {
    "plan": ("fetch",),
    "render": ("plan",),
    "data": ("fetch",),
    "train": ("fetch", "plan", "render", "data"),
    "consolidate": ("train",),
    "evaluate": ("train", "consolidate"),
    "push": ("train", "consolidate", "evaluate"),
    "report": ("train", "consolidate", "evaluate"),
}
"""Stages whose results a stage uses."""
_UNTIL_TRAINED = ("plan", "render")
"""Stages that prepare the training, and run again after any change that they read until it has finished."""
_LOST = "lost"
"""Key of the lost files in the parameter of a rule."""


class StageSettings(RunFile):
    """``settings/STAGE.json``: the settings with which a stage ran to its end."""

    made_by: ClassVar[str] = "shardmake STAGE NAME"
    stage: str = Field(description="Name of the stage.")
    values: dict[str, str] = Field(description="Settings that the stage reads, as text and without secrets, by key.")
    seconds: float | None = optional(None, "Time that the command took, from the start of its process.")

    def results(self) -> dict[str, str]:
        """Return the settings that can change the stage's result."""
        return _part(self.values, result_keys(self.stage))


def current(stage: str, run: Run, cluster: Cluster) -> StageSettings:
    """Return the settings that ``stage`` reads in the configuration."""
    return StageSettings(stage=stage, values=_part(values_of(run, cluster), read_keys(stage)))


def read_settings(stage: str, rundir: RunDir) -> StageSettings | None:
    """Return the settings with which ``stage`` last ran to its end; None if it never did.

    A key that the version which wrote them did not know had its default.
    """
    found = StageSettings.read_if_exists(rundir.stage_settings(stage))
    if found is None:
        return None
    values = {key: found.values.get(key, default_of(key)) for key in read_keys(stage)}
    return found.model_copy(update={"values": values})


def changed_results(stage: str, values: Mapping[str, str], rundir: RunDir) -> list[str]:
    """Return ``key: old -> new`` for every setting that makes the result of ``stage`` outdated."""
    before = read_settings(stage, rundir)
    return differences(before.results(), _part(values, result_keys(stage))) if before else []


def changed_settings(stage: str, values: Mapping[str, str], rundir: RunDir) -> list[str]:
    """Return ``key: old -> new`` for the settings for which Snakemake runs ``stage`` again (`rerun_settings`)."""
    before = read_settings(stage, rundir)
    if before is None:
        return []
    old = _part(before.values, compared_keys(stage))
    return differences(old, rerun_settings(stage, values, rundir, old)) + _lost(stage, rundir)


def _lost(stage: str, rundir: RunDir) -> list[str]:
    """Return the files of the merged model that are missing or have another size than in its receipt.

    They are not outputs of the rule, because Snakemake would remove the model before a merge that may fail.
    """
    if stage != "consolidate":
        return []
    try:
        files = json.loads(rundir.model_receipt.read_bytes())["verification"]["files"]
    except (OSError, ValueError, KeyError):
        return []  # the reader of the receipt reports it
    sizes = {name: path.stat().st_size for name in files if (path := rundir.model / name).is_file()}
    return [f"{rundir.model / name}: removed or replaced" for name in files if sizes.get(name) != files[name]["size"]]


def is_trained(values: Mapping[str, str], rundir: RunDir) -> bool:
    """Return whether the training has finished with the settings ``values``."""
    return (
        rundir.train_receipt.exists()
        and rundir.stage_settings("train").exists()
        and not changed_results("train", values, rundir)
    )


def compared_keys(stage: str) -> tuple[str, ...]:
    """Return the keys by which Snakemake decides whether ``stage`` runs again."""
    return read_keys(stage) if stage in _UNTIL_TRAINED else result_keys(stage)


def rerun_settings(
    stage: str, values: Mapping[str, str], rundir: RunDir, recorded: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings of `compared_keys`; ``recorded`` are those of the stage's last job, without defaults.

    A plan depends on settings that cannot change the result, such as the memory of a node. Once the training has
    finished, these count as unchanged.
    """
    settings = _part(values, compared_keys(stage))
    if stage not in _UNTIL_TRAINED:
        return settings
    before = {key: recorded.get(key, default_of(key)) for key in settings}
    is_same = not differences(*(_part(part, result_keys(stage)) for part in (before, settings)))
    return before if before != settings and is_same and is_trained(values, rundir) else settings


def rerun_text(stage: str, values: Mapping[str, str], rundir: RunDir, recorded: str | None) -> str:
    """Return the parameter of a stage's rule: the settings that are not the defaults, as JSON.

    ``recorded`` is that of the stage's last job. A job that replaces lost files has their names as well; they stay in
    the parameter until others are lost. A path that is only spelled otherwise stays as it was.
    """
    before = json.loads(recorded) if recorded else {}
    own = own_values(rerun_settings(stage, values, rundir, before))
    last = {key: value for key, value in before.items() if key != _LOST}
    own = own if differences(last, own) else last
    lost = [f"{file} since {rundir.model_receipt.stat().st_mtime}" for file in _lost(stage, rundir)]
    lost = lost or before.get(_LOST, [])
    return json.dumps(own | ({_LOST: lost} if lost else {}))


@contextlib.contextmanager
def recorded_settings(stage: str, run: Run, cluster: Cluster, rundir: RunDir) -> Iterator[None]:
    """Log which settings changed since ``stage`` ran; after its success, record the settings.

    A training is recorded with the settings that its files were rendered from.
    """
    before, now = read_settings(stage, rundir), current(stage, run, cluster)
    if before and (changes := differences(before.values, now.values)):
        logger.info("Settings changed since the last %s of %s: %s.", stage, rundir.name, "; ".join(changes))
    _check_stages_before(stage, values_of(run, cluster), rundir)
    make_folder(rundir.settings)
    with open_file(rundir.stage_lock, "a+") as lock:  # NFS lends a shared lock only to what is open for reading
        if not take_lock(lock.fileno(), without_locks=True, shared=True):
            raise ConfigError(f"`shardmake clean` is removing folders of {rundir.name}. Start again when it has ended.")
        yield
        now.model_copy(update={"seconds": time.time() - Process().create_time()}).write(rundir.stage_settings(stage))


def stage_times(rundir: RunDir) -> dict[str, float]:
    """Return the seconds that the last command of each finished stage took."""
    found = {stage: StageSettings.read_if_exists(rundir.stage_settings(stage)) for stage in STAGES}
    return {stage: last.seconds for stage, last in found.items() if last and last.seconds is not None}


def _check_stages_before(stage: str, values: Mapping[str, str], rundir: RunDir) -> None:
    """Raise `ConfigError` if a training would use files of other settings; warn where a later stage does."""
    for earlier in STAGES_BEFORE.get(stage, ()):
        matter = {*result_keys(earlier), *read_keys(stage)}  # the plan also checks settings of later stages
        changed = changed_settings(earlier, values, rundir)
        changes = [change for change in changed if change.partition(":")[0] in matter]
        if not changes:
            continue
        what = f"the {earlier} stage of {rundir.name} ran with other settings: {'; '.join(changes)}"
        if stage == "train":
            raise ConfigError(
                f"Training was not started: {what}. Run the stage again: shardmake {earlier} {rundir.name}"
            )
        logger.warning("%s uses old results: %s. To renew them: shardmake %s %s", stage, what, earlier, rundir.name)


def _part(values: Mapping[str, str], keys: tuple[str, ...]) -> dict[str, str]:
    return {key: values[key] for key in keys if key in values}

"""The settings that define the result of a training, apart from how it is spread over the hardware.

What a run left under other settings is set aside, and restored when the run has those settings again.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardmake.config.effects import as_text, differences
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.settings import SETTINGS
from shardmake.config.user_file_keys import changes_result
from shardmake.core.atomic import digest
from shardmake.core.errors import ShardmakeError
from shardmake.core.run_folder import rename
from shardmake.core.units import plural
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.paths import RunDir, numbered_paths
from shardmake.run.plan import Plan
from shardmake.run.training_settings import ScriptProgram, TrainingSettings

logger = logging.getLogger(__name__)


def result_settings(
    settings: TrainingSettings, plan: Plan, data_digest: str, model_digest: str | None = None
) -> dict[str, str]:
    """Return model, objective, method, data and hyperparameters as text, by key and without secrets.

    ``model_digest`` is `shardmake.run.sources.content_of_model`; a model of the hub has its commit.
    """
    program = settings.program
    script = {} if not isinstance(program, ScriptProgram) else {
        "script": program.path, "script_args": program.args, "content of the script": program.sha256[:16],
        **({"service.command": program.service.command} if program.service else {}),
    }  # fmt: skip
    method, objective = settings.method.as_json(), settings.objective_settings
    section = objective.model_dump(mode="json") if objective else {}
    choice, compares = plan.choice, OBJECTIVES[settings.objective].compares_batch
    ranks = plural(choice.data_parallel, "rank")
    own_template = settings.model.chat_template
    template = {} if own_template is None else {"content of the chat template": digest(own_template)}
    values = {
        **script,
        "model": settings.model.path,
        "revision": settings.model.revision,
        "content of the model": model_digest,
        "objective": settings.objective,
        **{f"{settings.objective}.{name}": value for name, value in section.items()},
        "method": method.pop("kind"),
        **{f"lora.{name}": value for name, value in method.items()},
        **{row.result_key: settings.arguments.get(row.trainer[0]) for row in SETTINGS.values() if row.result_key},
        "precision": plan.precision,
        "global_batch_size": choice.global_batch_size,
        **({"micro batch": f"{choice.micro_batch_size} on {ranks}"} if compares else {}),
        "sequence_length": plan.workload.sequence_length,
        "content of the data": data_digest,
        **template,
        **{key: value for key, value in settings.own_files.items() if changes_result(key)},
    }
    later = {
        "freeze": settings.freeze,
        "learning_rates": settings.learning_rates,
        "class of the optimizer": settings.optimizer_row.own_class,
        "checkpoints.early_stopping": settings.checkpoints.early_stopping,
        "scheduler_arguments": values.pop("scheduler_arguments"),
    }
    values |= {key: value for key, value in later.items() if value}  # trainings of older versions do not know them
    return {name: as_text(value) for name, value in values.items()}


def settings_digest(settings: Mapping[str, str], rundir: RunDir) -> str:
    """Return the digest of `result_settings`; that of the newest attempt of the run that had the same.

    Training may resume from a checkpoint of the same digest under another strategy, node count or micro batch.
    Checkpoints of another digest belong to another training. A key that another version did not know counts as unset.
    """
    same = (it.settings_digest for it in _attempts(rundir) if _set(it.result_settings) == _set(settings))
    return next(same, digest(settings))


def _set(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if value not in ("null", "{}", "[]")}


def _attempts(rundir: RunDir) -> Iterator[Attempt]:
    """Yield the settings of the attempts, newest first."""
    for path in reversed(numbered_paths(rundir.attempts).values()):
        with contextlib.suppress(ShardmakeError):  # an attempt of another version
            if attempt := Attempt.read_if_exists(AttemptDir(path).settings):
                yield attempt


def describe_changes(rundir: RunDir, theirs: str, ours: Mapping[str, str]) -> str:
    """Return how ``ours`` differ from the settings with the digest ``theirs``, for a message.

    The settings are those of the newest attempt with that digest.
    """
    for attempt in _attempts(rundir):
        if attempt.settings_digest == theirs and attempt.result_settings:
            return "; ".join(differences(attempt.result_settings, ours))
    return "their attempt is no longer recorded"


def stash_and_restore(folder: Path, theirs: str, ours: str, changes: str) -> None:
    """Rename ``folder``, which has the settings digest ``theirs``, and restore an earlier one with ``ours``.

    ``changes`` names the settings that differ, for the message.
    """
    aside = next(place for place in _places(folder, theirs) if not place.exists())
    logger.info("The folder %s belongs to other settings (%s). Renamed it to %s.", folder.name, changes, aside.name)
    rename(folder, aside)
    own = next(_places(folder, ours))
    if own.exists():
        logger.info("Restoring %s, which belongs to the current settings.", own.name)
        rename(own, folder)


def _places(folder: Path, settings_digest: str) -> Iterator[Path]:
    """Yield the names for a folder that is set aside, in order."""
    for number in itertools.count(1):
        yield folder.with_name(f"{folder.name}-of-{settings_digest}" + (f"-{number}" if number > 1 else ""))

"""Check and configure experiment trackers.

Transformers' own callbacks report to them. Their files are in the run's folder unless the user's environment names a
server. The output of the ranks and the name of the machine are not sent. All attempts of a run continue one chart of
W&B and trackio.
"""

import os
from collections.abc import Container, Iterable, Mapping
from importlib import import_module
from typing import Final

from shardmake.config.choices import TRACKERS
from shardmake.core.atomic import digest
from shardmake.core.errors import ConfigError
from shardmake.run.attempt import Attempt

PROJECT: Final = "shardmake"


def check_trackers(names: Iterable[str]) -> None:
    """Raise if a tracker's package is missing or cannot be imported here; the nodes use the same environment."""
    for name in names:
        problems = [_import_problem(package) for package in TRACKERS[name]]
        if all(problems):
            raise ConfigError(
                f"The tracker {name} in report_to cannot be used: {problems[0]}. Install its package "
                f"(pip install {TRACKERS[name][0]}), or remove {name} from report_to."
            )


def _import_problem(package: str) -> str | None:
    try:
        import_module(package)
    except ImportError as error:
        return str(error)
    return None


def prepare_trackers(attempt: Attempt, names: Container[str]) -> None:
    """Set the environment variables that the clients of the trackers ``names`` read when they start."""
    os.environ.update(tracker_environment(attempt, names, os.environ))


def tracker_environment(attempt: Attempt, names: Container[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for the clients of the trackers ``names``, without those that ``environment`` already has.

    All attempts with the same settings use one id, so that W&B continues the same chart after an interruption. Without
    internet access W&B keeps its files for ``wandb sync``, which joins them by that id.
    """
    folder = attempt.rundir.train.resolve()
    variables = {
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "WANDB_DIR": str(folder),
        "WANDB_PROJECT": PROJECT,
        "WANDB_RUN_ID": digest([attempt.run_folder, attempt.settings_digest])[:16],
        "WANDB_RESUME": "allow",
        "WANDB_MODE": "offline" if attempt.offline else "online",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_X_DISABLE_META": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_HOST": "cluster",
        "MLFLOW_TRACKING_URI": f"file://{folder / 'mlflow'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",  # plain files: a database on a network file system locks up
        "MLFLOW_EXPERIMENT_NAME": PROJECT,
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    return {
        name: value
        for name, value in variables.items()
        if name.partition("_")[0].lower() in names and name not in environment
    }

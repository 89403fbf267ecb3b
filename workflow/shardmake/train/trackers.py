"""Experiment trackers: which package each needs, and where it keeps what it is told.

Transformers' own callbacks do the telling. Everything lies in the run's folder unless the user's environment names a
server; of the machine and its environment nothing is sent.
"""

from collections.abc import Container, Iterable, Mapping
from importlib.util import find_spec
from typing import Final

from shardmake.errors import UserError
from shardmake.receipt import digest
from shardmake.rundir import RunDir

_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
}


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker whose package is not installed here; the nodes use the same environment."""
    for name in names:
        if not any(find_spec(package) for package in _PACKAGES[name]):
            raise UserError(
                f"report_to names {name}, and its package is not installed. "
                f"Install it (pip install {_PACKAGES[name][0]}), or take {name} out of report_to."
            )


def tracker_environment(
    rundir: RunDir, names: Container[str], *, offline: bool, environment: Mapping[str, str]
) -> dict[str, str]:
    """Variables for the clients of the trackers ``names``, beside those that ``environment`` has already.

    One id for all attempts, so that W&B goes on with the same chart after an interruption; without internet it keeps
    its files for ``wandb sync``.
    """
    folder = rundir.train.resolve()
    variables = {
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "WANDB_DIR": str(folder),
        "WANDB_PROJECT": "shardmake",
        "WANDB_RUN_ID": digest(str(rundir.root.resolve()))[:16],
        "WANDB_RESUME": "allow",
        "WANDB_MODE": "offline" if offline else "online",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_X_DISABLE_META": "true",
        "MLFLOW_TRACKING_URI": f"file://{folder / 'mlflow'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",  # plain files: a database on a network file system locks up
        "MLFLOW_EXPERIMENT_NAME": "shardmake",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    return {
        name: value
        for name, value in variables.items()
        if name.partition("_")[0].lower() in names and name not in environment
    }

"""Experiment trackers: which package each needs, and where it keeps what it is told.

Transformers' own callbacks do the telling. Everything lies in the run's folder unless the user's environment names a
server; what the ranks print and the name of the machine are kept from it. All attempts of a run go on with one chart.
"""

import os
from collections.abc import Container, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

from shardmake.core.atomic import digest, write_text
from shardmake.core.errors import ShardmakeError
from shardmake.run.attempt import Attempt

_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
}


PROJECT: Final = "shardmake"


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker whose package is missing here or does not load; the nodes use the same environment."""
    for name in names:
        complaints = [_complaint(package) for package in _PACKAGES[name]]
        if all(complaints):
            raise ShardmakeError(
                f"report_to names {name}, and its package cannot be used: {complaints[0]}. "
                f"Install it (pip install {_PACKAGES[name][0]}), or take {name} out of report_to."
            )


def _complaint(package: str) -> str | None:
    """Why a package cannot be imported; None if it can."""
    try:
        import_module(package)
    except ImportError as error:
        return str(error)
    return None


def prepare_trackers(attempt: Attempt, names: Container[str]) -> None:
    """Set what the clients of the trackers ``names`` read from the environment of this rank, before they start."""
    os.environ.update(tracker_environment(attempt, names, os.environ))
    if "mlflow" in names and os.environ.get("RANK", "0") == "0" and "MLFLOW_RUN_ID" not in os.environ:
        note = attempt.rundir.train / f"mlflow-run-{attempt.recipe}.txt"
        os.environ.update(_one_mlflow_run(note, attempt.rundir.name))


def tracker_environment(attempt: Attempt, names: Container[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for the clients of the trackers ``names``, beside those that ``environment`` has already.

    One id for all attempts at the same settings, so that W&B goes on with the same chart after an interruption; without
    internet it keeps its files for ``wandb sync``, which joins them by that id.
    """
    folder = attempt.rundir.train.resolve()
    variables = {
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "WANDB_DIR": str(folder),
        "WANDB_PROJECT": PROJECT,
        "WANDB_RUN_ID": digest([attempt.run_folder, attempt.recipe])[:16],
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


def _one_mlflow_run(note: Path, name: str) -> dict[str, str]:
    """Variables that have MLflow's client go on with the run in the file ``note``; without one, it is begun.

    Parameters of a run cannot change, and those of a later attempt do (the next fallback), so only the first
    attempt that gets so far tells them.
    """
    from mlflow import MlflowClient, set_experiment
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    if note.exists():
        run_id = note.read_text().strip()
        try:
            is_told = bool(client.get_run(run_id).data.params)
        except MlflowException:
            pass  # on a server that does not have it any more, or another one
        else:
            return {"MLFLOW_RUN_ID": run_id, **({"MLFLOW_MAX_LOG_PARAMS": "0"} if is_told else {})}
    experiment = set_experiment(os.environ["MLFLOW_EXPERIMENT_NAME"]).experiment_id
    run_id = client.create_run(experiment, run_name=name).info.run_id
    write_text(note, run_id + "\n")
    return {"MLFLOW_RUN_ID": run_id}

"""Check and configure experiment trackers.

Transformers' own callbacks report to them. Their files are in the run's folder unless the user's environment names a
server. The output of the ranks and the name of the machine are not sent. All attempts of a run continue one chart.
"""

import os
from collections.abc import Container, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

from shardmake.config.models import TRACKERS
from shardmake.core.atomic import digest, write_text
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
    if "mlflow" in names and os.environ.get("RANK", "0") == "0" and "MLFLOW_RUN_ID" not in os.environ:
        run_id_file = attempt.rundir.train / f"mlflow-run-{attempt.settings_digest}.txt"
        os.environ.update(_shared_mlflow_run(run_id_file, attempt.rundir.name))


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


def _shared_mlflow_run(run_id_file: Path, name: str) -> dict[str, str]:
    """Return variables that make MLflow's client continue the run in ``run_id_file``; create the run if necessary.

    MLflow does not allow a run's parameters to change, but they differ between attempts (another fallback). So only the
    first attempt that reaches this point logs them.
    """
    from mlflow import MlflowClient, set_experiment
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    if run_id_file.exists():
        run_id = run_id_file.read_text().strip()
        try:
            has_parameters = bool(client.get_run(run_id).data.params)
        except MlflowException:
            pass  # the server has deleted the run, or is another server
        else:
            return {"MLFLOW_RUN_ID": run_id, **({"MLFLOW_MAX_LOG_PARAMS": "0"} if has_parameters else {})}
    experiment = set_experiment(os.environ["MLFLOW_EXPERIMENT_NAME"]).experiment_id
    run_id = client.create_run(experiment, run_name=name).info.run_id
    write_text(run_id_file, run_id + "\n")
    return {"MLFLOW_RUN_ID": run_id}

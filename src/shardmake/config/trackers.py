"""The table of experiment trackers: those of the installed transformers."""

from collections.abc import Mapping
from typing import Final

TRACKERS: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    **{name: (name,) for name in ("wandb", "mlflow", "trackio")},
    "azure_ml": ("azureml.core",),
    **{name: (name,) for name in ("clearml", "codecarbon", "comet_ml", "dagshub", "dvclive")},
    "flyte": ("flytekit",),
    **{name: (name,) for name in ("kubeflow", "neptune", "swanlab")},
}
"""Modules of which a tracker needs one, by its name in ``report_to``."""

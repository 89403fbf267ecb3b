"""The table of experiment trackers: those of the installed transformers."""

from collections.abc import Mapping
from typing import Final

TRACKERS: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
    "azure_ml": ("azureml.core",),
    "clearml": ("clearml",),
    "codecarbon": ("codecarbon",),
    "comet_ml": ("comet_ml",),
    "dagshub": ("dagshub",),
    "dvclive": ("dvclive",),
    "flyte": ("flytekit",),
    "kubeflow": ("kubeflow",),
    "neptune": ("neptune",),
    "swanlab": ("swanlab",),
}
"""Modules of which a tracker needs one, by its name in ``report_to``."""

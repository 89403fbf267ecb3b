"""The words that keys of the configuration can be set to, as types."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

from shardmake.config.formats import FORMATS, DataFormat
from shardmake.config.methods import METHODS
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.optimizers import OPTIMIZERS, TRIED
from shardmake.config.strategies import PARTITIONED_INFERENCE, STRATEGY_SPECS

TRACKERS: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    **{name: (name,) for name in ("wandb", "mlflow", "trackio")},
    "azure_ml": ("azureml.core",),
    **{name: (name,) for name in ("clearml", "codecarbon", "comet_ml", "dagshub", "dvclive")},
    "flyte": ("flytekit",),
    **{name: (name,) for name in ("kubeflow", "neptune", "swanlab")},
}
"""The trackers of the installed transformers, by their names in ``report_to``: modules of which each needs one."""

if TYPE_CHECKING:
    Strategy = str
    EvaluationBackend = str
    Objective = str
    Optimizer = str
    Method = str
    Tracker = str
    Format = DataFormat
else:
    Strategy = Literal[tuple(STRATEGY_SPECS)]
    EvaluationBackend = Literal["whole", "device-map", *PARTITIONED_INFERENCE]
    Objective = Literal[tuple(OBJECTIVES)]
    Optimizer = Literal[(*OPTIMIZERS, *TRIED)]
    Method = Literal[tuple(METHODS)]
    Tracker = Literal[tuple(TRACKERS)]
    Format = Literal[tuple(FORMATS)]
Precision = Literal["bf16", "fp16", "fp32"]
GradientDtype = Literal["auto", "fp32", "bf16"]
TORCH_DTYPES: Final[dict[Precision, str]] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
Loss = Literal["plain", "fused", "chunked"]
Schedule = Literal[
    "cosine", "linear", "constant", "constant_with_warmup", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
    "cosine_with_restarts", "polynomial", "inverse_sqrt", "warmup_stable_decay",
]  # fmt: skip
"""transformers' schedules that follow from the step alone; the others wait for a metric."""
DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", "sigmoid_norm"
]

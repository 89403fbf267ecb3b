"""Which settings define the result of a training, apart from how it is spread over the hardware."""

from collections.abc import Mapping
from typing import Any

from shardmake.core.atomic import digest
from shardmake.run.plan import Plan

_RESULT_ARGUMENTS = (
    "learning_rate",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_steps",
    "num_train_epochs",
    "optim",
    "seed",
    "data_seed",
    "warmup_ratio",
    "warmup_steps",
    "weight_decay",
)


def settings_digest(settings: Mapping[str, Any], plan: Plan, data_receipt: Mapping[str, Any]) -> str:
    """Digest of model, objective, method, data and hyperparameters.

    Checkpoints of equal digests may be resumed under another strategy, node count or micro batch; checkpoints of
    another digest belong to another training.
    """
    arguments = settings["arguments"]
    script = {"script": settings["program"]} if settings["program"]["kind"] == "script" else {}
    return digest(
        {
            **script,
            "model": {key: settings["model"][key] for key in ("path", "revision")},
            "objective": settings["objective"],
            "method": settings["method"],
            "arguments": {name: arguments.get(name) for name in _RESULT_ARGUMENTS},
            "global_batch_size": plan.choice.global_batch_size,
            "sequence_length": plan.workload.sequence_length,
            "data": data_receipt["digest"],
        }
    )

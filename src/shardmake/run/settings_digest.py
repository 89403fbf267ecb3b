"""The settings that define the result of a training, apart from how it is spread over the hardware."""

from shardmake.core.atomic import digest
from shardmake.run.plan import Plan
from shardmake.run.training_settings import ScriptProgram, TrainingSettings

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


def settings_digest(settings: TrainingSettings, plan: Plan, data_digest: str) -> str:
    """Return the digest of model, objective, method, data and hyperparameters.

    Training may resume from a checkpoint of the same digest under another strategy, node count or micro batch.
    Checkpoints of another digest belong to another training.
    """
    script = {"script": settings.program.as_json()} if isinstance(settings.program, ScriptProgram) else {}
    return digest(
        {
            **script,
            "model": {"path": settings.model.path, "revision": settings.model.revision},
            "objective": settings.objective,
            "method": settings.method.as_json(),
            "arguments": {name: settings.arguments.get(name) for name in _RESULT_ARGUMENTS},
            "global_batch_size": plan.choice.global_batch_size,
            "sequence_length": plan.workload.sequence_length,
            "data": data_digest,
        }
    )

"""The environment variables of a user's script and of its service, which docs/how-to/user-script.md lists."""

from shardmake.config.script_variables import PREFIX
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.plan import Plan
from shardmake.run.training_settings import TrainingSettings


def script_environment(folder: AttemptDir, attempt: Attempt, plan: Plan, settings: TrainingSettings) -> dict[str, str]:
    """Return the variables that are the same for every process of the attempt in ``folder``."""
    rundir, arguments = attempt.rundir, settings.arguments
    values: dict[str, object] = {
        "ATTEMPT": attempt.number,
        "ATTEMPT_FOLDER": folder.root,
        "CHECKPOINTS": rundir.checkpoints,
        "OUTPUT": rundir.script_output,
        "METRICS": rundir.metrics,
        "STOP_FILES": f"{rundir.stop_file}:{folder.stop_file}",
        "STOPPED": folder.stopped,
        "DATA": rundir.data,
        "RAW_DATA": rundir.raw_data if rundir.raw_data.exists() else "",
        "BASE": settings.model.path,
        "DEEPSPEED_CONFIG": folder.deepspeed_native if plan.choice.is_deepspeed else "",
        "SEQUENCE_LENGTH": plan.workload.sequence_length,
        "MICRO_BATCH_SIZE": plan.choice.micro_batch_size,
        "GRADIENT_ACCUMULATION_STEPS": plan.choice.gradient_accumulation_steps,
        "LEARNING_RATE": arguments["learning_rate"],
        "MAX_STEPS": arguments.get("max_steps", ""),
        "EPOCHS": arguments.get("num_train_epochs", ""),
        "SEED": arguments["seed"],
    }
    return {f"{PREFIX}{name}": str(value) for name, value in values.items()}

"""The training of an attempt: ``training.json``, written by `shardmake.render` and read by every rank."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from shardmake.config.models import Dpo, Kto, Loss, Method, Objective, ObjectiveSection, Profile, Reward, Service
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.optimizers import OptimizerSpec, find_built
from shardmake.config.script_file import PREFIX
from shardmake.run.adapter_settings import CONFIG
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.engine import Engine
from shardmake.run.model_class import ModelClass
from shardmake.run.plan import Plan
from shardmake.run.record import RunFile, RunRecord, optional


class BaseModelSettings(RunRecord):
    """The base model, and how its weights are loaded."""

    path: str = Field(description="Folder or hub id.")
    revision: str | None = Field(description="Branch, tag or commit of a hub id.")
    trust_remote_code: bool = Field(description="Run model code that lies beside the config.")
    model_class: ModelClass = Field(description="The class that the plan chose.")
    dtype: str = Field(description="Data type of the loaded weights, by torch's name.")
    attention: str = Field(description="Attention kernel, by transformers' name.")
    gradient_checkpointing: bool = Field(description="Recompute activations in the backward pass.")
    on_gpu: bool = Field(description="Each rank loads the weights to its GPU; else to host RAM first.")
    chat_template: str | None = optional(None, "The run's own chat template; None: the tokenizer's.")


class FullMethod(RunRecord):
    """Full fine-tuning."""

    kind: Literal["full"] = "full"


class AdapterMethod(RunRecord):
    """Low-rank adapters on a frozen base model."""

    kind: Method = Field(description="Kind of adapters.")
    rank: int = Field(description="Rank of the adapters.")
    alpha: int = Field(description="Scale: the update is multiplied by alpha / rank.")
    dropout: float = Field(description="Dropout on the adapters' input.")
    targets: list[str] | str = Field(description="Layers that get adapters.")
    adapter: str | None = optional(None, "Folder of the adapter whose training continues.")
    train_tokens: list[str] = optional([], "Tokens whose rows in the embedding and the head are trained.")


class OptimizerSettings(RunRecord):
    """An optimizer that the training arguments cannot name."""

    class_name: str = Field(description="Import path of the class.")
    arguments: dict[str, Any] = Field(description="Its keyword arguments.")


class Retention(RunRecord):
    """Which checkpoints stay: the newest ones, the best one, and one at regular steps."""

    keep: int = Field(2, description="Number of newest checkpoints.")
    best: bool = Field(False, description="Keep the checkpoint with the lowest evaluation loss as well.")
    every_steps: int | None = Field(None, description="Keep a checkpoint every so many steps as well.")

    def kept(self, losses: Mapping[int, float | None]) -> set[int]:
        """Return the steps of checkpoints to keep, at least one; ``losses`` are those of their evaluations, by step.

        A regular step is the first one at or after a multiple of ``every_steps``.
        """
        steps = sorted(losses, reverse=True)
        finite = [(loss, step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
        kept = set(steps[: max(1, self.keep)])
        if self.best and finite:
            kept.add(min(finite)[1])
        if self.every_steps:
            first = {step // self.every_steps: step for step in steps if step >= self.every_steps}
            kept |= set(first.values())
        return kept


class CheckpointSettings(RunRecord):
    """How training saves."""

    retention: Retention = Field(description="Which checkpoints stay.")
    mtbf_seconds: float | None = Field(
        description="Mean time between failures of the job, if the interval between saves follows from it."
    )
    asynchronous: bool = optional(False, "Save to node-local scratch and upload while training continues.")
    early_stopping: int | None = optional(None, "Evaluations in a row without a lower loss that end the training.")


class TrainerProgram(RunRecord):
    """Shardmake's own training with transformers' Trainer."""

    kind: Literal["trainer"] = "trainer"


class ScriptProgram(RunRecord):
    """A user's training script. An edited script is another training."""

    kind: Literal["script"] = "script"
    path: str = Field(description="The script.")
    args: list[str] = Field(description="Its arguments.")
    sha256: str = Field(description="Digest of its content.")
    service: Service | None = optional(None, "The program that serves it; None without one.")


class TrainingSettings(RunFile):
    """``training.json``: model, method, training arguments, and the engine that the ranks must find."""

    made_by: ClassVar[str] = "shardmake render NAME"
    model: BaseModelSettings = Field(description="The base model.")
    objective: Objective = Field(description="What training optimizes.")
    dpo: Dpo | None = optional(None, "Settings of the objective dpo; None for another one.")
    kto: Kto | None = optional(None, "Settings of the objective kto; None for another one.")
    reward: Reward | None = optional(None, "Settings of the objective reward; None for another one.")
    method: FullMethod | AdapterMethod = Field(description="Full fine-tuning or adapters.")
    freeze: list[str] = optional([], "Weights that are not trained (`shardmake.memory.model.find_frozen`).")
    learning_rates: dict[str, float] = optional({}, "Rates of some weights, by pattern (`find_rates` there).")
    arguments: dict[str, Any] = Field(
        description="Keyword arguments of `transformers.TrainingArguments`, without paths; the ranks add those."
    )
    optimizer: OptimizerSettings | None = Field(description="None: the optimizer that the arguments name.")
    expected: Engine = Field(description="The planned engine.")
    loss: Loss = Field(description="Cross entropy: plain, fused or chunked.")
    checkpoints: CheckpointSettings = Field(description="How training saves.")
    profile: Profile | None = optional(None, "Steps that rank 0 profiles.")
    memory_snapshot: bool = optional(False, "Rank 0 records the allocations of the first steps.")
    program: TrainerProgram | ScriptProgram = Field(description="What the ranks run.")
    own_files: dict[str, Any] = optional(
        {}, "Values that the run's own DeepSpeed and Accelerate files add to the plan's or change, by key."
    )

    @property
    def optimizer_row(self) -> OptimizerSpec:
        """Return the table's row of the optimizer."""
        return find_built(self.arguments["optim"], self.optimizer.class_name if self.optimizer else "")

    @property
    def objective_settings(self) -> ObjectiveSection | None:
        """Return the settings of the objective; None if it has none."""
        found: ObjectiveSection | None = getattr(self, self.objective, None)
        return found

    @property
    def unused_packages(self) -> list[str]:
        """Return packages that transformers and Accelerate would import, and that this training does not use.

        Each takes up to a second. Code of a model may use all of them, and a tracker those for data. pandas is an
        optional part of pyarrow.
        """
        if self.program.kind == "script" or self.model.trust_remote_code:
            return []
        preferences = OBJECTIVES[self.objective].trl is not None
        base = Path(self.model.path)
        adapters = self.method.kind != "full" or (base / CONFIG).exists() or not base.is_dir()
        data = preferences or self.arguments["report_to"] != "none"
        engine = preferences or self.expected.engine == "deepspeed"
        used = {"datasets": data, "pandas": data, "deepspeed": engine, "peft": preferences or adapters}
        return [name for name, is_used in used.items() if not is_used]


def script_environment(folder: AttemptDir, attempt: Attempt, plan: Plan, settings: TrainingSettings) -> dict[str, str]:
    """Return the variables that are the same for every process of the attempt in ``folder``."""
    rundir, arguments = attempt.rundir, settings.arguments
    values: dict[str, object] = {
        "ATTEMPT": attempt.number, "ATTEMPT_FOLDER": folder.root, "CHECKPOINTS": rundir.checkpoints,
        "OUTPUT": rundir.script_output, "METRICS": rundir.metrics,
        "STOP_FILES": f"{rundir.stop_file}:{folder.stop_file}", "STOPPED": folder.stopped, "DATA": rundir.data,
        "RAW_DATA": rundir.raw_data if rundir.raw_data.exists() else "", "BASE": settings.model.path,
        "DEEPSPEED_CONFIG": folder.deepspeed_native if plan.choice.is_deepspeed else "",
        "SEQUENCE_LENGTH": plan.workload.sequence_length, "MICRO_BATCH_SIZE": plan.choice.micro_batch_size,
        "GRADIENT_ACCUMULATION_STEPS": plan.choice.gradient_accumulation_steps,
        "LEARNING_RATE": arguments.get("learning_rate", ""), "MAX_STEPS": arguments.get("max_steps", ""),
        "EPOCHS": arguments.get("num_train_epochs", ""), "SEED": arguments["seed"],
    }  # fmt: skip
    return {f"{PREFIX}{name}": str(value) for name, value in values.items()}

"""The record of the settings that a training learned with, as its ranks found them in the built engine."""

from typing import Any

from pydantic import Field

from shardmake.run.record import RunFile


class LearningSettings(RunFile):
    """``learning.json`` of an attempt: optimizer, schedule, clipping, batch and precision at the first step."""

    optimizer: str = Field(description="Class of the optimizer that updates the weights.")
    learning_rate: float = Field(description="Peak learning rate.")
    betas: list[float] | None = Field(description="Adam's betas; None for other optimizers.")
    epsilon: float | None = Field(description="Adam's epsilon; None for other optimizers.")
    weight_decay: float = Field(description="Weight decay of the matrices.")
    decays_vectors: bool = Field(description="Norms and biases have weight decay too.")
    schedule: str = Field(description="Learning rate schedule, by transformers' name.")
    warmup_steps: int = Field(description="Optimizer steps until the peak learning rate.")
    steps: int = Field(description="Optimizer steps in all.")
    rates: list[float] = Field(description="Learning rate of the first, second, third, middle and last step.")
    max_grad_norm: float = Field(description="Gradient norm above which gradients are scaled down.")
    dtype: str = Field(description="Compute data type, by torch's name.")
    autocast: str | None = Field(description="Data type of autocast, by torch's name; None without autocast.")
    micro_batch_size: int = Field(description="Sequences per rank and forward pass.")
    gradient_accumulation_steps: int = Field(description="Forward passes per optimizer step.")
    global_batch_size: int = Field(description="Sequences per optimizer step over all ranks.")
    own_files: dict[str, Any] = Field(
        default_factory=dict, description="Values from the run's own DeepSpeed and Accelerate files, by key."
    )

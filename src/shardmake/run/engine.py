"""The engine that trains, as the plan expects it or as the ranks found it, and the settings that it learns with."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from shardmake.config.strategies import DDP, DEEPSPEED, FSDP, Device
from shardmake.run.record import RunFile, RunRecord, optional

ScriptApi = Literal["accelerate", "trainer", "deepspeed", "torch"]
"""The interface through which a script trains; a program that uses Trainer also uses Accelerate."""
_LABELS: Final[dict[str, str]] = {DDP: "DDP", FSDP: "FSDP", DEEPSPEED: "DeepSpeed"}


class Engine(RunRecord):
    """The engine that trains: planned in ``training.json``, found by a script's ranks in ``trained.json``.

    A text beside the type of a field describes its value in the report.
    """

    api: ScriptApi | None = optional(None, "Interface that a script uses: trainer, accelerate, deepspeed or torch.")
    engine: str = Field(description="The library that shards: ddp, deepspeed or fsdp.")
    zero_stage: int = Field(description="DeepSpeed's ZeRO stage, 0 for other libraries.")
    world_size: int = Field(description="Ranks that train together.")
    dtype: str = Field(description="Compute data type, by torch's name.")
    offload_optimizer: Annotated[Device | None, "optimizer states on {}"] = Field(
        None, description="Where optimizer states lie if not on the GPU."
    )
    offload_param: Annotated[Device | None, "parameters on {}"] = Field(
        None, description="Where parameters lie if not on the GPU."
    )
    gradient_dtype: str | None = optional(
        None, "Data type in which gradients are reduced; DeepSpeed also sums them in it."
    )
    tensor_parallel: int | None = optional(None, "Ranks that share each layer's matrices, under DeepSpeed.")
    fsdp_version: int | None = optional(None, "2.")
    reshard_after_forward: bool | None = optional(None, "FSDP frees a block's weights after its forward pass.")
    replicas: int | None = optional(None, "Copies of the model that FSDP shards.")
    expert_parallel: Annotated[int | None, "experts spread over {} ranks"] = optional(
        None, "Ranks that share the experts of each layer, under FSDP."
    )
    micro_batch_size: int | None = optional(None, "Sequences per rank and forward pass of a script.")
    gradient_accumulation_steps: int | None = optional(None, "Forward passes per optimizer step of a script.")
    global_batch_size: int | None = optional(None, "Sequences of a script per optimizer step over all ranks.")
    learning_rate: float | None = optional(None, "Peak learning rate of a script's Trainer.")
    steps: int | None = optional(None, "Optimizer steps of a script's Trainer.")
    rows_compared: bool | None = optional(None, "The first rows of a script's ranks were compared and differ.")

    def differences(self, found: "Engine") -> dict[str, tuple[Any, Any]]:
        """Return the value here and in ``found`` of each field that is known here and differs."""
        other = found.as_json()
        return {key: (value, other.get(key)) for key, value in self.as_json().items() if other.get(key) != value}

    def describe(self) -> str:
        """Return library, stage and the other values that have a text, for readers."""
        texts = [
            text.format(getattr(self, name))
            for name, field in type(self).model_fields.items()
            for text in field.metadata
            if isinstance(text, str) and getattr(self, name)
        ]
        stage = f" ZeRO-{self.zero_stage}" if self.zero_stage else ""
        return ", ".join([_LABELS.get(self.engine, self.engine) + stage, *texts])


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
    group_rates: list[float] = optional([], "Different peak learning rates of the optimizer's groups.")
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

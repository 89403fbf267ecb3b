"""The record of what a user's script trained with, as its ranks found it; the plan is not copied into it."""

from typing import Literal

from pydantic import Field

from shardmake.config.strategies import Device
from shardmake.run.record import RunFile

ScriptApi = Literal["accelerate", "trainer", "deepspeed", "torch"]
"""The interface through which a script trains; a program that uses Trainer also uses Accelerate."""


class TrainedEngine(RunFile):
    """``trained.json`` of an attempt: the engine of a user's script at its first optimizer step."""

    api: ScriptApi = Field(description="Interface that the script uses: trainer, accelerate, deepspeed or torch.")
    engine: str = Field(description="The library that shards: ddp, deepspeed or fsdp.")
    zero_stage: int = Field(description="DeepSpeed's ZeRO stage, 0 for other libraries.")
    world_size: int = Field(description="Ranks that train together.")
    dtype: str = Field(description="Compute data type, by torch's name.")
    offload_optimizer: Device | None = Field(None, description="Where optimizer states lie if not on the GPU.")
    offload_param: Device | None = Field(None, description="Where parameters lie if not on the GPU.")
    micro_batch_size: int | None = Field(None, description="Sequences per rank and forward pass; None if unknown.")
    gradient_accumulation_steps: int | None = Field(
        None, description="Forward passes per optimizer step; None if unknown."
    )
    global_batch_size: int | None = Field(
        None, description="Sequences per optimizer step over all ranks; None if unknown."
    )
    rows_compared: bool = Field(False, description="The ranks' first rows were compared and differ.")

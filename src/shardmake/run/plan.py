"""The plan of a run, ``plan/plan.json``, and the memory of every candidate, ``plan/memory.json``."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from shardmake.config.attention import Attention
from shardmake.config.methods import METHODS
from shardmake.config.models import GradientDtype, Loss, Method, Objective, Optimizer, Precision, Run, Strategy
from shardmake.config.strategies import STRATEGY_SPECS, StrategySpec
from shardmake.core.atomic import digest
from shardmake.run.model_class import ModelClass
from shardmake.run.paths import RunDir
from shardmake.run.record import RunFile, RunRecord, optional


class Choice(RunRecord):
    """One way to run the training: what the strategy search varies."""

    strategy: Strategy = Field(description="How states are sharded.")
    gradient_checkpointing: bool = Field(description="Recompute activations in the backward pass.")
    micro_batch_size: int = Field(gt=0, description="Sequences per rank and forward pass.")
    gradient_accumulation_steps: int = Field(gt=0, description="Forward passes per optimizer step.")
    nodes: int = Field(gt=0, description="Nodes of the training job.")
    processes_per_node: int = Field(gt=0, description="Ranks per node.")
    precision: Precision = Field(description="Compute data type.")
    gradient_dtype: GradientDtype = Field("auto", description="The run's setting; `gradients` follows from it.")
    tensor_parallel: int = Field(1, gt=0, description="Ranks that share each layer's matrices and see the same data.")
    sequence_parallel: int = optional(1, "Ranks that share each sequence.", gt=0)
    expert_parallel: int = optional(1, "Ranks that share the experts of each layer; each has its own data.", gt=0)

    @property
    def group_size(self) -> int:
        """Ranks of a tensor-parallel or sequence-parallel group, which read the same rows."""
        return self.tensor_parallel * self.sequence_parallel

    @property
    def data_parallel(self) -> int:
        """Number of ranks, or groups of ranks, with different data."""
        return self.world_size // self.group_size

    @property
    def readers(self) -> str:
        """Return a description of the ranks that see different data."""
        groups = f"{self.data_parallel} groups of {self.group_size} ranks"
        return groups if self.group_size > 1 else f"{self.world_size} ranks"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.processes_per_node

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.data_parallel * self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def spec(self) -> StrategySpec:
        """Return the strategy's row of the table."""
        return STRATEGY_SPECS[self.strategy]

    @property
    def is_deepspeed(self) -> bool:
        """Return whether DeepSpeed runs the strategy."""
        return self.spec.is_deepspeed

    @property
    def is_fsdp(self) -> bool:
        """Return whether FSDP runs the strategy."""
        return self.spec.is_fsdp

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage, 0 for other engines."""
        return self.spec.zero_stage

    def loads_on_gpu(self, method: Method) -> bool:
        """Return whether each rank with a GPU loads the whole model there, and not to host RAM first.

        ZeRO-3 and FSDP shard the weights on their way; only 4-bit weights are quantized whole on each GPU first.
        Tensor parallelism splits the matrices after loading.
        """
        return self.tensor_parallel == 1 and (METHODS[method].in_four_bits or not self.spec.gathers_parameters)

    @property
    def gradients(self) -> Precision:
        """Return the data type in which gradients are accumulated and reduced.

        DDP's gradients have the type of the trained weights, which is fp32.
        """
        if self.spec.is_ddp:
            return "fp32"
        if self.precision == "fp32" or not self.spec.accumulates_in_fp32:
            return self.precision
        if self.gradient_dtype == "auto":
            return "fp32" if self.gradient_accumulation_steps > 1 else self.precision
        return self.gradient_dtype

    @property
    def loses_gradients(self) -> bool:
        """Return whether gradients are accumulated in 16 bits although the run asks for fp32 or leaves it open."""
        is_fp32 = self.gradients == "fp32" or self.gradient_dtype == "bf16"
        return not is_fp32 and (self.gradient_dtype == "fp32" or self.gradient_accumulation_steps > 1)


class Workload(RunRecord):
    """The training, which is the same for every candidate."""

    model: str = Field(description="Folder, config.json or hub id of the base model.")
    model_class: ModelClass = Field(description="The class that is trained, merged and evaluated.")
    sequence_length: int = Field(gt=0, description="Tokens per sequence.")
    packing: bool = Field(description="Whether sequences are packed.")
    objective: Objective = Field(description="What training optimizes.")
    method: Method = Field(description="What is trained.")
    optimizer: Optimizer = Field(description="Optimizer.")
    attention: Attention = Field(description="Attention kernel.")
    loss: Loss = Field(description="Cross entropy: plain or fused.")
    activation_offload: bool = optional(False, "The inputs of layers are held in host memory.")
    tf32: bool = optional(False, "Matrix products in fp32 run in TF32.")


class Resources(RunRecord):
    """The request of one stage to Slurm, per node."""

    memory_gib: int = Field(gt=0, description="Host RAM per node, GiB (--mem).")
    cpus: int = Field(gt=0, description="Cores per node.")


class Fallback(RunRecord):
    """A choice further down the fallbacks. It may need more host RAM than the choice above it."""

    choice: Choice = Field(description="The way to run the training.")
    host_memory: int = Field(gt=0, description="Host RAM per node that it needs, bytes.")
    memory_gib: int = Field(gt=0, description="Host RAM per node that it requests from Slurm, GiB (--mem).")


class Plan(RunFile):
    """The choice, its reason, and the fallbacks after an out-of-memory error."""

    made_by: ClassVar[str] = "shardmake plan NAME"
    run: str = Field(description="Name of the run.")
    choice: Choice = Field(description="The first choice of the training.")
    workload: Workload = Field(description="The training itself.")
    reason: str = Field(description="Why this choice, and its risk if it is tight.")
    advice: list[str] = optional(
        [],
        "Changes of the configuration that would or may each cost less GPU-time or memory; the plan makes none.",
    )
    attention_reason: str = optional("", "Why the attention kernel is not varlen, the fastest one.")
    service_nodes: int = optional(0, "Nodes of the job that run the service, beside those of the choice.")
    spare_nodes: int = optional(0, "Nodes of the job that replace others after a failure (restart in place).")
    rejected: dict[str, str] = Field(description="Each rejected candidate with its reason.")
    fallbacks: list[Fallback] = Field(description="Choices after each out-of-memory error, in order.")
    host_memory: int = Field(gt=0, description="Host RAM per node that the choice needs, bytes.")
    resources: dict[str, Resources] = Field(description="By stage: train, consolidate, evaluate, data.")
    own_files: list[str] = optional(
        [], "Settings of the run's own files that limit the choice or that the memory estimate counts."
    )

    not_checked: list[str] = optional(
        [], "What `shardmake plan --offline` did not check. Such a plan is for reading; render refuses it."
    )

    @property
    def digest(self) -> str:
        """Digest of the whole plan, by which an attempt names the plan that it belongs to."""
        return digest(self.as_json())

    @property
    def job_nodes(self) -> int:
        """Nodes of the training job: those of the ranks, then those of the service or the spare ones."""
        return self.choice.nodes + self.service_nodes + self.spare_nodes

    @property
    def precision(self) -> str:
        """Compute data type of the choice, and TF32 where it computes in fp32."""
        has_tf32 = self.workload.tf32 and self.choice.precision == "fp32"
        return f"{self.choice.precision} with TF32" if has_tf32 else self.choice.precision

    def at(self, fallback: int) -> "Plan":
        """Return the plan of an attempt on ``fallback``, counted from 1; 0 is the choice."""
        if fallback == 0:
            return self
        below = self.fallbacks[fallback - 1]
        changed = self.model_copy(update={"choice": below.choice, "host_memory": below.host_memory})
        return changed.asking(below.memory_gib)

    def asking(self, memory_gib: int) -> "Plan":
        """Return this plan with another ``--mem`` for the training job."""
        train = self.resources["train"].model_copy(update={"memory_gib": memory_gib})
        return self.model_copy(update={"resources": {**self.resources, "train": train}})

    def fallbacks_below(self, fallback: int, *, host: bool) -> Iterator[int]:
        """Return the fallbacks that may follow ``fallback`` after the GPU ran out of memory, or with ``host`` the node.

        A fallback that offloads needs less GPU memory and more host RAM.
        """
        needs = self.at(fallback).host_memory
        below = range(fallback + 1, len(self.fallbacks) + 1)
        return (number for number in below if not host or self.fallbacks[number - 1].host_memory < needs)


def planned_class(run: Run, rundir: RunDir) -> ModelClass | None:
    """Return the class that the plan of ``run`` names; None without a plan, or for a script, which chooses its own."""
    plan = Plan.read_if_exists(rundir.plan) if run.script is None else None
    return plan.workload.model_class if plan is not None else None


class GpuEstimate(RunRecord):
    """Bytes on the fullest GPU."""

    allocated: int = Field(description="Held by tensors.")
    reserved: int = Field(description="Held by the allocator on this device.")
    wanted: int = Field(description="Held by the allocator if the device had no limit.")
    device: int = Field(description="Used on the device: the allocator, the CUDA context and NCCL.")
    phase: str = Field(description="Phase of the step with the peak.")
    terms: dict[str, int] = Field(description="The tensors of that phase, by kind.")


class PlaceEstimate(RunRecord):
    """Bytes in host RAM, on NVMe or on disk."""

    total: int = Field(description="Sum of the terms.")
    terms: dict[str, int] = Field(description="Bytes by kind.")


class RenderReceipt(RunFile):
    """``plan/rendered.json``: the mark that the files of the plan and of each fallback are rendered and checked."""

    made_by: ClassVar[str] = "shardmake render NAME"
    plan_digest: str = Field(description="Digest of the plan that the files belong to.")
    files: dict[str, str] = Field({}, description="SHA-256 of each file of the plan's choice, by name.")


class CandidateEstimate(RunRecord):
    """The memory of one candidate, and whether it fits."""

    name: str = Field(description="Strategy and settings, as messages name them.")
    choice: Choice = Field(description="The way to run the training.")
    gpu: GpuEstimate = Field(description="GPU memory, of the fullest rank.")
    host: PlaceEstimate = Field(description="Host RAM per node.")
    nvme: PlaceEstimate = Field(description="NVMe per node.")
    disk: PlaceEstimate = Field(description="Shared disk, over all nodes.")
    fits: bool = Field(description="It fits in every place.")
    reason: str = Field(description="Why it fits or not.")
    step_seconds: float = Field(description="Estimated seconds per optimizer step.")
    method: Literal["simulated", "closed form"] = Field(description="How GPU memory was estimated.")


class MemoryEstimates(RunFile):
    """``plan/memory.json``: every candidate with its bytes, term by term."""

    made_by: ClassVar[str] = "shardmake plan NAME"
    model: str = Field(description="Architecture.")
    parameters: int = Field(description="Parameters in all.")
    trainable: int = Field(description="Parameters that are trained.")
    gpu_memory: int = Field(description="Memory of a GPU, bytes.")
    host_memory: int = Field(description="Host RAM of a node, bytes.")
    traced_tokens: int | None = Field(
        None, description="Tokens of the traced step, if its bytes were scaled to the sequence: its layers loop."
    )
    candidates: list[CandidateEstimate] = Field(description="Every candidate.")

    def of(self, choice: Choice) -> CandidateEstimate:
        """Return the estimate of ``choice``."""
        return next(candidate for candidate in self.candidates if candidate.choice == choice)

"""The output of ``shardmake estimate`` as text: the table, the choice, the terms and the numbers that went in."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from shardmake.commands.estimate import EstimateResult
from shardmake.config.accelerators import find_accelerator
from shardmake.core.units import GIB, format_count, format_number
from shardmake.plan.candidates import Candidate
from shardmake.plan.reasons import describe_scaling
from shardmake.plan.verdict import Headroom

if TYPE_CHECKING:
    from rich.console import Console


GPU_TERMS: Final = {
    "weights": "trained weights: in the compute type under DeepSpeed (without its fp32 master weights), fp32 by "
    "default under DDP and FSDP; divided by the ranks under ZeRO-3 and FSDP (stage_1_and_2.py, "
    "partition_parameters.py)",
    "frozen weights": "weights of the base model under adapters: 2 bytes per element. "
    "QLoRA: 0.5 in NF4 (Dettmers et al. 2023); in a script, without DeepSpeed, 4 for the rest "
    "(prepare_model_for_kbit_training)",
    "quantization scales": "scales of the 4-bit weights, 0.016 bytes per weight with double quantization; whole on "
    "every rank, also under FSDP (Linear4bit.quant_state)",
    "reference model": "a second model beside the trained one for DPO and KTO without adapters: all its weights, "
    "divided by the ranks under ZeRO-3 and FSDP (prepare_deepspeed of TRL's models/utils.py)",
    "gathered reference": "norm and head of the reference model, which FSDP gathers once and keeps, because no "
    "backward pass frees them; all its weights without reshard_after_forward",
    "second shard of the weights": "ZeRO++ hpZ: all weights in the compute type, divided by the ranks of a node "
    "(ds_secondary_tensor of partition_parameters.py)",
    "gradients": "one per trained weight: in gradient_dtype under ZeRO-2 and ZeRO-3, in the compute type under ZeRO-1, "
    "in the weights' type under DDP and FSDP; divided by the ranks from ZeRO-2 on (grad_partitions_flat_buffer of "
    "stage3.py)",
    "accumulated gradients": "the same in closed form: all gradients at the end of the backward pass",
    "master weights": "DeepSpeed's fp32 copy of the trained weights, 4 bytes each, divided by the ranks "
    "(Rajbhandari et al. 2020, section 3.1)",
    "optimizer states": "AdamW: two moments, fp32 in DeepSpeed, else in the weights' type; created in the first step "
    "(torch/optim/adam.py, _init_group)",
    "optimizer temporaries": "temporary tensors of torch's foreach optimizer in a step, as large as the trained "
    "weights; on CPUs a root and a quotient per tensor (torch/optim/adam.py)",
    "communication buffers": "DDP's reducer buckets (a copy of the gradients, reducer.cpp), ZeRO's reduce_bucket_size "
    "elements, twice with overlap_comm (stage_1_and_2.py), FSDP's flat input of the reduce-scatter "
    "(_fsdp_collectives.py)",
    "gathered weights": "full weights of layers in use under ZeRO-3 and FSDP: the layer, prefetched weights, and "
    "weights that are kept because their next use is near (stage3_max_reuse_distance; "
    "partitioned_param_coordinator.py)",
    "persistent weights": "weights of at most stage3_param_persistence_threshold elements, which ZeRO-3 keeps gathered",
    "exchanged tokens": "rows that expert-parallel ranks send, receive and return, one per token and expert "
    "(AllToAllEP of transformers/distributed/expert_parallel.py)",
    "weights during loading": "a full tensor or unit before it is sharded at the start (zero.Init of "
    "partition_parameters.py, fully_shard)",
    "activations": "tensors saved by the forward pass for the backward pass, or one input per layer with "
    "checkpointing; from a simulation of each operator",
    "logits and loss": "logits in fp32, log-softmax, and its gradient: 12 bytes x tokens x vocabulary at the peak "
    "(ForCausalLMLoss of transformers/loss/loss_utils.py)",
    "backward temporaries": "gradients of activations, and one recomputed layer with checkpointing; from a simulation "
    "of each operator",
    "gradients before reduction": "the full gradients of a layer until they are reduced, and ZeRO-3's copy of its "
    "bucket (reduce_scatter_coalesced)",
    "gradients in fp32": "the fp32 copy in which ZeRO reduces 16-bit gradients if gradient_dtype is fp32",
    "flat gradients": "ZeRO flattens its part of the gradients for the step, ZeRO-3 sub_group_size at a time",
    "fp32 gradients": "ZeRO casts its part of the gradients to fp32 for the step, ZeRO-3 sub_group_size at a time",
    "gradient norm": "a copy in fp64 of the largest gradient, or of its part, for the norm (get_norm_dtype)",
    "overflow check": "the copy and the mask in which ZeRO-3 looks for infinities of fp16 gradients (has_overflow)",
    "model buffers": "buffers of the model, such as the rotary embedding's frequencies",
    "cuBLAS workspaces": "one for the forward and one for the backward thread, 8.1 MiB each (CUDABlas.cpp)",
}

HOST_TERMS: Final = {
    "processes": "1.5 GiB per rank for Python's imports, CUDA's host part and NCCL's pinned buffers, 0.6 GiB on CPUs; "
    "a measured upper end",
    "ready ranks": "with slurm.restart_in_place: 0.75 GiB per rank and 0.4 GiB for the launcher, without CUDA",
    "optimizer states": "of the offloaded optimizer, two fp32 moments with AdamW: 8 bytes per trained weight over all "
    "ranks",
    "master weights": "4 bytes per trained weight over all ranks; pinned memory is rounded up to a power of two "
    "(CachingHostAllocator)",
    "gradients": "fp32 gradients of the offloaded optimizer, 4 bytes per trained weight over all ranks; with NVMe "
    "those of one sub-group, and all in gradient_dtype",
    "gradients or weights in transfer": "ZeRO-3's flat gradients (stage3.py), or the updated weights on their way to "
    "the GPU under ZeRO-1 and ZeRO-2 (stage_1_and_2.py)",
    "largest gradient": "a buffer for the largest trained tensor in the compute type (stage_1_and_2.py)",
    "parameters": "offloaded weights in the compute type, over all ranks; with NVMe at most max_in_cpu elements a rank",
    "optimizer swap buffers": "buffer_count buffers of the largest sub-group in fp32 "
    "(partitioned_optimizer_swapper.py)",
    "parameter swap buffers": "buffer_count x buffer_size elements in the compute type (partitioned_param_swapper.py)",
    "reference model": "the offloaded part of the reference model",
    "checkpoint in scratch": "the node's part of a checkpoint, if the scratch folder is in RAM",
    "gathered weights": "the whole model on rank 0, which a user's script may gather to save it",
    "loading": "weights on their way to the GPUs, as far as they exceed what stays: once per node under FSDP and "
    "ZeRO-3, once per rank where no GPU takes them directly",
    "overflow check": "the copy and the mask in which ZeRO-3 looks for infinities of offloaded fp16 gradients",
    "saving": "copies of GPU memory: torch.save copies each storage to the host before it writes it (serialization.py)",
}

NVME_TERMS: Final = {
    "optimizer states": "16 bytes per trained weight over the nodes: master weight, two moments and gradient in fp32",
    "parameters": "all weights in the compute type over the nodes",
}

DISK_TERMS: Final = {
    "checkpoints": "those kept and the one being written, each with trained weights and optimizer states, under ZeRO "
    "also master weights",
    "final model": "all weights in the type of the merged model",
}
TERMS: Final = (GPU_TERMS, HOST_TERMS, NVME_TERMS, DISK_TERMS)

SLOW: Final = 2.0
"""A candidate that takes this many times the seconds of the choice is marked."""


def print_table(result: EstimateResult, explain: bool = False) -> None:
    """Print the candidates; ``explain`` adds the numbers that went in, and every term with its formula or source."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    request = result.request
    accelerator = find_accelerator(request.accelerator)
    devices = "CPU ranks" if accelerator.is_cpu else f"GPUs of {request.gpu_memory or accelerator.memory:g} GiB"
    console.print(
        f"{result.model.architecture}, {format_count(result.model.parameters)} parameters, "
        f"{format_count(result.split.trainable)} trained; {request.nodes} x {request.gpus_per_node} {devices}, "
        f"{request.micro_batch} x {request.sequence_length} tokens"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("strategy", "ckpt", "alloc", "cache", "device", "host", "NVMe", "disk", "step", "fits"):
        table.add_column(name, justify="left" if name in ("strategy", "ckpt", "fits") else "right", no_wrap=True)
    for row in result.rows:
        style = "bold" if row is result.choice else None if row.fits else "dim"
        table.add_row(*_cells(row, result.choice), style=style)
    console.print(table)
    console.print(
        "GiB. ckpt: gradient checkpointing. Per GPU: allocated for tensors, reserved by PyTorch's cache, used on the "
        "device as nvidia-smi shows it. Host and NVMe: per node. Disk: checkpoints and the model. step: seconds per "
        f"step. fits: tight if the margin is less than the estimate's error, slow from {SLOW:g} times the step of the "
        "choice (*) on."
    )
    if result.traced_tokens:
        console.print(describe_scaling(result.traced_tokens, request.sequence_length or 0))
    if result.reason:
        console.print(f"* {result.reason}", highlight=False)
    for note in result.notes:
        console.print(f"{note[:1].upper()}{note[1:]}", highlight=False)
    if result.measured:
        console.print(f"On the device: {result.measured.origin}.")
    if result.advice:
        console.print(f"Nothing fits. What would: {result.advice}.")
    if explain:
        console.print("\nThe numbers that went in:")
        for name, value in result.inputs.items():
            console.print(f"  {name}: {value}", highlight=False)
        _print_terms(console, result.rows)


def mark(row: Candidate, choice: Candidate | None) -> str:
    """Return the table's word for how ``row`` fits beside the choice."""
    if not row.fits:
        return "no"
    word = "yes" if row.headroom == Headroom.ENOUGH else "tight"
    if choice is not None and row.step_seconds >= SLOW * choice.step_seconds:
        word = "slow"
    return f"{word}*" if row is choice else word


def _cells(row: Candidate, choice: Candidate | None) -> list[str]:
    memory = row.memory
    gpu, stored = memory.gpu, (memory.nvme.total, memory.disk.total)
    sizes = (gpu.allocated, gpu.reserved, gpu.device, memory.host.total, *stored)
    # At most five characters up to a hundred TiB, so that the table fits a terminal of 80 columns.
    texts = [f"{size / GIB:.1f}" if size < 100 * GIB else f"{size / GIB:.0f}" for size in sizes]
    checkpointing = "yes" if row.choice.gradient_checkpointing else "no"
    return [row.choice.strategy, checkpointing, *texts, format_number(row.step_seconds), mark(row, choice)]


def _print_terms(console: "Console", rows: Iterable[Candidate]) -> None:
    for row in rows:
        checkpointing = "with" if row.choice.gradient_checkpointing else "without"
        console.print(
            f"\n{row.choice.strategy} {checkpointing} checkpointing: the peak is in the phase {row.memory.gpu.phase!r}"
        )
        gpu, memory = dict(sorted(row.memory.gpu.terms.items(), key=lambda item: -item[1])), row.memory
        places = {"": gpu, "host: ": memory.host.terms, "NVMe: ": memory.nvme.terms, "disk: ": memory.disk.terms}
        for (place, terms), meaning in zip(places.items(), TERMS, strict=True):
            for term, size in terms.items():
                console.print(f"  {size / GIB:9.3f} GiB  {place}{term}: {meaning[term]}")

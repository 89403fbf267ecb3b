"""Measured against estimated memory on a real GPU: a matrix of shapes, methods, kernels, lengths and engines.

python -m benchmarks.memory_gpu [--cells N] [--output FILE]

Every cell is a process of its own: a model with random weights, three steps, then the peaks that PyTorch counted
(allocated, reserved) and what the driver reports (device). World size 1: what several ranks add is arithmetic.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from shardmake.config.models import Strategy
from shardmake.core.units import GIB

STEPS = 3
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    shape: str
    method: str
    checkpointing: bool
    attention: str
    length: int
    engine: Strategy
    loss: str


def cells() -> Iterator[Cell]:
    """The matrix; what needs more than the GPU has is left out when its turn comes."""
    axes = itertools.product(
        SHAPES,
        ("full", "lora"),
        (True, False),
        ("flash", "sdpa"),
        (2048, 4096, 8192, 16384),
        ("ddp", "zero2", "zero3", "fsdp"),
        ("plain", "fused"),
    )
    yield from itertools.starmap(Cell, axes)


def config_of(cell: Cell) -> dict[str, Any]:
    return {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 16384, **SHAPES[cell.shape]}


# ---------------------------------------------------------------------------------------------------------------------
# The measurement: one process


def measure(cell: Cell) -> dict[str, int]:
    import torch

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    step = deepspeed_step(cell) if cell.engine.startswith("zero") else torch_step(cell)
    tokens = torch.randint(0, 128256, (1, cell.length), device="cuda")
    for _ in range(STEPS):
        step(tokens)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "device": total - free,
    }


def model_of(cell: Cell, dtype: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_of(cell)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    if cell.loss == "fused":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    kernel = "flash_attention_2" if cell.attention == "flash" else "sdpa"
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel)
    if cell.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if cell.method == "lora":
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    return model.train()


def torch_step(cell: Cell) -> Any:
    """DDP's and FSDP2's step as Accelerate sets them up: fp32 weights; autocast or a mixed-precision policy."""
    import torch

    model = model_of(cell, torch.float32 if cell.method == "full" else torch.bfloat16)
    if cell.engine == "fsdp":
        shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step(tokens: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=cell.engine == "ddp"):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def shard(model: Any) -> None:
    import torch
    from torch import distributed
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    distributed.init_process_group("nccl")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        fully_shard(layer, mp_policy=policy)
    tail = [base.model.norm, base.lm_head]
    if base.lm_head.weight is base.model.embed_tokens.weight:
        tail.insert(1, base.model.embed_tokens)
    else:
        fully_shard(base.model.embed_tokens, mp_policy=policy)
    fully_shard(tail, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)


def deepspeed_step(cell: Cell) -> Any:
    import deepspeed
    import torch

    model = model_of(cell, torch.bfloat16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero_section(cell),
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(tokens: Any) -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()

    return step


def zero_section(cell: Cell) -> dict[str, Any]:
    from shardmake.config.models import Cluster
    from shardmake.memory.buckets import zero_optimization
    from shardmake.memory.read_config import from_config
    from shardmake.run.plan import Choice

    choice = Choice(
        strategy=cell.engine,
        gradient_checkpointing=cell.checkpointing,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        nodes=1,
        processes_per_node=1,
        precision="bf16",
    )
    cluster = Cluster(
        executor="local", accelerator="h200", processes_per_node=1, cpus_per_node=8, memory_gib_per_node=100.0
    )
    return zero_optimization(choice, from_config(config_of(cell)), cluster, "")


# ---------------------------------------------------------------------------------------------------------------------
# The estimate and the comparison


def estimate(cell: Cell, capacity: int) -> dict[str, int]:
    from shardmake.memory.buckets import Buckets, read_buckets
    from shardmake.memory.estimate import gpu_memory
    from shardmake.memory.model import split
    from shardmake.memory.read_config import from_config
    from shardmake.memory.scenario import Scenario

    model = from_config(config_of(cell))
    scenario = Scenario(
        model=model,
        split=split(model, cell.method, 16),
        strategy=cell.engine,
        nodes=1,
        ranks_per_node=1,
        micro_batch=1,
        sequence_length=cell.length,
        checkpointing=cell.checkpointing,
        attention=cell.attention,  # type: ignore[arg-type]
        method=cell.method,  # type: ignore[arg-type]
        loss=cell.loss,  # type: ignore[arg-type]
    )
    zero = cell.engine.startswith("zero")
    buckets = read_buckets(zero_section(cell), model.hidden_size) if zero else Buckets()
    figures = gpu_memory(scenario, buckets, capacity=capacity)
    return {"allocated": figures.allocated, "reserved": figures.reserved, "device": figures.device}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=None, help="Measure this many cells, spread over the matrix.")
    parser.add_argument("--gpu-memory", type=float, default=139.8, help="GiB of the GPU; an H200's without it.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "memory_gpu.json")
    parser.add_argument("--cell", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measure(Cell(**json.loads(options.cell)))))
        return 0
    every = list(cells())
    chosen = every[:: max(1, len(every) // options.cells)] if options.cells else every
    results = [result for cell in chosen if (result := compare(cell, int(options.gpu_memory * GIB)))]
    if not results:
        raise SystemExit("No cell could be measured: see above why.")
    errors = [abs(result["errors"][figure]) for result in results for figure in ("allocated", "reserved")]
    print(f"{len(results)} cells: median error {median(errors):.1f} %, worst {max(errors):.1f} %")
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps({"versions": versions(), "cells": results}, indent=1) + "\n")
    return 0


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed", "peft")}


def compare(cell: Cell, capacity: int) -> dict[str, Any] | None:
    """One cell measured in its own process; None where it does not fit this GPU or lacks a package."""
    said = estimate(cell, capacity)
    if said["device"] > capacity:
        print(cell, f"not measured: {said['device'] / GIB:.1f} GiB would be needed")
        return None
    command = [sys.executable, __file__, "--cell", json.dumps(asdict(cell))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(cell, "not measured:", (done.stderr.strip().splitlines() or ["no message"])[-1][:160])
        return None
    measured = json.loads(done.stdout.splitlines()[-1])
    errors = {name: 100 * (said[name] / measured[name] - 1) for name in measured}
    figures = "  ".join(f"{n} {measured[n] / GIB:.2f} {said[n] / GIB:.2f} {errors[n]:+.1f} %" for n in measured)
    print(f"{cell}  {figures}", flush=True)
    return {**asdict(cell), "measured": measured, "estimate": said, "errors": errors}


if __name__ == "__main__":
    sys.exit(main())

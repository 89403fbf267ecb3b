"""A two-step probe on this machine's GPU: ``shardmake estimate MODEL --probe``.

Two layers of the model with random weights run under FSDP2, a short and a long step, on one GPU or, where there are
more, on two. The calibration is the difference between the allocator's model and what PyTorch and the driver report. As
a process (``python -m shardmake.memory.probe``) this module is one rank.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from typing import Any

from shardmake.config.methods import DEFAULT_METHOD
from shardmake.config.optimizers import STATELESS
from shardmake.config.strategies import PROBED
from shardmake.core.errors import ConfigError
from shardmake.core.process import query_gpus
from shardmake.core.units import MIB
from shardmake.memory.buckets import Buckets
from shardmake.memory.calibration import Calibration, fit
from shardmake.memory.estimate import gpu_memory
from shardmake.memory.model import Model, split
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import Scenario

LAYERS = 2
TOKENS = (512, 2048)
STEPS = 2
SECONDS = 600


def probe(model: Model) -> Calibration:
    """Run the probe with the shape of ``model``; raise `ConfigError` if there is no GPU, or if a step failed."""
    if not model.has_all_levers:
        raise ConfigError(
            f"--probe runs only models of the Llama, Mistral, Qwen and Gemma families, not {model.model_type}. The "
            "result does not depend on the model: probe with one of those, and it applies to this one too."
        )
    occupied = _occupied()
    ranks = min(2, len(occupied))
    short = {**model.config, "num_hidden_layers": LAYERS, "architectures": None}
    found = _run(short, ranks)
    shape = from_config(short)
    predicted = (gpu_memory(scenario(shape, ranks, tokens), Buckets()).reserved for tokens in TOKENS)
    steps = [(*step, reserved) for step, reserved in zip(found["steps"], predicted, strict=True)]
    return fit(steps, found["nccl"], occupied[0], found["gpu"], socket.gethostname(), str(date.today()))


def scenario(shape: Model, ranks: int, tokens: int) -> Scenario:
    """Return the scenario of the probe's step: FSDP2, fp32 weights, no optimizer states."""
    return Scenario(
        model=shape,
        split=split(shape, DEFAULT_METHOD),
        strategy=PROBED,
        nodes=1,
        ranks_per_node=ranks,
        micro_batch=1,
        sequence_length=tokens,
        attention="sdpa",
        optimizer=STATELESS,
    )


def _occupied() -> list[int]:
    """Return the bytes in use on each GPU that this process may use."""
    if shutil.which("nvidia-smi") is None:
        raise ConfigError(
            "--probe needs a GPU, but this machine has no nvidia-smi. Run it on a compute node "
            "(srun --gpus=1 shardmake estimate ... --probe). Later estimates in your account use its result."
        )
    answer = query_gpus("memory.used")
    used = [int(line) * MIB for line in (answer or "").split("\n") if line.strip().isdigit()]
    if not used:
        what = "does not answer" if answer is None else "fails or finds none"
        raise ConfigError(f"--probe needs a GPU, but nvidia-smi {what} on this machine. Run it on another node.")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [int(index) for index in visible.split(",") if index.isdigit()] if visible else range(len(used))
    return [used[index] for index in chosen if index < len(used)] or used


def _run(config: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Run the ranks and return the measurements of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-W", "ignore", "-m", "shardmake.memory.probe", json.dumps(dict(config))]
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        answers = [process.communicate(timeout=SECONDS) for process in processes]
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"The probe did not finish within {SECONDS} s. Check that the GPU is idle and run it again."
        ) from None
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, answers, strict=True):
        if process.returncode:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise ConfigError(f"The probe's step failed on the GPU: {last[:300]}")
    return json.loads(answers[0][0].splitlines()[-1])


# ---------------------------------------------------------------------------------------------------------------------
# One rank


def main() -> int:
    """Measure, and print the measurements of this rank."""
    import torch
    from torch import distributed

    config = json.loads(sys.argv[1])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.zeros(1, device="cuda")
    before = _outside_allocator()
    distributed.init_process_group("nccl")
    distributed.all_reduce(torch.ones(MIB, device="cuda"))
    nccl = _outside_allocator() - before
    model = sharded(config, "cuda")
    steps = [_observe(model, config["vocab_size"], tokens) for tokens in TOKENS]
    nccl_of_several = nccl if distributed.get_world_size() > 1 else None
    print(json.dumps({"steps": steps, "nccl": nccl_of_several, "gpu": torch.cuda.get_device_name()}))
    distributed.destroy_process_group()
    return 0


def _outside_allocator() -> int:
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _observe(model: Any, vocabulary: int, tokens: int) -> tuple[int, int]:
    """Return the peaks of a step in bytes: reserved, and of the device."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(model, vocabulary, tokens, "cuda")
    reserved = torch.cuda.max_memory_reserved()
    return reserved, _outside_allocator() + reserved


def sharded(config: Mapping[str, Any], device: str) -> Any:
    """Return the model with random fp32 weights under FSDP2, in the units that Accelerate creates."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    parsed = AutoConfig.for_model(**config)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32, attn_implementation="sdpa")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    if not tied:
        fully_shard(model.model.embed_tokens, **settings)
    tail = [model.model.norm, *([model.model.embed_tokens] if tied else []), model.lm_head]
    fully_shard(tail, **settings, reshard_after_forward=False)
    return fully_shard(model, **settings).train()


def train(model: Any, vocabulary: int, tokens: int, device: str) -> None:
    """Run `STEPS` steps of ``tokens`` tokens; each drops its gradients."""
    import torch

    inputs = torch.randint(0, vocabulary, (1, tokens), device=device)
    for _ in range(STEPS):
        model(input_ids=inputs, labels=inputs, use_cache=False).loss.backward()
        model.zero_grad()


if __name__ == "__main__":
    sys.exit(main())

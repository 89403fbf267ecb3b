"""Compare the estimate's allocated memory with torch's own trackers, on the same scenarios, without a GPU.

    python -m benchmarks.memory_tracker > benchmarks/results/memory_tracker.txt

`MemTracker` (one GPU) and `FSDPMemTracker` (FSDP2) follow the second step of transformers' model with AdamW on fake
tensors, sharded as Accelerate does. Both sides leave out the allocator's cache, the CUDA context and NCCL. The trackers
run on fake CPU tensors, so that FSDP has no streams of its own there.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.published_models import CONFIGS
from shardmake.core.units import GIB
from shardmake.memory.buckets import Buckets
from shardmake.memory.estimate import simulate, step_of
from shardmake.memory.gpu_kernels import emulate_gpu_kernels
from shardmake.memory.model import split
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import Scenario
from shardmake.memory.states import CUBLAS
from shardmake.memory.tracer import materialize, prepare

RANKS = 8
LAYERS = 4  # of each model; the trackers take seconds a layer


@dataclass(frozen=True)
class Case:
    """One training: bf16 on one GPU, or FSDP2 on `RANKS` with fp32 weights that are gathered in bf16."""

    model: str
    ranks: int
    length: int
    checkpointing: bool

    @property
    def config(self) -> dict[str, Any]:
        """Return the model's config with fewer layers."""
        return {**CONFIGS[self.model], "num_hidden_layers": LAYERS}

    @property
    def name(self) -> str:
        """Return the case as text."""
        where = f"FSDP2 on {self.ranks} GPUs" if self.ranks > 1 else "one GPU"
        recomputed = "recomputation" if self.checkpointing else "no recomputation"
        return f"{self.model}, {where}, {self.length} tokens, {recomputed}"


CASES = tuple(
    Case(model, ranks, length, checkpointing)
    for model in ("Llama-2-7B", "Llama-3-8B", "Qwen2.5-7B")
    for ranks in (1, RANKS)
    for length in (1024, 8192)
    for checkpointing in (True, False)
)


def scenario(case: Case) -> Scenario:
    """Return ``case`` for the estimate."""
    model = from_config(case.config)
    return Scenario(
        model=model, split=split(model, "full"), strategy="fsdp" if case.ranks > 1 else "ddp", nodes=1,
        ranks_per_node=case.ranks, micro_batch=1, sequence_length=case.length, checkpointing=case.checkpointing,
        weights="fp32" if case.ranks > 1 else "bf16",
    )  # fmt: skip


def estimated(case: Case) -> int:
    """Return the most bytes of tensors at once in the simulated steps; the tracker counts no cuBLAS workspaces."""
    timeline = simulate(scenario(case), Buckets(), step_of(scenario(case)))
    return max(peak.total for phase, peak in timeline.peaks.items() if phase != "load") - CUBLAS


def tracked(case: Case) -> int:
    """Return the most bytes at once in the second step that torch's tracker follows."""
    mesh = init_device_mesh("cpu", (RANKS,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(case)
        if case.ranks > 1:
            _shard(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.zeros((1, case.length), dtype=torch.long)
        _step(model, optimizer, tokens)  # creates the optimizer's states and fills the caches of DTensor
        tracker: Any = FSDPMemTracker(model, optimizer) if case.ranks > 1 else MemTracker()
        if case.ranks == 1:
            tracker.track_external(model, optimizer)
        with tracker:
            _step(model, optimizer, tokens)
        return int(sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values()))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _model(case: Case) -> nn.Module:
    emulate_gpu_kernels()
    request = {
        "config": case.config, "source": case.model, "trust_remote_code": False, "layers": None, "attention": "flash",
        "masked": False, "sequence_parallel": 1, "activation_offload": False, "in_four_bits": False, "method": "full",
        "checkpointing": case.checkpointing,
    }  # fmt: skip
    model = prepare(request)
    dtypes = ("weights", "frozen", "widened", "norms")
    materialize(model, dict.fromkeys(dtypes, "fp32" if case.ranks > 1 else "bf16"))
    return model


def _shard(model: Any, mesh: DeviceMesh) -> None:
    """Shard as Accelerate does: a unit for each layer and the embedding; norm and head stay gathered."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (model.model.embed_tokens, *model.model.layers):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    tail: Any = [model.model.norm, model.lm_head]
    fully_shard(tail, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def report(cases: tuple[Case, ...], measure: Callable[[Case], int]) -> list[str]:
    """Return the lines of the table: the tracker, the estimate and their difference."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    lines = [
        f"Allocated GiB per GPU at the peak of a step, {LAYERS} layers of each model; {versions}",
        f"{'':62} {'torch':>7} {'ours':>7}",
    ]
    for case in cases:
        theirs, ours = measure(case), estimated(case)
        error = 100 * (ours / theirs - 1)
        lines.append(f"{case.name:62} {theirs / GIB:7.2f} {ours / GIB:7.2f} {error:+6.1f} %")
    return lines


def main() -> int:
    """Print the table."""
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    print("\n".join(report(CASES, tracked)))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Muon's update of a sharded matrix is torch.optim.Muon's, bit for bit; one Adam reads states of the other."""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.memory import states
from shardmake.memory.buckets import Buckets
from shardmake.memory.model import ParameterSpec, split
from shardmake.train.library_patches import import_deepspeed
from shardmake.train.muon import MuonWithAdamW, find_pieces
from shardmake.train.optimizer_states import fit_optimizer
from tests.unit.memory.llama_8b import MODEL, scenario
from tests.unit.train.conftest import in_ranks

SHAPES = ((96, 48), (48, 96), (33, 70), (1, 50), (7, 3))
RATE, DECAY, STEPS = 1e-2, 0.1, 3


def gradients(number: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=source) * 10.0**number for shape in SHAPES]


def optimizers(whole: list[torch.nn.Parameter], parts: list[torch.nn.Parameter]) -> tuple[Any, Any]:
    theirs = torch.optim.Muon(whole, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    return theirs, MuonWithAdamW([{"params": parts, "orthogonal": True}], lr=RATE, weight_decay=DECAY)


def rank(number: int, folder: Path) -> None:
    """Compare the update on a mesh of two copies on two ranks each."""
    mesh, placements = init_device_mesh("cpu", (2, 2)), (Replicate(), Shard(0))
    whole = [torch.nn.Parameter(tensor) for tensor in gradients(0)]
    parts = [torch.nn.Parameter(distribute_tensor(one.detach().clone(), mesh, placements)) for one in whole]
    theirs, ours = optimizers(whole, parts)
    for step in range(1, STEPS + 1):
        for one, part, gradient in zip(whole, parts, gradients(step), strict=True):
            one.grad, part.grad = gradient, distribute_tensor(gradient, mesh, placements)
        theirs.step()
        ours.step()
        ours.load_state_dict(ours.state_dict())
    for one, part in zip(whole, parts, strict=True):
        assert isinstance(part, DTensor)
        torch.testing.assert_close(part.full_tensor(), one.detach(), rtol=0, atol=0)


class Weighted(torch.nn.Module):
    """A model whose loss has the given gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = torch.nn.ParameterList(gradients(0))

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(one * other).sum() for one, other in zip(self.matrices, given, strict=True)]).sum()


def zero_rank(number: int, folder: Path) -> None:
    """Compare the updates of matrices that DeepSpeed cuts, under ZeRO-1, 2 and 3."""
    import_deepspeed()
    leave_collectives_to_gloo()
    for stage in (1, 2, 3):
        compare_under_zero(stage)


def compare_under_zero(stage: int) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    whole, model = [torch.nn.Parameter(tensor) for tensor in gradients(0)], Weighted()
    theirs, ours = optimizers(whole, [*model.matrices])
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100, "zero_hpz_partition_size": 1 + stage // 3}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "gradient_clipping": 0}
    config |= {"zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, optimizer=ours, config=config)
    find_pieces(engine)
    for step in range(1, STEPS + 1):
        for one, gradient in zip(whole, gradients(step), strict=True):
            one.grad = gradient
        theirs.step()
        engine.backward(engine(gradients(step)))
        engine.step()
    for one, part in zip(whole, model.matrices, strict=True):
        torch.testing.assert_close(safe_get_full_fp32_param(part), one.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("function, method", [(rank, "fork"), (zero_rank, "spawn")])
def test_sharded_and_replicated_matrices(tmp_path: Path, function: Callable[..., None], method: str) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0"}
    in_ranks(function, tmp_path, 4, method)


def test_a_scaler_skips_a_step_with_infinite_gradients() -> None:
    """torch's fused AdamW would take them with a flag, which Muon does not read."""
    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = MuonWithAdamW([{"params": weights[:1]}, {"params": weights[1:], "orthogonal": True}], fused=True)
    scaler = torch.amp.GradScaler("cpu")
    for weight in weights:
        weight.grad = scaler.scale(torch.full((4, 4), torch.inf))
    scaler.step(optimizer)
    assert all(bool((weight == 1).all()) for weight in weights)


@pytest.mark.parametrize("shape", [(512, 512), (128, 512), (512, 128)])
def test_the_temporaries_of_a_matrix_are_the_estimated_ones(shape: tuple[int, int]) -> None:
    matrix = ParameterSpec("model.layers.0.mlp.up_proj.weight", shape, "linear", 0)
    small = replace(MODEL, tensors=(matrix,), decoder=None)
    case = scenario(strategy="ddp", optimizer="muon")
    case = replace(case, model=small, split=split(small, "full", 16, "all-linear"))
    weight = torch.nn.Parameter(torch.ones(shape))
    optimizer = MuonWithAdamW([{"params": [weight], "orthogonal": True}])
    for _ in range(2):  # the first step makes the states
        weight.grad = torch.randn(shape)
        with torch.profiler.profile(profile_memory=True) as profiler:
            optimizer.step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    peak = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    estimate = states.step_temporaries(case, Buckets())
    assert estimate <= peak <= 1.25 * estimate  # the kernels of CPUs have copies of their own


SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}


def cpu_adam(parameters: list[torch.Tensor]) -> Any:
    """Return DeepSpeed's Adam without compiling its kernel."""
    optimizer = DeepSpeedCPUAdam.__new__(DeepSpeedCPUAdam)
    torch.optim.Optimizer.__init__(optimizer, parameters, SETTINGS | {"bias_correction": True})
    return optimizer


def torch_adam(parameters: list[torch.Tensor], **kernel: bool) -> Any:
    return torch.optim.AdamW(parameters, **SETTINGS, **kernel)


def with_states(make: Any, step: Any) -> Any:
    """Return an optimizer whose two parameters share one counter, as after DeepSpeed's load."""
    parameters = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    optimizer = make(parameters)
    for parameter in parameters:
        optimizer.state[parameter] = {"step": step, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    return optimizer


@pytest.mark.parametrize(("writes", "reads"), [(torch_adam, cpu_adam), (cpu_adam, torch_adam)])
def test_each_adam_continues_with_states_of_the_other(writes: Any, reads: Any) -> None:
    saved = with_states(writes, torch.tensor(7.0) if writes is torch_adam else 7).state_dict()
    optimizer = with_states(reads, 0)
    optimizer.load_state_dict(saved)
    fit_optimizer(optimizer)
    assert set(reads([torch.zeros(1)]).param_groups[0]) <= set(optimizer.param_groups[0])
    steps = [state["step"] for state in optimizer.state.values()]
    assert steps == [7, 7] and all(isinstance(step, int if reads is cpu_adam else torch.Tensor) for step in steps)
    if reads is torch_adam:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones(3)
        optimizer.step()
        assert [state["step"].item() for state in optimizer.state.values()] == [8, 8]


def test_each_parameter_gets_its_own_counter_and_other_optimizers_are_unchanged() -> None:
    optimizer = with_states(torch_adam, torch.tensor(7.0))
    fit_optimizer(optimizer)
    first, second = (state["step"] for state in optimizer.state.values())
    first += 1
    assert second == 7
    parameter = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    optimizer.state[parameter] = {"step": 3, "row": torch.ones(3)}
    fit_optimizer(optimizer)
    assert optimizer.state[parameter]["step"] == 3
    saved = with_states(torch_adam, torch.tensor(7.0)).state_dict()  # of an Adam on the host, without a fused kernel
    optimizer = torch_adam([torch.zeros(3, requires_grad=True) for _ in range(2)], fused=True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["fused"] is None
    fit_optimizer(optimizer)
    assert optimizer.param_groups[0]["fused"] is True, "the kernel is that of the run"


@pytest.mark.parametrize(("kernel", "device"), [({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({}, "cpu")])
@pytest.mark.parametrize("step", [torch.tensor(7.0), 7], ids=["tensor", "number"])
def test_counter_is_where_the_kernel_reads_it(kernel: dict[str, bool], device: str, step: Any) -> None:
    """The device "meta" stands for a GPU; a converted checkpoint's counter is on the host."""
    parameter = torch.zeros(3, requires_grad=True, device="meta")
    optimizer = torch.optim.AdamW([parameter], **SETTINGS, **kernel)
    optimizer.state[parameter] = {"step": step}
    fit_optimizer(optimizer)
    counter = optimizer.state[parameter]["step"]
    assert (counter.device.type, counter.dtype, counter.shape) == (device, torch.float32, ())

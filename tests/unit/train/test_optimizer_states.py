"""States of one Adam implementation are read by the other."""

from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from shardmake.train.optimizer_states import fit_optimizer

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

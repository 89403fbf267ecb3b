import torch
from torch import nn

from shardmake.memory.estimate import rank_memory
from shardmake.memory.fsdp import Fsdp2Memory
from shardmake.memory.states import HEAD, units
from shardmake.memory.timeline import Timeline
from tests.unit.memory.llama_8b import BUCKETS, P, scenario


def test_fsdp2_frees_the_flat_weights_of_the_head_after_the_loss() -> None:
    """``FSDPState._post_forward`` of the root frees the last all-gather; the loss is computed before that."""
    case = scenario(strategy="fsdp")
    memory = Fsdp2Memory(case, BUCKETS, Timeline())
    memory.load()
    memory.before_forward(0)
    memory.after_forward(0)
    memory.before_head()
    head = 2 * units(case)[HEAD]
    assert memory.timeline._terms["gathered weights"] == 2 * head
    memory.start_backward()
    assert memory.timeline._terms["gathered weights"] == head


def test_the_optimizer_has_two_moments_of_each_tensor_in_torchs_order() -> None:
    case = scenario(strategy="ddp")
    timeline = Timeline()
    memory = rank_memory(case, BUCKETS, timeline)
    memory.load()
    before = len(timeline.events)
    memory._make_states()
    parameters = [nn.Parameter(torch.empty(tensor.shape, device="meta")) for tensor in case.model.tensors[:5]]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=False, fused=False)
    optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(6)))
    moments = [optimizer.state[p][name] for p in parameters for name in optimizer.state[p] if name != "step"]
    ours = [size for _, size, _ in timeline.events[before:]]
    assert ours[: len(moments)] == [4 * moment.numel() for moment in moments] and sum(ours) == 8 * P

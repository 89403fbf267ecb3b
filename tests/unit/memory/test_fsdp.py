import weakref
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.utils.checkpoint import checkpoint

from shardmake.memory import states
from shardmake.memory.decoder import layer_input
from shardmake.memory.estimate import events_of, rank_memory, simulate
from shardmake.memory.fsdp import Fsdp2Memory
from shardmake.memory.fsdp1 import Fsdp1Memory
from shardmake.memory.scenario import LibraryBehavior, Scenario
from shardmake.memory.states import HEAD, units
from shardmake.memory.timeline import Timeline
from tests.unit.memory.llama_8b import BUCKETS, P, scenario

LAYERS = 3
OLD = LibraryBehavior(recomputes_whole=True, checkpoints_units=True)


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


@pytest.mark.parametrize(("weights", "item"), [("fp32", 4), ("bf16", 2)])
def test_fsdp1_holds_trained_weights_in_their_own_type(weights: str, item: int) -> None:
    """Accelerate widens the flat weights to fp32 under mixed precision; a pass gathers them in 16 bits."""
    memory = Fsdp1Memory(scenario(strategy="fsdp", fsdp_version=1, weights=weights), BUCKETS, Timeline())
    memory.load()
    assert memory.timeline._terms["weights"] == pytest.approx(item * P / 8, rel=1e-3)


def _peak(case: Scenario) -> int:
    return simulate(case, BUCKETS, events_of(case)).peaks["backward"].terms.get("held inputs", 0)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"behavior": LibraryBehavior(recomputes_whole=True)}, False),
        ({"fsdp_version": 2}, False),
        ({"method": "full"}, False),
        ({"checkpointing": False}, False),
    ],
)
def test_fsdp1_keeps_the_inputs_of_frozen_layers_with_their_gradients(changes: dict[str, object], holds: bool) -> None:
    base = {"strategy": "fsdp", "fsdp_version": 1, "method": "lora", "behavior": OLD, "sequence_length": 65536}
    case = scenario(**{**base, **changes})
    layers = len(case.model.blocks)
    assert _peak(case) == (2 * layers - 3) * layer_input(case) * holds


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
    assert ours[: len(moments)] == [4 * moment.numel() for moment in moments]
    assert sum(ours) == 8 * P


def test_fsdp1_steps_the_tensors_in_a_ranks_part_of_each_flat_weight() -> None:
    """Accelerate and Trainer set ``use_orig_params``, so that the parameters are views of the flat part."""
    case = scenario(strategy="fsdp", fsdp_version=1)
    memory = Fsdp1Memory(case, BUCKETS, Timeline())
    memory.load()
    whole = {tensor.numel for tensor in case.model.tensors}
    assert sum(memory.trained) == sum(-(-numel // case.shards) for numel in memory._units.values())
    assert sum(part not in whole for part in memory.trained) <= len(memory._units)


class _Layer(nn.Module):
    """A frozen layer; ``alive`` gets the number of inputs of recomputed layers that are there at each recomputation."""

    def __init__(self, inputs: list[weakref.ref[torch.Tensor]], alive: list[int]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).requires_grad_(False)
        self._inputs, self._alive = inputs, alive

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # the recomputation
            self._inputs.append(weakref.ref(tensor))
            self._alive.append(sum(held() is not None for held in self._inputs))
        return self.inner(tensor)


class _Checkpointed(nn.Module):
    def __init__(self, layers: Sequence[nn.Module], reentrant: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._reentrant = reentrant

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tensor = checkpoint(layer, tensor, use_reentrant=self._reentrant)
        return tensor


def _unit(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


@pytest.mark.parametrize(("behavior", "at_once"), [(OLD, 1), (LibraryBehavior(recomputes_whole=True), 2)])
def test_fsdp1_gathers_no_layer_ahead_if_checkpointing_is_around_the_units(
    behavior: LibraryBehavior, at_once: int
) -> None:
    memory = Fsdp1Memory(
        scenario(strategy="fsdp", fsdp_version=1, checkpointing=True, behavior=behavior), BUCKETS, Timeline()
    )
    memory.load()
    memory.start_backward()
    memory.before_backward(memory._last)
    layer = memory.scenario.compute * memory._units[memory._last]
    assert memory.timeline._terms["gathered weights"] == at_once * layer


@pytest.mark.parametrize(("reentrant", "ahead"), [(True, 0), (False, LAYERS)])
def test_torch_prefetches_no_unit_if_reentrant_checkpointing_is_around_it(
    reentrant: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    to_prefetch = _runtime_utils._get_handle_to_prefetch
    monkeypatch.setattr(
        _runtime_utils, "_get_handle_to_prefetch", lambda *args: found.append(to_prefetch(*args)) or found[-1]
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layers = [_unit(nn.Linear(4, 4)) for _ in range(LAYERS)]
        model = _unit(nn.Sequential(_Checkpointed(layers, reentrant), nn.Linear(4, 4)))
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert sum(handle is not None for handle in found) == ahead


@pytest.mark.parametrize(("around", "left"), [(True, LAYERS), (False, 1)])
def test_torch_keeps_these_inputs_if_checkpointing_is_around_the_units(around: bool, left: int) -> None:
    inputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layers = [_Layer(inputs, alive) for _ in range(LAYERS)]
        around_units = _Checkpointed([_unit(layer) for layer in layers]) if around else None
        model = _unit(around_units or nn.Sequential(*(_unit(_Checkpointed([layer])) for layer in layers)))
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert alive[-1] == left


@pytest.mark.parametrize(("behavior", "item"), [(LibraryBehavior(), 2), (LibraryBehavior(wide_base=True), 4)])
def test_states_and_fsdp1_agree_on_the_weights_of_a_rank(behavior: LibraryBehavior, item: int) -> None:
    case = scenario(strategy="fsdp", fsdp_version=1, method="lora", behavior=behavior)
    assert states.resident(case, BUCKETS)["frozen weights"] == pytest.approx(item * P / 8, rel=1e-3)
    memory = Fsdp1Memory(case, BUCKETS, Timeline())
    memory.load()
    terms, held = states.resident(case, BUCKETS), memory.timeline._terms
    assert held["weights"] + held["frozen weights"] == pytest.approx(
        terms["weights"] + terms["frozen weights"], rel=1e-3
    )

"""The description of a wrapped model that the ranks compare with the plan."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardmake.core.private_names import private
from shardmake.train.engine_check import below_compiler, describe_engine, parameter_groups

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("reshards", [True, False])
def test_weights_around_the_blocks_do_not_hide_the_strategy(reshards: bool) -> None:
    """Accelerate leaves it to FSDP2 for the root, which has weights of its own under PEFT: the final norm."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    fully_shard(model[0], reshard_after_forward=reshards)
    fully_shard(model)
    assert describe_engine(model, "bf16").reshard_after_forward is reshards


def test_the_group_of_torch_2_11_describes_fsdp_as_the_groups_of_later_versions() -> None:
    """It has one group or none, in an attribute that later versions keep as a property."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model)
    for module, number in ((model[0], 1), (model, 0)):
        state = private(private(module).get_fsdp_state())
        older = SimpleNamespace(_fsdp_param_group=state.fsdp_param_group)
        assert parameter_groups(private(older)) == parameter_groups(state)
        assert len(parameter_groups(state)) == number


def test_a_compiled_model_has_the_engine_that_it_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate compiles DDP as a whole. FSDP1 is an engine that no plan has."""
    monkeypatch.setenv("WORLD_SIZE", "2")  # of one rank, every engine is DDP
    wrapped = DistributedDataParallel(torch.nn.Linear(4, 4))
    sharded = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    for model, engine in ((wrapped, "ddp"), (sharded, "FullyShardedDataParallel")):
        assert below_compiler(torch.compile(model)) is model is below_compiler(model)
        assert describe_engine(torch.compile(model), "bf16") == describe_engine(model, "bf16")
        assert describe_engine(model, "no").engine == engine


@pytest.mark.parametrize("in_place", [True, False])
def test_fsdp2_of_a_compiled_model_stays_fsdp2(in_place: bool) -> None:
    """FSDP2 has its state on the compiler's wrapper, and layers that are compiled in place have none."""
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model: torch.nn.Module = (plain.compile() or plain) if in_place else torch.compile(plain)
    fully_shard(model)
    assert below_compiler(model) is model
    found = describe_engine(model, "bf16")
    assert (found.engine, found.fsdp_version) == ("fsdp", 2)

"""The description of a wrapped model that the ranks compare with the plan."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from shardmake.train.engine_check import describe_engine


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("reshards", [True, False])
def test_weights_around_the_blocks_do_not_hide_the_strategy(reshards: bool) -> None:
    """Accelerate leaves it to FSDP2 for the root, which has weights of its own under PEFT: the final norm."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    fully_shard(model[0], reshard_after_forward=reshards)
    fully_shard(model)
    assert describe_engine(model, "bf16")["reshard_after_forward"] is reshards

from shardmake.memory.fsdp import Fsdp2Memory
from shardmake.memory.states import HEAD, units
from shardmake.memory.timeline import Timeline
from tests.unit.memory.llama_8b import BUCKETS, scenario


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

"""The events of one micro step, simulated or traced, replayed on a timeline with a sharding's own allocations.

Events, in order: ``alloc number bytes``, ``free number``, ``forward block``, ``forward end block``, ``loss``,
``backward``, ``backward block block``, ``grad number name`` (a weight's gradient is complete; number is its storage).
"""

from collections.abc import Sequence
from typing import Any

from shardmake.memory.ddp import DdpMemory
from shardmake.memory.timeline import Timeline

StepEvents = Sequence[Sequence[Any]]


def replay(events: StepEvents, memory: DdpMemory, timeline: Timeline, last_block: int) -> None:
    """Add one forward and backward pass to ``timeline``."""
    keys: dict[int, int] = {}
    sizes: dict[int, int] = {}
    kept: set[int] = set()
    term = "activations"
    timeline.enter("forward")
    for event in events:
        match event[0]:
            case "alloc":
                keys[event[1]] = timeline.alloc(event[2], term)
                sizes[event[1]] = event[2]
            case "free":
                if event[1] not in kept:
                    timeline.free(keys.pop(event[1]))
            case "grad":
                number, name = event[1], event[2]
                key = keys.get(number) if number is not None else None
                if memory.gradient(name, sizes.get(number, 0), key):
                    kept.add(number)
            case "forward":
                memory.before_forward(event[1])
            case "forward end":
                memory.after_forward(event[1])
                if event[1] == last_block:
                    memory.before_head()
                    term = "logits and loss"
                    timeline.enter("cross entropy")
            case "backward":
                memory.start_backward()
            case "backward block":
                term = "backward temporaries"
                if event[1] == last_block:
                    timeline.enter("backward")
                memory.before_backward(event[1])
    memory.end_backward()

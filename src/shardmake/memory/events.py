"""The script of one micro step, from the closed form or from a trace, played on a timeline with an engine.

Events, in order: ``alloc number bytes``, ``free number``, ``forward block``, ``forward end block``, ``loss``,
``backward``, ``backward block block``, ``grad number name`` (the gradient of a weight is whole; number is its storage).
"""

from collections.abc import Sequence
from typing import Any

from shardmake.memory.ddp import MemoryEngine
from shardmake.memory.timeline import Timeline

StepEvents = Sequence[Sequence[Any]]


def replay(script: StepEvents, engine: MemoryEngine, timeline: Timeline, last_block: int) -> None:
    """One forward and backward pass."""
    keys: dict[int, int] = {}
    sizes: dict[int, int] = {}
    kept: set[int] = set()
    term = "activations"
    timeline.enter("forward")
    for event in script:
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
                if engine.gradient(name, sizes.get(number, 0), key):
                    kept.add(number)
            case "forward":
                engine.before_forward(event[1])
            case "forward end":
                engine.after_forward(event[1])
                if event[1] == last_block:
                    engine.before_head()
                    term = "logits and loss"
                    timeline.enter("cross entropy")
            case "backward":
                engine.start_backward()
            case "backward block":
                term = "backward temporaries"
                if event[1] == last_block:
                    timeline.enter("backward")
                engine.before_backward(event[1])
    engine.end_backward()

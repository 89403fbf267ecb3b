"""Memory of one rank under DDP, beside the activations of the model.

`DdpMemory` puts the states of one rank on a `Timeline`. Its methods are called before and after a layer, when a
gradient is complete, at the end of a backward pass and at the optimizer's step. ZeRO and FSDP override them.
`replay` calls them in the order of the events of a micro step, simulated or traced. Source: torch's ``reducer.cpp``.

Events, in order: ``alloc number bytes``, ``free number``, ``forward block``, ``forward end block``, ``loss``,
``backward``, ``backward block block``, ``grad number name`` (a weight's gradient is complete; number is its storage).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from shardmake.memory import states
from shardmake.memory.buckets import Buckets
from shardmake.memory.scenario import Scenario
from shardmake.memory.states import EMBEDDING, HEAD, Unit
from shardmake.memory.timeline import COMPUTE, Timeline

StepEvents = Sequence[Sequence[Any]]
StepParts = Sequence[Timeline | Sequence[Any]]
FLAT = (
    "model buffers", "cuBLAS workspaces", "communication buffers", "persistent weights", "exchanged tokens",
    "gradients",
)  # fmt: skip


@dataclass
class DdpMemory:
    """DDP or a single GPU: whole weights, whole gradients, whole optimizer states."""

    scenario: Scenario
    buckets: Buckets
    timeline: Timeline

    def __post_init__(self) -> None:
        model, adapters = self.scenario.model.tensors, self.scenario.split.adapters
        self.sizes = {tensor.name: tensor.numel for tensor in (*model, *adapters)}
        self.trained = [tensor.numel for tensor in self.scenario.split.trained(self.scenario.model)]
        self.gradients: dict[str, int] = {}
        self._state_bytes = 0

    def load(self) -> None:
        """Allocate what stays on the GPU; optimizers create their states in the first step."""
        terms = states.resident(self.scenario, self.buckets)
        self._state_bytes = terms.pop("optimizer states", 0)
        for term, size in terms.items():
            self._allocate(term, size)

    def _allocate(self, term: str, size: int) -> list[int]:
        """Allocate ``size`` bytes tensor by tensor, or flat for the terms in `FLAT`.

        Optimizers create the two moments of a tensor, then those of the next (`_init_group` of torch's ``adam.py``).
        """
        if term in FLAT:
            return [self.timeline.alloc(size, term)]
        parts = list(self.sizes.values()) if term == "frozen weights" else self.trained
        if term == "optimizer states":
            parts = [part for part in parts for _ in range(2)]
        whole = sum(parts)
        return [self.timeline.alloc(size * part // whole, term) for part in parts]

    def _allocate_briefly(self, size: int, term: str, stream: int = COMPUTE) -> None:
        """Allocate ``size`` bytes and free them at once."""
        if size:
            self.timeline.free(self.timeline.alloc(size, term, stream))

    def before_forward(self, block: int) -> None:
        """Gather a layer for its forward pass; before the first one, use the embedding."""
        if block == 0:
            self._gather(EMBEDDING)
            self.after_forward(EMBEDDING)
        self._gather(block)

    def after_forward(self, unit: Unit) -> None:
        """End the forward pass of a layer or the embedding."""

    def before_head(self) -> None:
        """Gather the final norm and the head, for which the loss follows."""
        self._gather(HEAD)

    def _gather(self, unit: Unit) -> None:
        """Gather the weights of ``unit`` if ranks share them."""

    def before_backward(self, block: int) -> None:
        """Begin a layer's backward pass; the one of the layer after it has ended."""

    def start_backward(self) -> None:
        """Begin a backward pass."""

    def gradient(self, name: str, key: int | None) -> bool:
        """Take the complete gradient of ``name`` under ``key``; return True to keep it."""
        if name in self.gradients or key is None:
            return False
        self.timeline.rename(key, "gradients")
        self.gradients[name] = key
        return True

    def end_backward(self) -> None:
        """End a backward pass."""

    def step(self) -> None:
        """Run the optimizer's step and free the gradients."""
        self._make_states()
        self._update()
        self._drop_gradients()

    def _make_states(self) -> None:
        if self._state_bytes:
            self._allocate("optimizer states", self._state_bytes)
            self._state_bytes = 0

    def _update(self) -> None:
        self._allocate_briefly(states.step_temporaries(self.scenario, self.buckets), "optimizer temporaries")

    def _drop_gradients(self) -> None:
        self.timeline.free(*self.gradients.values())
        self.gradients.clear()


def parts_of(events: StepEvents, last_block: int) -> StepParts:
    """Return the ``events`` of a micro step for `replay`; those in a row that no sharding changes are one part.

    The others are markers, and gradients of weights, which may be kept; each ends with the term of its memory.
    """
    freed = {event[1] for event in events if event[0] == "free"}
    apart = {one[1] for one in events if one[0] == "grad" or (one[0] == "alloc" and one[1] not in freed)}
    parts: list[Timeline | Sequence[Any]] = []
    keys: dict[int, int] = {}
    whole, timeline, term = Timeline(keys=count(-1, -1)), None, "activations"  # other keys are not negative
    for event in events:
        kind = event[0]
        if kind in ("alloc", "free") and event[1] not in apart:
            if timeline is None:
                parts.append(timeline := Timeline("", live=whole.live, keys=whole.keys))
            if kind == "alloc":
                keys[event[1]] = timeline.alloc(event[2], term)
            else:
                timeline.free(keys.pop(event[1]))
            continue
        parts.append([*event, term])
        timeline = None
        if kind == "forward end" and event[1] == last_block:
            term = "logits and loss"
        elif kind == "backward block":
            term = "backward temporaries"
    return parts


def replay(parts: StepParts, memory: DdpMemory, timeline: Timeline, last_block: int) -> None:
    """Add one forward and backward pass to ``timeline``."""
    keys: dict[int, int] = {}
    kept: set[int] = set()
    timeline.enter("forward")
    for part in parts:
        if isinstance(part, Timeline):
            timeline.repeat(part)
            continue
        match part[0]:
            case "alloc":
                keys[part[1]] = timeline.alloc(part[2], part[-1])
            case "free":
                if part[1] not in kept:
                    timeline.free(keys.pop(part[1]))
            case "grad":
                if part[2] in memory.scenario.split.frozen_names:  # of a traced step
                    continue
                if memory.gradient(part[2], keys.get(part[1])):
                    kept.add(part[1])
            case "forward":
                memory.before_forward(part[1])
            case "forward end":
                memory.after_forward(part[1])
                if part[1] == last_block:
                    memory.before_head()
                    timeline.enter("cross entropy")
            case "backward":
                memory.start_backward()
            case "backward block":
                if part[1] == last_block:
                    timeline.enter("backward")
                memory.before_backward(part[1])
    memory.end_backward()

"""What a training engine allocates around the model's own forward and backward pass.

A `MemoryEngine` holds the states of one rank on a `Timeline` and reacts during the step: before and after a layer, when
a gradient is whole, at the end of a backward pass, at the optimizer's step. This one is DDP (``reducer.cpp``) or a
single GPU; ZeRO and FSDP follow in modules of their own.
"""

from dataclasses import dataclass, field
from math import ceil

from shardmake.memory import states
from shardmake.memory.buckets import Buckets
from shardmake.memory.scenario import Scenario
from shardmake.memory.timeline import COMPUTE, Timeline

FLAT = ("model buffers", "cuBLAS workspaces", "communication buffers", "weights kept whole", "gradients")


@dataclass
class MemoryEngine:
    """DDP or a single GPU: whole weights, whole gradients, whole optimizer states."""

    scenario: Scenario
    buckets: Buckets
    timeline: Timeline
    sizes: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, adapters = self.scenario.model.tensors, self.scenario.split.adapters
        self.sizes = {tensor.name: tensor.numel for tensor in (*model, *adapters)}
        self.trained = [tensor.numel for tensor in states.trained_tensors(self.scenario)]
        self._late = 0

    def load(self) -> None:
        """Put on the GPU what stays there; optimizers make their states in the first step."""
        terms = states.resident(self.scenario, self.buckets)
        self._late = terms.pop("optimizer states", 0)
        for term, size in terms.items():
            self._take(term, size)

    def _take(self, term: str, size: int) -> list[int]:
        """Allocate ``size`` bytes as this engine holds them: tensor by tensor, or flat."""
        if term in FLAT:
            return [self.timeline.alloc(size, term)]
        parts = list(self.sizes.values()) if term == "frozen weights" else self.trained
        whole = sum(parts)
        return [self.timeline.alloc(size * part // whole, term) for part in parts]

    def _brief(self, size: int, term: str, stream: int = COMPUTE) -> None:
        """Take ``size`` bytes and give them back at once."""
        if size:
            self.timeline.free(self.timeline.alloc(size, term, stream))

    def before_forward(self, block: int) -> None:
        """A layer's forward pass begins."""

    def after_forward(self, block: int) -> None:
        """A layer's forward pass has ended."""

    def before_head(self) -> None:
        """The final norm, the head and the loss begin."""

    def before_backward(self, block: int) -> None:
        """A layer's backward pass begins; the one after it has ended."""

    def start_backward(self) -> None:
        """A backward pass begins."""

    def gradient(self, name: str, size: int, key: int | None) -> bool:
        """The gradient of ``name`` is whole, ``size`` bytes under ``key``; whether the engine keeps it."""
        if name in self.gradients or key is None:
            return False
        self.timeline.rename(key, "gradients")
        self.gradients[name] = key
        return True

    def end_backward(self) -> None:
        """A backward pass has ended."""

    def step(self) -> None:
        """The optimizer's step, after which gradients go."""
        self._make_states()
        if self.scenario.stack.foreach_optimizer:
            held = ceil(self.scenario.split.trainable / (self.scenario.shards if self.scenario.is_fsdp else 1))
            trained = states.trained_bytes(self.scenario) * held
            for key in self._take("optimizer temporaries", trained):
                self.timeline.free(key)
        self._update()
        if not self.scenario.stack.keeps_gradients:
            self._drop_gradients()

    def _make_states(self) -> None:
        if self._late:
            self._take("optimizer states", self._late)
            self._late = 0

    def _update(self) -> None:
        self._brief(states.step_temporaries(self.scenario, self.buckets), "optimizer temporaries")

    def _drop_gradients(self) -> None:
        for key in self.gradients.values():
            self.timeline.free(key)
        self.gradients.clear()
